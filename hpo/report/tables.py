"""The top-n tables of a run, from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hpo.report.text import duration, number, value


def print_tables(summary: Mapping[str, Any]) -> None:
    """Print the counts, and the best individuals of each island and of the whole run."""
    for island in summary["islands"]:
        if island["top"]:
            print(_table(f"Island {island['island']}", island["top"]))
    print(_table("All islands", summary["top"]) if summary["top"] else "No evaluation succeeded.")
    counts = summary["evaluations"]
    states = [f"{counts[state]} {state}" for state in ("complete", "pruned", "failed", "running") if counts[state]]
    print(f"{', '.join(states) or 'no evaluations'}, of {counts['budget']}")


def print_times(summary: Mapping[str, Any]) -> None:
    """Print the wall time and how busy the workers were."""
    print(f"{duration(summary['wall_seconds'])}, workers busy {summary['worker_busy_fraction']:.1%} of the time")


def _table(title: str, entries: Sequence[Mapping[str, Any]]) -> str:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(entries[0]["params"])
    metrics = sorted({name for entry in entries for name in entry["metrics"]})
    for column in ("", "loss", *metrics, *names, "trial", "island", "worker", "generation", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, entry in enumerate(entries, start=1):
        table.add_row(
            str(place),
            number(entry["loss"]),
            *(value(entry["metrics"].get(name, "")) for name in metrics),
            *(value(entry["params"][name]) for name in names),
            *(str(entry[name]) for name in ("trial", "island", "worker", "generation")),
            f"{entry['seconds']:.1f}",
        )
    # As wide as it needs: under mpirun, output is a pipe, or a terminal that has 80 columns whatever the real one has.
    console = Console(width=1000, color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
    return "\n".join([title, *lines, ""])
