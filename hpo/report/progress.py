"""A run's progress as plain lines: one for each evaluation that has ended, and now and then the time left."""

from __future__ import annotations

import errno
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from hpo.errors import OutageError, RunError
from hpo.report.pace import pace
from hpo.results.names import together
from hpo.store.trials import Evaluation, best
from hpo.text import duration, named, number, printable, short, tenths, value

_POLL_SECONDS = 0.5
SECONDS_BETWEEN_ESTIMATES = 30.0
_COLUMNS = ("done", "island", "worker", "generation", "loss", "seconds")


class Lines:
    """Makes a line for each evaluation that ends; those that had ended before are in `past`; `budget` may change."""

    def __init__(self, past: Sequence[Evaluation], budget: int) -> None:
        self._counted = {evaluation.trial for evaluation in past if evaluation.counts}
        self.best = best(e for e in past if e.confirms is None)
        self.budget = budget
        self._widths: dict[str, int] = {}

    @property
    def heading(self) -> str:
        """The line above all others."""
        return f"{'done':>{2 * len(str(self.budget)) + 1}}  island  worker  generation      loss        seconds"

    @property
    def done(self) -> int:
        """How many evaluations have ended, and do not go on."""
        return len(self._counted)

    def promote(self, evaluation: Evaluation) -> None:
        """Count an evaluation no more that was paused, since it goes on."""
        self._counted.discard(evaluation.trial)

    def line(self, evaluation: Evaluation) -> str:
        """Return the line of the next evaluation that has ended, and count it."""
        self._counted.add(evaluation.trial)
        confirms = "" if evaluation.confirms is None else f"confirms {evaluation.confirms}  "
        is_best = evaluation.state == "complete" and not confirms
        is_best = is_best and (self.best is None or evaluation.loss < self.best.loss)
        if is_best:
            self.best = evaluation
        loss = number(evaluation.loss) if evaluation.state == "complete" else evaluation.state
        seconds = tenths(evaluation.seconds)
        what = confirms + self._aligned(together(evaluation.params, evaluation.metrics, _COLUMNS))
        if evaluation.failure:
            what += f"  {short(evaluation.failure)}"
        return (
            f"{self.done:>{len(str(self.budget))}}/{self.budget}  {evaluation.island:>6}  {evaluation.worker:>6}  "
            f"{evaluation.generation:>10}  {loss:>8}  {'best' if is_best else '':4}  {seconds:>7}  {what}"
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
    ) -> None:
        self._news = news
        self._budget = budget
        self._on_error = on_error
        self._out = out
        past = news()
        self._lines = Lines(past, budget)
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
                with suppress(OutageError), _without_descriptors():  # the ranks that write the record tell of an outage
                    self._print_new()
        except RunError as error:
            self._on_error(f"error: {error}")
        except Exception:
            self._on_error(traceback.format_exc().rstrip())

    def _print_new(self) -> None:
        news = {evaluation.trial: evaluation for evaluation in self._news()}
        self._ours |= news
        ended = [evaluation for evaluation in news.values() if evaluation.counts]
        for evaluation in news.values():
            if evaluation.state == "promoted":
                self._lines.promote(evaluation)
        for evaluation in sorted(ended, key=lambda evaluation: evaluation.ended):
            self._print(self._lines.line(evaluation))
        if time.monotonic() - self._estimated > SECONDS_BETWEEN_ESTIMATES and self._lines.done < self._budget:
            self._estimated = time.monotonic()
            self._print(self._estimate())

    def _estimate(self) -> str:
        now = pace(list(self._ours.values()), self._budget - self._lines.done, -math.inf, time.time())
        left = "nothing yet" if now.left is None else f"about {duration(now.left)} left"
        one = self._lines.best
        so_far = f"best so far {number(one.loss)} (trial {one.trial}: {named(one.params)}), " if one else ""
        return f"-- {so_far}{duration(self._estimated - self._started)} gone, {left}"

    def _print(self, line: str) -> None:
        print(printable(line), file=self._out, flush=True)


@contextmanager
def _without_descriptors() -> Iterator[None]:
    """Ignore that no file can be opened: an objective may have used up all descriptors, for a while."""
    try:
        yield
    except (OSError, RunError) as error:
        cause = error.__cause__ if isinstance(error, RunError) else error
        if not isinstance(cause, OSError) or cause.errno not in (errno.EMFILE, errno.ENFILE):
            raise
