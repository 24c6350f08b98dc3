"""The top-n tables of a run, from its summary."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.report.grid import empty_table, filled_table, table_text
from hpo.report.individuals import individuals_text
from hpo.report.rungs import rung_columns
from hpo.results.advice.result import Advice
from hpo.results.names import all_names, metrics_shown
from hpo.results.reader import RunReader
from hpo.results.summary import COUNTED
from hpo.results.winner import examined
from hpo.store.trials import Evaluation, label
from hpo.store.weights import trial_of_weights
from hpo.text import duration, named, number, printable, short, show_command, tenths, value

_MOST_REASONS = 10
_WIDTH = 100  # of sentences
_MOST_CHANGED = 8  # hyperparameters in a table
_OWN = ("loss", "trial", "island", "worker", "generation", "seconds")  # columns


def print_tables(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Print the counts, and the best individuals of each island and of the whole run."""
    for island in summary["islands"]:
        if island["top"]:
            print(_individuals(f"Island {island['island']}", island["top"], run_dir))
    print(_individuals("All islands", summary["top"], run_dir) if summary["top"] else "No evaluation succeeded.")
    if summary["confirmed"]:
        print(_confirmed(summary["confirmed"], run_dir))
        if not summary["unconfirmed"]:
            print(_told_apart(summary["confirmed"], summary["seed_noise"]))
    if summary["best"]:
        print(_propagators(summary["propagators"]))
    print(_ways(summary), end="")
    if summary["failures"]:
        print(_failures(summary["failures"], run_dir))
    counts = summary["evaluations"]
    states = [f"{counts[state]} {state}" for state in COUNTED if counts[state]]
    if summary["waiting"]:
        states.append(f"{summary['waiting']} waiting to be evaluated")
    if summary["unconfirmed"]:
        states.append(f"{summary['unconfirmed']} to confirm the best")
    taken_over = f"; {summary['taken_over']} taken over" if summary["taken_over"] else ""
    grown = f"; {summary['grown']} with more than one worker" if summary["grown"] else ""
    print(f"{', '.join(states) or 'no evaluations'}, of {counts['budget']}{taken_over}{grown}")


def print_times(summary: Mapping[str, Any]) -> None:
    """Print the wall time and how busy the workers were."""
    took = f"{duration(summary['wall_seconds'])}, " if summary["wall_seconds"] >= 0 else ""  # the clock was set
    print(f"{took}workers busy {summary['worker_busy_fraction']:.1%} of the time")


def print_advice(advice: Sequence[Advice]) -> None:
    """Print what follows from a run: what to do, why, and what to type; nothing where nothing follows."""
    lines = ["", "What to do next"] if advice else []
    for one in advice:
        for text, first in ((one.text, "- "), (one.evidence, "  ")):
            lines += textwrap.wrap(printable(text), _WIDTH, initial_indent=first, subsequent_indent="  ")
        lines += [f"      {printable(one.command)}"] if one.command else []
    if lines:
        print("\n".join(lines))


def print_winner(run: RunReader, winner: Evaluation) -> None:
    """Print on stderr how good the best individual is, and where its weights are."""
    kept, test = trial_of_weights(run.run_dir.weights), examined(run.run_dir, winner)
    names = metrics_shown(winner.metrics, winner.params, _OWN)
    metrics = {names[name]: value for name, value in winner.metrics.items()}
    lines = [f"trial {winner.trial}: {named({'loss': winner.loss, **metrics})}"]
    if test:
        lines.append(f"on test data: {named(test['metrics'])}")
    if kept is not None:
        whose = "its weights" if kept == winner.trial else f"the weights of trial {kept}"
        lines.append(f"{whose}: {run.run_dir.weights}")
    print(*map(printable, lines), sep="\n", file=sys.stderr)


