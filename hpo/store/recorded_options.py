"""Define the command-line options that each session (start of a run) records in run.json. Convert them to JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpo.store.json_values import is_number, is_text, is_whole_number

_OFF = "off"


@dataclass(frozen=True)
class RecordedOption:
    """Describe a command-line option that is recorded in run.json.

    Attributes:
        name: Name of the option. A switch, if given, negates its default.
        default: Value if the option is not given.
        is_valid: Function that returns whether a JSON value is valid for the option.
        off_value: Number to which the value ``off`` is converted; None if the option cannot be switched off.
        is_kept_on_resume: Whether a resumed run keeps the value. Options that depend on the machine or on the job are
            not kept.
    """

    name: str
    default: Any
    is_valid: Callable[[Any], bool]
    off_value: float | None = None
    is_kept_on_resume: bool = True

    def format_words(self, value: Any) -> list[str]:
        """Return the command-line arguments that set the option to this value."""
        if isinstance(value, bool):
            return [self.name]
        if isinstance(value, list):
            return [self.name, ",".join(value)]
        is_integral = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return [self.name, str(int(value) if is_integral else value)]


def _is_switch(value: object) -> bool:
    return type(value) is bool


def _is_count(value: object) -> bool:
    return is_whole_number(value) and value != 0


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_list(value: object) -> bool:
    return type(value) is list and bool(value) and all(map(is_text, value))


# The keys are fields of hpo.run.options.Options.
OPTIONS: dict[str, RecordedOption] = {
    "evaluations": RecordedOption("--evaluations", 64, _is_count),
    "islands": RecordedOption("--islands", None, _is_count),
    "ranks_per_worker": RecordedOption("--ranks-per-worker", None, _is_count, is_kept_on_resume=False),
    "propagators": RecordedOption("--propagators", ["ga"], _is_list),
    "migration_probability": RecordedOption("--migration-probability", 0.9, _is_number),
    "pollination": RecordedOption("--migration", True, _is_switch),
    "seed": RecordedOption("--seed", 0, is_whole_number),
    "top_n": RecordedOption("--top-n", 3, _is_count),
    "pbt": RecordedOption("--pbt", False, _is_switch),
    "confirm_seeds": RecordedOption("--confirm-seeds", 0, is_whole_number),
    "collective_timeout": RecordedOption("--collective-timeout", 600.0, _is_number),
    "evaluation_timeout": RecordedOption("--evaluation-timeout", None, _is_number, off_value=math.inf),
    "fresh_trainers": RecordedOption("--fresh-trainers", False, _is_switch),
    "checkpoint_every": RecordedOption("--checkpoint-every", None, _is_number, off_value=math.inf),
    "max_failures": RecordedOption("--max-failures", None, is_whole_number),
    "pruner": RecordedOption("--pruner", "none", is_text),
    "target_loss": RecordedOption("--target-loss", None, _is_number, off_value=-math.inf),
}


def to_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the recorded options from `values`, and convert their values to JSON."""
    chosen = {name: values[name] for name in OPTIONS if name in values}
    lists = {name: list(value) for name, value in chosen.items() if isinstance(value, tuple)}
    off = {name: _OFF for name, value in chosen.items() if isinstance(value, float) and math.isinf(value)}
    return {**chosen, **lists, **off}


def from_json(name: str, value: Any) -> Any:
    """Convert the JSON value of an option to the value in `hpo.run.options.Options`."""
    if value == _OFF and OPTIONS[name].off_value is not None:
        return OPTIONS[name].off_value
    return tuple(value) if isinstance(value, list) else value


def is_valid_value(name: str, value: Any) -> bool:
    """Return whether a JSON value is valid for an option. All values of unknown options are valid."""
    option = OPTIONS.get(name)
    if option is None:
        return True
    if value is None:
        return option.default is None
    return option.is_valid(value) or (value == _OFF and option.off_value is not None)
