"""Pruners by the names that they have on the command line: Optuna's, and those that pause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Union

from optuna.pruners import BasePruner, MedianPruner, PercentilePruner

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import Evaluation, individuals
from hpo.store.rungs import HALVINGS, Halving, Ladder
from hpo.text import counted

if TYPE_CHECKING:
    from hpo.store.evaluations import Assignment
    from hpo.store.record import Record


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

    def judge(self, record: Record, assignment: Assignment, *_: object) -> Judgement:
        """Judge an evaluation by its losses in the record, and by those of the others."""
        return Judgement("pruned" if record.is_hopeless(assignment, self.pruner) else "going")


@dataclass(frozen=True)
class Pausing:
    """Pauses at rungs what is not among the best of one search; `budget` and `objectives` are those of the run.

    With several objectives, the best are chosen by dominance.
    """

    halving: Halving
    budget: int
    objectives: Objectives = ONLY_LOSS

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(self.halving, self.objectives)

    def judge(self, record: Record, assignment: Assignment, epochs: int, values: Sequence[float] = ()) -> Judgement:
        """Judge an evaluation by its losses in the record after so many epochs, and by those of the others.

        With several objectives, `values` are those of its lowest loss so far, which are recorded.
        """
        if not self.halving.has_rung(assignment.root, epochs):
            return Judgement("going")
        if self.objectives.are_several:
            record.reach_rung(assignment, epochs, values)
        rung = self._ladder.learn(record.evaluations()).rung(self.halving.bracket_of(assignment.root), epochs)
        if rung is None or not rung.counts:
            return Judgement("going")  # it is near its end
        last = self.halving.go_on(self.budget)
        out = [root for root in rung.ranking.fallen(last) if root in rung.paused]
        may_go_on = not rung.ranking.is_behind(assignment.root, last)
        return Judgement("going" if rung.goes_on(assignment.root) else "paused", may_go_on, out)


Pruner = Union[Stopping, Pausing]


def make_pruner(name: str, budget: int, objectives: Objectives = ONLY_LOSS) -> Pruner | None:
    """Return the pruner of this name for a run of so many evaluations; None for the name "none".

    Raises UsageError where no pruner has the name.
    """
    if percentile := re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", name):
        if 0 < float(percentile[1]) < 100:
            return Stopping(PercentilePruner(float(percentile[1])))
    elif name in ("none", "median"):
        return Stopping(MedianPruner()) if name == "median" else None
    elif name in HALVINGS:
        return Pausing(HALVINGS[name], budget, objectives)
    raise UsageError(
        f"--pruner must be none, median, percentile:P with P between 0 and 100, asha, hyperband or one-epoch, "
        f"not {name!r}"
    )


def describe_blind_spot(name: str, objectives: Objectives, evaluations: Sequence[Evaluation]) -> str:
    """Return a warning if a pruner does not know all objectives of a search at its rungs; empty otherwise."""
    if name == "none" or not objectives.are_several:
        return ""
    if name not in HALVINGS:
        return (
            f"warning: --pruner {name} judges by the loss alone, and the objectives are "
            f"{', '.join(objectives.described())}. Use asha, hyperband or one-epoch, which judge by dominance"
        )
    own = individuals([one for one in evaluations if not one.imported_from])
    unknown = sum(_is_unknown(HALVINGS[name], root, group) for root, group in own.items())
    if not unknown:
        return ""
    return (
        f"warning: --pruner {name}: {counted(unknown, 'evaluation')} of earlier sessions did not record "
        f"{', '.join(objectives.others)} at rungs. Their last values are used instead"
    )


def _is_unknown(halving: Halving, root: int, group: Sequence[Evaluation]) -> bool:
    """Tell whether an individual has passed a rung at which only its loss is known."""
    latest, longest = group[-1], max(group, key=lambda one: len(one.curve))
    rungs = halving.rungs(halving.bracket_of(root), max(longest.curve, default=0))
    return latest.state != "failed" and any(epochs not in longest.at_rungs for epochs in rungs)
