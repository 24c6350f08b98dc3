"""A run's progress as plain lines: one for each evaluation that has ended, and now and then the time left."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

from hpo.report.text import duration, named, number, short, value
from hpo.trials import Evaluation, rank

_POLL_SECONDS = 0.5
_SECONDS_BETWEEN_ESTIMATES = 30.0


class Progress:
    """Prints evaluations as the record comes to hold them, from a thread of its own while inside ``with``.

    `news` gives what the record has of evaluations that have started or ended since it was asked for the last time.
    What had ended before is not printed again. Since a line is printed only of what was read from the record,
    everything that was printed is durable. `on_error` is told, by a traceback, why there are no more lines.
    """

    def __init__(
        self,
        news: Callable[[], Sequence[Evaluation]],
        budget: int,
        out: TextIO = sys.stdout,
        on_error: Callable[[str], None] = sys.exit,
    ) -> None:
        self._news = news
        self._budget = budget
        self._on_error = on_error
        self._out = out
        past = news()
        self._done = self._resumed_with = sum(evaluation.counts for evaluation in past)
        self._best = next(iter(rank([e for e in past if e.confirms is None], 1)), None)
        self._widths: dict[str, int] = {}
        self._started = self._estimated = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._print(f"{'done':>{2 * self._digits + 1}}  island  worker  generation      loss        seconds")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._print_new()

    @property
    def _digits(self) -> int:
        return len(str(self._budget))

    def _follow(self) -> None:
        try:
            while not self._stopped.wait(_POLL_SECONDS):
                self._print_new()
        except Exception:
            self._on_error(traceback.format_exc().rstrip())

    def _print_new(self) -> None:
        ended = [evaluation for evaluation in self._news() if evaluation.counts]
        for evaluation in sorted(ended, key=lambda evaluation: evaluation.ended):
            self._done += 1
            self._print(self._line(evaluation))
        if time.monotonic() - self._estimated > _SECONDS_BETWEEN_ESTIMATES and self._done < self._budget:
            self._estimated = time.monotonic()
            self._print(self._estimate())

    def _line(self, evaluation: Evaluation) -> str:
        confirms = "" if evaluation.confirms is None else f"confirms {evaluation.confirms}  "
        best = evaluation.state == "complete" and not confirms
        best = best and (self._best is None or evaluation.loss < self._best.loss)
        if best:
            self._best = evaluation
        loss = number(evaluation.loss) if evaluation.state == "complete" else evaluation.state
        what = confirms + self._aligned({**evaluation.params, **evaluation.metrics})
        if evaluation.failure:
            what += f"  {short(evaluation.failure)}"
        return (
            f"{self._done:>{self._digits}}/{self._budget}  {evaluation.island:>6}  {evaluation.worker:>6}  "
            f"{evaluation.generation:>10}  {loss:>8}  {'best' if best else '':4}  {evaluation.seconds:>7.1f}  {what}"
        )

    def _aligned(self, values: dict[str, object]) -> str:
        """Write named values in columns as wide as the widest so far."""
        texts = []
        for name, item in values.items():
            text = f"{name}={value(item)}"
            self._widths[name] = max(self._widths.get(name, 0), len(text))
            texts.append(text.ljust(self._widths[name]))
        return "  ".join(texts).rstrip()

    def _estimate(self) -> str:
        done = self._done - self._resumed_with
        elapsed = time.monotonic() - self._started
        left = f"about {duration(elapsed / done * (self._budget - self._done))} left" if done else "nothing yet"
        best = self._best
        so_far = f"best so far {number(best.loss)} (trial {best.trial}: {named(best.params)}), " if best else ""
        return f"-- {so_far}{duration(elapsed)} gone, {left}"

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)
