"""The first lines of a run in a terminal: how far it is, how fast, and what is best."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from hpo.results.names import together
from hpo.results.reader import EXHAUSTED
from hpo.store.evaluations import Evaluation
from hpo.text import clock, duration, number, printable, show_command, value
from hpo.views.front import ranges
from hpo.views.individuals import MOST_SHOWN
from hpo.views.live.lines import Pen
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
_STATES = {
    **{state: state for state in ("complete", "pruned", "paused", "failed", "running", "waiting", "taken over")},
    "promoted": "promoted to go on",
    "interrupted": "interrupted and repeated",
}
STYLES = {"failed": "red", "pruned": "yellow", "paused": "yellow"}


class Head:
    """Writes the first lines of the run in a directory."""

    def __init__(self, path: Path, pen: Pen) -> None:
        self._path = path
        self._pen = pen

    def lines(self, run: Standing) -> Iterator[Text]:
        """Yield the lines, some of which may be too wide."""
        pen, (phase, style) = self._pen, _PHASES[run.phase]
        name = str(self._path)
        room = pen.width - len(phase) - 2
        yield pen.between(pen.text(name if len(name) <= room else f"...{name[3 - room :]}"), pen.text(phase, style))
        for line in textwrap.wrap(_why(run, name), pen.width)[:3]:
            yield pen.text(line, style)
        yield self._bar(run)
        yield self._counts(run)
        if run.best is None:
            yield pen.text("no evaluation is complete")
            return
        yield from self._found(run, run.best)

    def _found(self, run: Standing, best: Evaluation) -> Iterator[Text]:
        pen = self._pen
        yield self._best(run, best)
        yield pen.text(pen.some(_named(best), pen.width))
        if (many := len(best.params)) > MOST_SHOWN:
            yield pen.text(f"{show_command(self._path, best.label)} shows all {many} hyperparameters", "dim")
        if run.front:
            yield pen.text(ranges(run.front, run.objectives))
        if run.confirmed and run.confirmed[0]["mean"] is not None:
            first = run.confirmed[0]
            mean, seeds = number(first["mean"]), len(first["losses"])
            yield pen.text(f"confirmed: trial {first['trial']} is first, mean loss {mean} of {seeds} other seeds")

    def _bar(self, run: Standing) -> Text:
        text = progress(run)
        width = self._pen.width - len(text) - 2
        full = width * min(run.done, run.total) // run.total if width > 0 else 0
        done, rest = "#-" if self._pen.plain else "\u2501\u2500"
        return Text.assemble((done * full, "green"), (rest * (width - full), "dim"), "  ", text)

    def _counts(self, run: Standing) -> Text:
        names = _STATES if run.goes_on else {**_STATES, "running": "not ended"}
        counted = [
            Text(f"{run.counts[state]} {name}", STYLES.get(state, ""))
            for state, name in names.items()
            if run.counts.get(state)
        ]
        return Text(", ").join(counted) if counted else self._pen.text("no evaluation has begun")

    def _best(self, run: Standing, best: Evaluation) -> Text:
        found = f"found {clock(run.at - best.ended)} ago on island {best.island} by worker {best.worker}"
        if best.origin:
            found = f"taken over from {best.origin}"
        what = f"front {len(run.front)}  lowest loss" if run.front else "best"
        return Text(f"{what} {number(best.loss)}", "bold green").append_text(
            self._pen.text(f"  trial {best.trial}, {found}")
        )


def progress(run: Standing) -> str:
    """Return how far a run is, how fast, and how much time is left, as text, as far as that is known."""
    text = f"{run.done}/{run.total} {'confirmations' if run.phase == 'confirming' else 'evaluations'}"
    if run.pace.per_minute is not None:
        text += f", {_rate(run.pace.per_minute)} a minute"
    if run.pace.left is not None and run.done < run.total:
        text += f", about {_left(run.pace.left)} left{', then --confirm' if run.to_confirm else ''}"
    return text


def _why(run: Standing, path: str) -> str:
    """Return a sentence on why a run does not go on, or may not; empty if there is nothing to say."""
    go_on = f"To go on: the same command with --run-dir {shlex.quote(path)} --resume"
    if run.phase == "stopped" and run.why != EXHAUSTED:
        remedy = f" and {run.remedy}" if run.remedy else ""
        return f"{run.why or 'no run is going on here'}. {go_on}{remedy}"
    if run.phase == "died":
        return f"no run is going on here: {run.why} has died. {go_on}"
    return run.why


def _named(best: Evaluation) -> list[str]:
    """Return hyperparameters and metrics as texts; the metrics come first if there are many hyperparameters."""
    values = together(best.params, best.metrics, ("loss", "trial"))
    texts, count = [f"{printable(name)}={value(item)}" for name, item in values.items()], len(best.params)
    return texts if count <= MOST_SHOWN else [*texts[count:], *texts[:count]]


def _rate(per_minute: float) -> str:
    return f"{per_minute:.0f}" if per_minute >= 10 else f"{per_minute:.2g}"


def _left(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{seconds:.0f} s"
