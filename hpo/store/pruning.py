"""Pruners by the names that they have on the command line: Optuna's, and those that pause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Union

from optuna.pruners import BasePruner, MedianPruner, PercentilePruner

from hpo.errors import UsageError
from hpo.store.rungs import HALVINGS, Halving, Ladder

if TYPE_CHECKING:
    from hpo.store.evaluations import Assignment
    from hpo.store.record import Record

_MANY = 16  # more than can fall out at once


@dataclass(frozen=True)
class Judgement:
    """What a pruner makes of an evaluation: its `state` is going, pruned or paused.

    What is paused `may_go_on` in this run. Those that `fall_out` are paused, and no longer may: their first trials.
    """

    state: str
    may_go_on: bool = False
    fall_out: Sequence[int] = ()


@dataclass(frozen=True)
class Stopping:
    """Stops what one of Optuna's pruners says is hopeless, after any epoch."""

    pruner: BasePruner

    def judge(self, record: Record, assignment: Assignment, _: int) -> Judgement:
        """Judge an evaluation by its losses in the record, and by those of the others."""
        return Judgement("pruned" if record.is_hopeless(assignment, self.pruner) else "going")


@dataclass(frozen=True)
class Pausing:
    """Pauses at rungs what is not among the best of one search; `budget` is that of the run."""

    halving: Halving
    budget: int

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(self.halving)

    def judge(self, record: Record, assignment: Assignment, epochs: int) -> Judgement:
        """Judge an evaluation by its losses in the record after so many epochs, and by those of the others."""
        if not self.halving.has_rung(assignment.root, epochs):
            return Judgement("going")
        rung = self._ladder.learn(record.evaluations()).rung(self.halving.bracket_of(assignment.root), epochs)
        if rung is None or not rung.counts:
            return Judgement("going")  # it is near its end
        last = self.halving.go_on(self.budget)
        place = rung.place(assignment.root)
        out = [root for _, root in rung.losses[last : last + _MANY] if root in rung.paused]
        goes_on = place < rung.go_on or assignment.root in rung.went_on  # before its state was lost
        return Judgement("going" if goes_on else "paused", place < last, out)


Pruner = Union[Stopping, Pausing]


def make_pruner(name: str, budget: int) -> Pruner | None:
    """Return the pruner of this name for a run of so many evaluations; None for the name "none".

    Raises UsageError where no pruner has the name.
    """
    if percentile := re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", name):
        if 0 < float(percentile[1]) < 100:
            return Stopping(PercentilePruner(float(percentile[1])))
    elif name in ("none", "median"):
        return Stopping(MedianPruner()) if name == "median" else None
    elif name in HALVINGS:
        return Pausing(HALVINGS[name], budget)
    raise UsageError(
        f"--pruner must be none, median, percentile:P with P between 0 and 100, asha, hyperband or one-epoch, "
        f"not {name!r}"
    )
