"""Print a line for each evaluation that ends, and every 30 seconds the remaining time."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.display_names import merge_params_and_metrics
from hpo.store.evaluations import Evaluation, find_best, find_root
from hpo.store.pareto_front import FrontArchive
from hpo.text_format import (
    cut_text,
    format_duration,
    format_named_values,
    format_number,
    format_tenths,
    format_value,
    make_printable,
)
from hpo.views.times import SessionTimes, compute_pace

_POLL_SECONDS = 0.5
SECONDS_BETWEEN_ESTIMATES = 30.0
_RESERVED_COLUMNS = ("done", "island", "worker", "generation", "loss", "seconds")


def format_best_so_far(best: Evaluation | None, on_front: int) -> str:
    """Return the best result as text that begins a line of progress; "" before the first result.

    `on_front` is the number of individuals on the front; 0 if the loss is the only objective.
    """
    if best is None:
        return ""
    found = f"front of {on_front}, lowest loss" if on_front else "best so far"
    params = format_named_values(best.params)
    return f"{found} {format_number(best.loss)} (trial {best.trial}: {params}), "


class ProgressLines:
    """Formats a line for each evaluation that ends, with a mark if it is a new best.

    Evaluations in `past` that have ended get no line. Callers may change `budget`, the number of
    evaluations that the run has to do.
    """

    def __init__(
        self, past: Sequence[Evaluation], budget: int, objectives: Objectives = ONLY_LOSS
    ) -> None:
        self._roots: dict[int, int] = {}  # first trial of the individual of each trial
        self._ended: set[int] = set()  # trials
        # First trials of the individuals with at least one ended trial.
        self._done = {self._roots[evaluation.trial] for evaluation in self.take_ended(past)}
        self._archive = FrontArchive(objectives, [e for e in past if e.confirms is None])
        self._several = objectives.is_multi_objective
        self._mark = "front" if self._several else "best"
        self.budget = budget
        self._widths: dict[str, int] = {}

    @property
    def heading(self) -> str:
        """Line with the headings of the columns."""
        done = 2 * len(str(self.budget)) + 1
        mark = len(self._mark)
        return f"{'done':>{done}}  island  worker  generation      loss  {'':{mark}}  seconds"

    @property
    def done_count(self) -> int:
        """Number of individuals with a trial that has ended."""
        return len(self._done)

    @property
    def best_text(self) -> str:
        """Best result so far, as text that begins a line; empty before the first result."""
        found = self._archive.front
        return format_best_so_far(find_best(found), len(found) if self._several else 0)

    def take_ended(self, evaluations: Iterable[Evaluation]) -> list[Evaluation]:
        """Return the evaluations that have ended and were not returned earlier, sorted by end."""
        ended = []
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.trial):
            find_root(evaluation, self._roots)
            if evaluation.has_ended_in_run and evaluation.trial not in self._ended:
                self._ended.add(evaluation.trial)
                ended.append(evaluation)
        return sorted(ended, key=lambda evaluation: evaluation.ended)

    def format_line(self, evaluation: Evaluation) -> str:
        """Return the line for an ended evaluation, and count its individual in `done_count`."""
        self._done.add(find_root(evaluation, self._roots))
        confirms = "" if evaluation.confirms is None else f"confirms {evaluation.confirms}  "
        generation = "" if confirms else evaluation.generation  # A confirmation is not bred.
        mark = self._mark if not confirms and self._archive.add(evaluation) else ""
        loss = evaluation.end_state
        if evaluation.state == "complete":
            loss = format_number(evaluation.loss)
        seconds = format_tenths(evaluation.seconds)
        values = merge_params_and_metrics(evaluation.params, evaluation.metrics, _RESERVED_COLUMNS)
        texts = []
        for name, item in values.items():
            text = f"{make_printable(name)}={format_value(item)}"
            # Each column is as wide as its longest text so far.
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            texts.append(text.ljust(self._widths[name]))
        what = confirms + "  ".join(texts).rstrip()
        if evaluation.failure:
            what += f"  {cut_text(evaluation.failure)}"
        return (
            f"{self.done_count:>{len(str(self.budget))}}/{self.budget}  {evaluation.island:>6}  "
            f"{evaluation.worker:>6}  "
            f"{generation:>10}  {loss:>8}  {mark:{len(self._mark)}}  "
            f"{seconds:>7}  {what}"
        )


class ProgressPrinter:
    """Context manager whose thread prints a line for each evaluation that ends.

    Evaluations that have ended earlier are not printed. A line is printed after its evaluation was
    written to the study, so a crash does not lose evaluations that the user has seen.
    """

    def __init__(
        self,
        read_changes: Callable[[], Sequence[Evaluation]],
        budget: int,
        out: TextIO | None = sys.__stdout__,
        on_error: Callable[[str], None] = sys.exit,
        objectives: Objectives = ONLY_LOSS,
        times: SessionTimes | None = None,
    ) -> None:
        self._read_changes = read_changes
        self._budget = budget
        self._on_error = on_error
        self._out = out
        past = read_changes()
        self._lines = ProgressLines(past, budget, objectives)
        self._evaluations = {e.trial: e for e in past if e.state == "running"}
        self._times = times or SessionTimes(time.time())
        self._estimated_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._print_until_stopped, name="progress", daemon=True
        )

    def __enter__(self) -> ProgressPrinter:
        self._print_line(self._lines.heading)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._print_new()

    def _print_until_stopped(self) -> None:
        try:
            while not self._stopped.wait(_POLL_SECONDS):
                self._print_new()
        except Exception:
            self._on_error(traceback.format_exc().rstrip())

    def _print_new(self) -> None:
        changed = {evaluation.trial: evaluation for evaluation in self._read_changes()}
        self._evaluations |= changed
        for evaluation in self._lines.take_ended(changed.values()):
            self._print_line(self._lines.format_line(evaluation))
        if (
            time.monotonic() - self._estimated_at > SECONDS_BETWEEN_ESTIMATES
            and self._lines.done_count < self._budget
        ):
            self._estimated_at = time.monotonic()
            self._print_line(f"-- {self._lines.best_text}{self._format_times(time.time())}")

    def _format_times(self, now: float) -> str:
        """Return the time since the start of the session, and the estimated time until its end."""
        remaining = self._budget - self._lines.done_count
        pace = compute_pace(list(self._evaluations.values()), remaining, -math.inf, now)
        left = "nothing yet"
        if pace.seconds_left is not None:
            seconds = min(pace.seconds_left, max(0.0, self._times.stops_at - now))
            then = f", then {self._times.then}" if self._times.then else ""
            left = f"about {format_duration(seconds)} left{then}"
        # It is negative if the clock was set back.
        gone = format_duration(max(0.0, now - self._times.started_at))
        return f"{gone} gone, {left}"

    def _print_line(self, line: str) -> None:
        print(make_printable(line), file=self._out, flush=True)
