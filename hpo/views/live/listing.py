"""A run as plain lines, for a pipe or a terminal that can do no more: one for each evaluation as it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpo.objectives import Objectives
from hpo.results.reader import Look
from hpo.store.evaluations import Evaluation
from hpo.text import show_command
from hpo.views.front import so_far
from hpo.views.live.head import progress
from hpo.views.live.lines import Pen
from hpo.views.live.standing import Standing
from hpo.views.progress import SECONDS_BETWEEN_ESTIMATES, Lines


class Listing:
    """Prints what has ended since the look before; what had ended at the first look is not printed."""

    def __init__(self, first: Look, pen: Pen, path: Path) -> None:
        self._pen = pen
        self._search = _Stage(first.evaluations, path, first.manifest.objectives)
        self._confirmation = _Stage(first.confirmations, path, first.manifest.objectives)
        self._estimated = time.monotonic()

    def tell(self, look: Look, run: Standing) -> None:
        """Print a line for each evaluation that has ended, and now and then the time left."""
        lines = self._search.lines(look.evaluations, look.manifest.budget)
        lines += self._confirmation.lines(look.confirmations, len(look.confirmations))
        if time.monotonic() - self._estimated > SECONDS_BETWEEN_ESTIMATES and run.done < run.total:
            self._estimated = time.monotonic()
            lines.append(f"-- {so_far(run.best, len(run.front))}{progress(run)}")
        for line in lines:
            print(self._pen.shown(line), flush=True)


class _Stage:
    """The search or its confirmation; it has a heading of its own when there is something to tell."""

    def __init__(self, past: Sequence[Evaluation], path: Path, objectives: Objectives) -> None:
        self._path = path
        self._lines = Lines(past, 0, objectives)
        self._headed = False

    def lines(self, evaluations: Sequence[Evaluation], budget: int) -> list[str]:
        self._lines.budget = budget
        ended = self._lines.take(evaluations)
        heading = [self._lines.heading] if ended and not self._headed else []
        self._headed = self._headed or bool(ended)
        return heading + [self._line(one) for one in ended]

    def _line(self, ended: Evaluation) -> str:
        more = f"  ({show_command(self._path, ended.label)})" if ended.state == "failed" else ""
        return self._lines.line(ended) + more
