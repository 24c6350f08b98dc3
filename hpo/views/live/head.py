"""A run in a few lines: how far it is, how fast, what is best, and what to do if it has stopped."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from hpo.results.names import together
from hpo.results.reader import EXHAUSTED
from hpo.store.evaluations import Evaluation
from hpo.text import clock, duration, named, number, printable, short, show_command
from hpo.views.front import ranges
from hpo.views.individuals import MOST_SHOWN
from hpo.views.live.standing import Standing

_PHASES = {
    "searching": ("searching", "bold"),
    "confirming": ("confirming the best", "bold"),
    "ending": ("ending", "bold"),
    "finished": ("finished", "bold green"),
    "stopped": ("stopped", "bold yellow"),
    "died": ("died", "bold red"),
    "unknown": ("running or not?", "bold yellow"),
}
_LONGEST = 500  # characters of a line
_STATES = ("complete", "pruned", "paused", "failed", "running", "waiting", "taken over", "promoted", "interrupted")
_NAMES = {"promoted": "promoted to go on", "interrupted": "interrupted and repeated"}
STYLES = {"failed": "red", "pruned": "yellow", "paused": "yellow"}


def head_lines(run: Standing, path: Path) -> list[Text]:
    """Return the lines; the first one has the phase and the progress."""
    title = Text.assemble(_PHASES[run.phase], f"  {progress(run)}  {printable(str(path))}")
    return [
        title,
        *(Text(printable(line), _PHASES[run.phase][1]) for line in _explain(run, path)),
        *_results(run, path),
    ]


def _results(run: Standing, path: Path) -> Iterator[Text]:
    counts = {_NAMES.get(state, state): (run.counts.get(state, 0), STYLES.get(state, "")) for state in _STATES}
    if not run.goes_on:
        counts["not ended"] = counts.pop("running")
    texts = [Text(f"{count} {name}", style) for name, (count, style) in counts.items() if count]
    yield Text(", ").join(texts) if texts else Text("no evaluation has begun")
    if run.best is None:
        yield Text("no evaluation is complete")
        return
    yield _describe_best(run, run.best)
    params, metrics = run.best.params, run.best.metrics
    if len(params) > MOST_SHOWN:
        yield Text(short(named(metrics), _LONGEST))
        yield Text(f"{show_command(path, run.best.label)} shows all {len(params)} hyperparameters", "dim")
    else:
        yield Text(short(named(together(params, metrics, ("loss", "trial"))), _LONGEST))
    if run.front:
        yield Text(printable(ranges(run.front, run.objectives)))
    if run.confirmed and run.confirmed[0]["mean"] is not None:
        first = run.confirmed[0]
        mean, seeds = number(first["mean"]), len(first["losses"])
        yield Text(f"confirmed: trial {first['trial']} is first, mean loss {mean} of {seeds} other seeds")


def _describe_best(run: Standing, best: Evaluation) -> Text:
    found = f"found {clock(run.at - best.ended)} ago on island {best.island} by worker {best.worker}"
    if best.imported_from:
        found = short(printable(f"taken over from {best.imported_from}"), _LONGEST)
    name = f"front {len(run.front)}  lowest loss" if run.front else "best"
    return Text.assemble((f"{name} {number(best.loss)}", "bold green"), f"  trial {best.trial}, {found}")


def progress(run: Standing) -> str:
    """Return how far a run is, how fast, and how much time is left, as text, as far as that is known."""
    text = f"{run.done}/{run.total} {'confirmations' if run.phase == 'confirming' else 'evaluations'}"
    if run.pace.per_minute is not None:
        rate = run.pace.per_minute
        text += f", {rate:.0f} a minute" if rate >= 10 else f", {rate:.2g} a minute"
    if run.pace.left is not None and run.done < run.total:
        left = duration(run.pace.left) if run.pace.left >= 60 else f"{run.pace.left:.0f} s"
        text += f", about {left} left{', then --confirm-seeds' if run.to_confirm else ''}"
    return text


def _explain(run: Standing, path: Path) -> list[str]:
    """Return a sentence on why a run does not go on, or may not; nothing if there is nothing to say."""
    go_on = f"To go on: the same command with --run-dir {shlex.quote(str(path))} --resume"
    if run.phase == "stopped" and run.why != EXHAUSTED:
        remedy = f" and {run.remedy}" if run.remedy else ""
        return [f"{run.why or 'no run is going on here'}. {go_on}{remedy}"]
    if run.phase == "died":
        return [f"no run is going on here: {run.why} has died. {go_on}"]
    return [run.why] if run.why else []