def _individuals(title: str, entries: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    metrics = sorted({name for entry in entries for name in entry["metrics"]})
    names = metrics_shown(metrics, all_names(entry["params"] for entry in entries), _OWN)
    left = [
        ("loss", [number(entry["loss"]) for entry in entries]),
        *((names[name], [value(entry["metrics"].get(name, "")) for entry in entries]) for name in metrics),
    ]
    right = [(name, [str(entry[name]) for entry in entries]) for name in ("trial", "island", "worker", "generation")]
    right.append(("seconds", [tenths(entry["seconds"]) for entry in entries]))
    if any(entry["origin"] for entry in entries):
        right.append(("taken over from", [entry["origin"] for entry in entries]))
    more = show_command(run_dir, str(entries[0]["trial"]))
    return individuals_text(title, [entry["params"] for entry in entries], left, right, more)


def _confirmed(entries: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    left = [
        ("mean loss", [_known(entry["mean"]) for entry in entries]),
        ("deviation", [_known(entry["deviation"]) for entry in entries]),
        ("seeds", [str(len(entry["losses"]) + entry["failed"]) for entry in entries]),
        ("failed", [str(entry["failed"] or "") for entry in entries]),
        ("loss before", [number(entry["loss"]) for entry in entries]),
    ]
    right = [
        ("trial", [str(entry["trial"]) for entry in entries]),
        ("beside 1", ["" if entry["p"] is None else f"p = {entry['p']:.2g}" for entry in entries]),
    ]
    more = show_command(run_dir, str(entries[0]["trial"]))
    params = [entry["params"] for entry in entries]
    return individuals_text("Confirmed with other seeds", params, left, right, more)


def _known(figure: float | None) -> str:
    return "" if figure is None else number(figure)


def _told_apart(entries: Sequence[Mapping[str, Any]], noise: Mapping[str, float] | None) -> str:
    """Return whether the first individual is told apart from the others, and what seeds do to losses, where known."""
    compared = [(place, entry) for place, entry in enumerate(entries[1:], start=2) if entry["p"] is not None]
    same = [str(place) for place, entry in compared if not entry["told_apart"]]
    test = "Welch's t-test, Holm's correction"
    if len(entries) == 1:
        text = "There is nothing to tell it apart from: --top-n 3 would confirm three."
    elif not compared:
        text = "Too few losses to tell them apart."
    elif same:
        text = f"1 is not told apart from {', '.join(same)} ({test}, p >= 0.05)."
    else:
        text = f"1 is told apart from all others ({test}, p < 0.05)."
    if noise:
        text += (
            f"\nSeeds make {noise['share']:.0%} of the variance of these losses: those of one individual have a "
            f"standard deviation of {number(noise['deviation'])}."
        )
    return text + "\n"


def _propagators(bred: Sequence[Mapping[str, Any]]) -> str:
    table = empty_table()
    table.add_column("propagator", no_wrap=True)
    for column in ("evaluations", "improved the best", "own best"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in bred:
        own_best = "" if entry["best"] is None else number(entry["best"])
        table.add_row(printable(entry["propagator"]), str(entry["evaluations"]), str(entry["improved"]), own_best)
    return table_text("Propagators", table)


def _ways(summary: Mapping[str, Any]) -> str:
    """Return how individuals came to be what they are: the line of the best, and the rungs; empty without either."""
    texts = [_lineage(summary["lineage"])] if summary["lineage"] else []
    if summary["rungs"]:
        texts.append(table_text("Rungs, in epochs", filled_table(rung_columns(summary["rungs"]))))
    return "".join(f"{text}\n" for text in texts)


def _lineage(line: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of those from whom the best has come, with what has changed from one to the next."""
    names = all_names(entry["params"] for entry in line)
    changed = [name for name in names if len({entry["params"].get(name) for entry in line}) > 1]
    columns = [(name, [str(entry[name]) for entry in line]) for name in ("trial", "epochs")]
    columns.append(("loss", [number(entry["loss"]) for entry in line]))
    columns += [(name, [value(entry["params"].get(name, "")) for entry in line]) for name in changed[:_MOST_CHANGED]]
    return table_text("The line of the best: each began with the weights of the one above", filled_table(columns))


def _failures(reasons: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    table = empty_table()
    table.add_column("count", justify="right")
    table.add_column("reason", no_wrap=True)
    for entry in reasons[:_MOST_REASONS]:
        table.add_row(str(entry["count"]), short(printable(entry["reason"])))
    if rest := reasons[_MOST_REASONS:]:
        table.add_row(str(sum(entry["count"] for entry in rest)), f"{len(rest)} other reasons")
    first = label(reasons[0]["trial"], reasons[0]["confirms"] is not None)
    return table_text("Failures", table, f"{show_command(run_dir, first)} shows the traceback")
