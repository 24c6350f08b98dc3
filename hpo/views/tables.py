"""The top-n tables of a run, from its summary."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.advice.result import Advice
from hpo.results.names import all_names, metrics_shown
from hpo.results.reader import RunReader
from hpo.results.summary import COUNTED
from hpo.results.winner import examined
from hpo.store.evaluations import Evaluation, label
from hpo.store.front import far_apart
from hpo.store.run_dir import RunDir
from hpo.store.weights import kept_weights, trial_of_weights
from hpo.text import counted, duration, named, number, numbers, printable, short, show_command, tenths, value
from hpo.views.expected import expected_text
from hpo.views.front import (
    costs_of_entries,
    improved,
    objectives_first,
    others_of_it,
    together,
    trial_text,
    what_it_is,
    worth,
)
from hpo.views.grid import empty_table, filled_table, table_text
from hpo.views.individuals import individuals_text, names_told_apart
from hpo.views.rungs import rung_columns

_MOST_REASONS = 10
_MOST_OF_FRONT = 20  # individuals of the front in its table, or as many as are asked for
_WIDTH = 100  # of sentences
_MOST_CHANGED = 8  # hyperparameters in a table
_OWN = ("loss", "trial", "island", "worker", "generation", "seconds")  # columns


def print_tables(summary: Mapping[str, Any], run_dir: Path, objectives: Objectives = ONLY_LOSS) -> None:
    """Print the counts, and the best individuals of each island and of the whole run."""
    for island in summary["islands"]:
        if island["top"]:
            print(_individuals(f"Island {island['island']}", island["top"], summary, run_dir, objectives))
    print(_all_islands(summary, run_dir, objectives))
    if summary["confirmed"]:
        print(_confirmed(summary, run_dir))
        if not summary["unconfirmed"]:
            print(_told_apart(summary["confirmed"], summary["seed_noise"]))
    if summary["best"]:
        print(_propagators(summary["propagators"], improved(objectives)))
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


def print_winner(run: RunReader, chosen: Evaluation, by: str | None = None) -> None:
    """Print on stderr how good the best individual is, and where its weights are; `by` says in what it is the best."""
    objectives, test = run.manifest.objectives, examined(run.run_dir, chosen)
    names = metrics_shown(chosen.metrics, chosen.params, _OWN)
    metrics = {names[name]: chosen.metrics[name] for name in objectives_first(chosen.metrics, objectives)}
    lines = [f"trial {chosen.trial}: {named({'loss': chosen.loss, **metrics})}"]
    if objectives.are_several and by is None:
        lines.append(others_of_it(run.front(), objectives))
    if test:
        lines.append(f"on test data: {named(test['metrics'])}")
    lines += _weights(run.run_dir, chosen)
    print(*map(printable, lines), sep="\n", file=sys.stderr)


def _weights(run_dir: RunDir, chosen: Evaluation) -> list[str]:
    """Return a line that says where an individual's weights are, or whose there are; none without any."""
    if own := kept_weights(run_dir, chosen.trial):
        return [f"its weights: {own}"]
    kept = trial_of_weights(run_dir.weights)
    return [] if kept is None else [f"the weights of trial {kept}: {run_dir.weights}"]


def _all_islands(summary: Mapping[str, Any], run_dir: Path, objectives: Objectives) -> str:
    """Return the table of the best of the whole run."""
    if summary["front"]:
        return _front(summary, run_dir, objectives)
    if summary["top"]:
        text = _individuals("All islands", summary["top"], summary, run_dir, objectives)
        expected = "\n".join(textwrap.wrap(expected_text(summary), _WIDTH))
        return f"{text}{expected}\n" if expected and not summary["confirmed"] else text
    return "No evaluation succeeded."


def _front(summary: Mapping[str, Any], run_dir: Path, objectives: Objectives) -> str:
    """Return the table of the front, and what it is; of a long one, ties in a row, and rows that are far apart."""
    front, most = summary["front"], max(_MOST_OF_FRONT, len(summary["top"]))
    entries = front if len(front) <= most else together(front, objectives)
    shown = [entries[place] for place in far_apart(costs_of_entries(entries, objectives), most)]
    lines = textwrap.wrap(printable(what_it_is(len(front), objectives)), _WIDTH)
    lines += textwrap.wrap(printable(worth(summary["hypervolume"], objectives)), _WIDTH)
    if rest := len(front) - len(shown):
        command = f"hpo top {shlex.quote(str(run_dir))} -n {len(front)}"
        ties = "; +1 is another trial with the same values" if len(entries) < len(front) else ""
        lines.insert(0, printable(f"{counted(rest, 'other')} of the front: {command} shows all{ties}"))
    return "\n".join([_individuals("The Pareto front", shown, summary, run_dir, objectives) + lines[0], *lines[1:], ""])


def _individuals(
    title: str,
    entries: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    run_dir: Path,
    objectives: Objectives,
) -> str:
    metrics = objectives_first(sorted({name for entry in entries for name in entry["metrics"]}), objectives)
    names = metrics_shown(metrics, all_names(entry["params"] for entry in entries), _OWN)
    left = [
        ("loss", numbers([entry["loss"] for entry in entries])),
        *((names[name], numbers([entry["metrics"].get(name) for entry in entries])) for name in metrics),
    ]
    right = [("trial", [trial_text(entry) for entry in entries])]
    right += [(name, [str(entry[name]) for entry in entries]) for name in ("island", "worker", "generation")]
    right.append(("seconds", [tenths(entry["seconds"]) for entry in entries]))
    if any(entry["origin"] for entry in entries):
        right.append(("taken over from", [entry["origin"] for entry in entries]))
    more = show_command(run_dir, str(entries[0]["trial"]))
    return individuals_text(title, [entry["params"] for entry in entries], left, right, more, names_told_apart(summary))


def _confirmed(summary: Mapping[str, Any], run_dir: Path) -> str:
    entries = summary["confirmed"]
    left = [
        ("mean loss", numbers([entry["mean"] for entry in entries])),
        ("deviation", [_known(entry["deviation"]) for entry in entries]),
        ("seeds", [str(len(entry["losses"]) + entry["failed"]) for entry in entries]),
        ("failed", [str(entry["failed"] or "") for entry in entries]),
        ("loss before", numbers([entry["loss"] for entry in entries])),
    ]
    right = [
        ("trial", [str(entry["trial"]) for entry in entries]),
        ("beside 1", ["" if entry["p"] is None else f"p = {entry['p']:.2g}" for entry in entries]),
    ]
    more = show_command(run_dir, str(entries[0]["trial"]))
    params = [entry["params"] for entry in entries]
    return individuals_text("Confirmed with other seeds", params, left, right, more, names_told_apart(summary))


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


def _propagators(bred: Sequence[Mapping[str, Any]], improved: str) -> str:
    table = empty_table()
    table.add_column("propagator", no_wrap=True)
    for column in ("evaluations", improved, "own best"):
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
    columns.append(("loss", numbers([entry["loss"] for entry in line])))
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
    more = "the traceback" if reasons[0]["has_traceback"] else "more of it"
    return table_text("Failures", table, f"{show_command(run_dir, first)} shows {more}")
