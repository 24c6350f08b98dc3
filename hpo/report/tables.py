"""The top-n tables of a run, from its summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hpo.reader import RunReader
from hpo.report.text import duration, named, number, printable, short, show_command, value
from hpo.trials import Evaluation, label
from hpo.weights import trial_of_weights
from hpo.winner import examined

_MOST_REASONS = 10


def print_tables(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Print the counts, and the best individuals of each island and of the whole run."""
    for island in summary["islands"]:
        if island["top"]:
            print(_table(f"Island {island['island']}", island["top"]))
    print(_table("All islands", summary["top"]) if summary["top"] else "No evaluation succeeded.")
    if summary["confirmed"]:
        print(_confirmed(summary["confirmed"]))
        if not summary["unconfirmed"]:
            print(_told_apart(summary["confirmed"]))
    if summary["best"]:
        print(_propagators(summary["propagators"]))
    if summary["failures"]:
        print(_failures(summary["failures"], run_dir))
    counts = summary["evaluations"]
    states = [f"{counts[state]} {state}" for state in ("complete", "pruned", "failed", "running") if counts[state]]
    if summary["waiting"]:
        states.append(f"{summary['waiting']} waiting to be evaluated")
    if summary["unconfirmed"]:
        states.append(f"{summary['unconfirmed']} to confirm the best")
    taken_over = f"; {summary['taken_over']} taken over" if summary["taken_over"] else ""
    print(f"{', '.join(states) or 'no evaluations'}, of {counts['budget']}{taken_over}")


def print_times(summary: Mapping[str, Any]) -> None:
    """Print the wall time and how busy the workers were."""
    print(f"{duration(summary['wall_seconds'])}, workers busy {summary['worker_busy_fraction']:.1%} of the time")


def print_winner(run: RunReader, winner: Evaluation) -> None:
    """Print on stderr how good the best individual is, and where its weights are."""
    kept, test = trial_of_weights(run.run_dir.weights), examined(run.run_dir, winner)
    lines = [f"trial {winner.trial}: {named({'loss': winner.loss, **winner.metrics})}"]
    if test:
        lines.append(f"on test data: {named(test['metrics'])}")
    if kept is not None:
        whose = "its weights" if kept == winner.trial else f"the weights of trial {kept}"
        lines.append(f"{whose}: {run.run_dir.weights}")
    print(*lines, sep="\n", file=sys.stderr)


def _table(title: str, entries: Sequence[Mapping[str, Any]]) -> str:
    table = empty_table()
    names = list(entries[0]["params"])
    metrics = sorted({name for entry in entries for name in entry["metrics"]})
    origin = ["taken over from"] if any(entry["origin"] for entry in entries) else []
    for column in ("", "loss", *metrics, *names, "trial", "island", "worker", "generation", "seconds", *origin):
        table.add_column(column, justify="right", no_wrap=True)
    for place, entry in enumerate(entries, start=1):
        table.add_row(
            str(place),
            number(entry["loss"]),
            *(value(entry["metrics"].get(name, "")) for name in metrics),
            *(value(entry["params"][name]) for name in names),
            *(str(entry[name]) for name in ("trial", "island", "worker", "generation")),
            f"{entry['seconds']:.1f}",
            *(entry["origin"] for _ in origin),
        )
    return table_text(title, table)


def _confirmed(entries: Sequence[Mapping[str, Any]]) -> str:
    table = empty_table()
    names = list(entries[0]["params"])
    for column in ("", "mean loss", "deviation", "seeds", "failed", "loss before", *names, "trial", "beside 1"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, entry in enumerate(entries, start=1):
        table.add_row(
            str(place),
            *("" if entry[name] is None else number(entry[name]) for name in ("mean", "deviation")),
            str(len(entry["losses"]) + entry["failed"]),
            str(entry["failed"] or ""),
            number(entry["loss"]),
            *(value(entry["params"][name]) for name in names),
            str(entry["trial"]),
            "" if entry["p"] is None else f"p = {entry['p']:.2g}",
        )
    return table_text("Confirmed with other seeds", table)


def _told_apart(entries: Sequence[Mapping[str, Any]]) -> str:
    """Say whether the first individual is told apart from the others, as far as there are losses to compare."""
    compared = [(place, entry) for place, entry in enumerate(entries[1:], start=2) if entry["p"] is not None]
    same = [str(place) for place, entry in compared if not entry["told_apart"]]
    test = "Welch's t-test, Holm's correction"
    if len(entries) == 1:
        text = "There is nothing to tell it apart from: --top-n 3 would confirm three."
    elif not compared:
        text = "Too few losses to tell them apart: --confirm 3 or more would do."
    elif same:
        text = f"1 is not told apart from {', '.join(same)} ({test}, p >= 0.05): more seeds may do it."
    else:
        text = f"1 is told apart from all others ({test}, p < 0.05)."
    return text + "\n"


def _propagators(bred: Sequence[Mapping[str, Any]]) -> str:
    table = empty_table()
    table.add_column("propagator", no_wrap=True)
    for column in ("evaluations", "improved the best", "own best"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in bred:
        own_best = "" if entry["best"] is None else number(entry["best"])
        table.add_row(entry["propagator"], str(entry["evaluations"]), str(entry["improved"]), own_best)
    return table_text("Propagators", table)


def _failures(reasons: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    table = empty_table()
    table.add_column("count", justify="right")
    table.add_column("reason", no_wrap=True)
    for entry in reasons[:_MOST_REASONS]:
        table.add_row(str(entry["count"]), short(entry["reason"]))
    if rest := reasons[_MOST_REASONS:]:
        table.add_row(str(sum(entry["count"] for entry in rest)), f"{len(rest)} other reasons")
    first = label(reasons[0]["trial"], reasons[0]["confirms"] is not None)
    return table_text("Failures", table, f"{show_command(run_dir, first)} shows the traceback")


def empty_table() -> Table:
    """Make a table without columns, in the style of all."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def table_text(title: str, table: Table, *below: str, width: int = 1000) -> str:
    """Write a table with a title above it, lines below it, and an empty one."""
    # As wide as it needs: under mpirun, output is a pipe, or a terminal that has 80 columns whatever the real one has.
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table, markup=False)
    lines = [printable(line).rstrip() for line in [*captured.get().split("\n"), *below] if line.strip()]
    return "\n".join([title, *lines, ""])
