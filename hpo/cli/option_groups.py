"""Define groups of options with headings, for `--help` and for the command-line reference in the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

GROUPS: dict[str, tuple[str, ...]] = {
    "Budget": (
        *("evaluations", "generations", "time_limit", "evaluation_timeout", "collective_timeout"),
        *("target_loss", "max_failures"),
    ),
    "Layout": ("ranks_per_worker", "islands", "fresh_trainers"),
    "Search": (
        *("settings", "propagators", "seed", "migration_probability", "pollination", "pbt"),
        *("enqueue", "warm_start", "confirm_seeds"),
    ),
    "Early stopping": ("pruner", "first_report"),
    "Checkpoints": ("resume", "checkpoint_every"),
    "Output": ("run_dir", "storage", "top_n", "trackers", "log_level"),
    "Program behind --": ("space", "loss", "metrics", "flags", "resume_args"),
}
"""The headings, each with the names of its options. All other options are under "Options"."""


class GroupedCommand(TyperCommand):
    """A command of typer whose `--help` lists the options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and each group of options as a section of `--help`. Typer calls it."""
        for heading, parameters in group_parameters(self.get_params(ctx)):
            records = [parameter.get_help_record(ctx) for parameter in parameters]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])


def group_parameters(parameters: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield pairs of a heading and its parameters: first "Arguments", then the groups in `GROUPS`, then "Options"."""
    by_name = {parameter.name: parameter for parameter in parameters if parameter.param_type_name == "option"}
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    if arguments:
        yield "Arguments", arguments
    for heading, names in GROUPS.items():
        if found := [by_name.pop(name) for name in names if name in by_name]:
            yield heading, found
    if by_name:
        yield "Options", list(by_name.values())
