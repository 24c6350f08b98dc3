"""A run's progress as plain lines: one for each evaluation that has ended, and now and then the time left."""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.names import together
from hpo.store.evaluations import Evaluation, best, find_root
from hpo.store.front import Archive
from hpo.text import duration, number, printable, short, tenths, value
from hpo.views.front import so_far
from hpo.views.pace import pace

_POLL_SECONDS = 0.5
SECONDS_BETWEEN_ESTIMATES = 30.0
_COLUMNS = ("done", "island", "worker", "generation", "loss", "seconds")


class Lines:
    """Makes a line for each evaluation that ends; those that had ended before are in `past`; `budget` may change.

    An evaluation is marked that is the best when it ends; with several objectives, one that joins the front.
    """

    def __init__(self, past: Sequence[Evaluation], budget: int, objectives: Objectives = ONLY_LOSS) -> None:
        self._roots: dict[int, int] = {}  # first trials of individuals, by trial
        self._ended: set[int] = set()  # trials
        # First trials of the individuals that have ended at least once.
        self._done = {self._roots[evaluation.trial] for evaluation in self.take(past)}
        self._archive = Archive(objectives, [one for one in past if one.confirms is None])
        self._several = objectives.are_several
        self._mark = "front" if self._several else "best"
        self.budget = budget
        self._widths: dict[str, int] = {}

    @property
    def heading(self) -> str:
        """The line above all others."""
        done, mark = 2 * len(str(self.budget)) + 1, len(self._mark)
        return f"{'done':>{done}}  island  worker  generation      loss  {'':{mark}}  seconds"

    @property
    def done(self) -> int:
        """The number of individuals that have ended at least once; one that is promoted has ended before."""
        return len(self._done)

    @property
    def so_far(self) -> str:
        """What has been found, as the beginning of a line."""
        found = self._archive.front
        return so_far(best(found), len(found) if self._several else 0)

    def take(self, evaluations: Iterable[Evaluation]) -> list[Evaluation]:
        """Return the evaluations that have ended since the last call, in the order of their ends."""
        ended = []
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.trial):
            find_root(evaluation, self._roots)
            if evaluation.ended_in_run and evaluation.trial not in self._ended:
                self._ended.add(evaluation.trial)
                ended.append(evaluation)
        return sorted(ended, key=lambda evaluation: evaluation.ended)

    def line(self, evaluation: Evaluation) -> str:
        """Return the line of the next evaluation that has ended, and count its individual."""
        self._done.add(find_root(evaluation, self._roots))
        confirms = "" if evaluation.confirms is None else f"confirms {evaluation.confirms}  "
        mark = self._mark if not confirms and self._archive.add(evaluation) else ""
        loss = number(evaluation.loss) if evaluation.state == "complete" else evaluation.state_at_end
        seconds = tenths(evaluation.seconds)
        what = confirms + self._aligned(together(evaluation.params, evaluation.metrics, _COLUMNS))
        if evaluation.failure:
            what += f"  {short(evaluation.failure)}"
        return (
            f"{self.done:>{len(str(self.budget))}}/{self.budget}  {evaluation.island:>6}  {evaluation.worker:>6}  "
            f"{evaluation.generation:>10}  {loss:>8}  {mark:{len(self._mark)}}  {seconds:>7}  {what}"
        )

    def _aligned(self, values: dict[str, object]) -> str:
        """Return named values as text, in columns as wide as the widest so far."""
        texts = []
        for name, item in values.items():
            text = f"{printable(name)}={value(item)}"
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            texts.append(text.ljust(self._widths[name]))
        return "  ".join(texts).rstrip()


class Progress:
    """Prints evaluations as the record comes to hold them, from a thread of its own while inside ``with``.

    `news` returns the evaluations that have started or ended since its last call. What had ended before is not printed
    again. Since all lines are printed from what the record holds, everything that was printed is durable. `on_error` is
    called with a message or a traceback where no more lines can be printed.
    """

    def __init__(
        self,
        news: Callable[[], Sequence[Evaluation]],
        budget: int,
        out: TextIO | None = sys.__stdout__,  # whatever objectives have put into its place
        on_error: Callable[[str], None] = sys.exit,
        objectives: Objectives = ONLY_LOSS,
    ) -> None:
        self._news = news
        self._budget = budget
        self._on_error = on_error
        self._out = out
        past = news()
        self._lines = Lines(past, budget, objectives)
        self._ours = {evaluation.trial: evaluation for evaluation in past if evaluation.state == "running"}
        self._started = self._estimated = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._print(self._lines.heading)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._print_new()

    def _follow(self) -> None:
        try:
            while not self._stopped.wait(_POLL_SECONDS):
                self._print_new()
        except Exception:
            self._on_error(traceback.format_exc().rstrip())

    def _print_new(self) -> None:
        news = {evaluation.trial: evaluation for evaluation in self._news()}
        self._ours |= news
        for evaluation in self._lines.take(news.values()):
            self._print(self._lines.line(evaluation))
        if time.monotonic() - self._estimated > SECONDS_BETWEEN_ESTIMATES and self._lines.done < self._budget:
            self._estimated = time.monotonic()
            self._print(self._estimate())

    def _estimate(self) -> str:
        now = pace(list(self._ours.values()), self._budget - self._lines.done, -math.inf, time.time())
        left = "nothing yet" if now.left is None else f"about {duration(now.left)} left"
        return f"-- {self._lines.so_far}{duration(self._estimated - self._started)} gone, {left}"

    def _print(self, line: str) -> None:
        print(printable(line), file=self._out, flush=True)
