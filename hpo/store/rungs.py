"""Successive halving: which evaluations go on at a rung, which ones are paused there, and which are promoted later.

Li et al., "A system for massively parallel hyperparameter tuning" (2020), with promotion as in their algorithm 2, and
Hyperband's brackets; Egele et al., "Is one epoch all you need for multi-fidelity hyperparameter optimization?" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hpo.store.trials import Evaluation


@dataclass(frozen=True)
class Halving:
    """Rungs at `first`, `first * factor`, `first * factor**2`, ... epochs, at each of which the best go on.

    That is one in `factor` of those that have reached the rung, and one at least; or, with `most`, so many, at the
    first rung alone. There is one bracket for each of `firsts`: individuals are dealt to the brackets so that each
    gets about the same number of epochs (Li et al., "Hyperband", 2018), and compete within theirs.
    """

    factor: int = 3
    firsts: tuple[int, ...] = (1,)
    most: int | None = None

    def bracket_of(self, root: int) -> int:
        """Return the bracket of an individual, by its first trial."""
        return self._turns[root % len(self._turns)]

    @cached_property
    def _turns(self) -> list[int]:
        """The brackets of as many individuals as it takes until they begin anew, evenly mixed."""
        shares = [self.factor ** (len(self.firsts) - 1 - bracket) for bracket in range(len(self.firsts))]
        turns = sorted(((turn + 0.5) / share, b) for b, share in enumerate(shares) for turn in range(share))
        return [bracket for _, bracket in turns]

    def has_rung(self, root: int, epochs: int) -> bool:
        """Tell whether there is a rung after so many epochs in the bracket of an individual."""
        rung = self.firsts[self.bracket_of(root)]
        while rung < epochs and self.most is None:
            rung *= self.factor
        return rung == epochs

    def passed(self, root: int, epochs: int) -> tuple[int, float]:
        """Return how many rungs there are in so many epochs of an individual, and when the next one is."""
        rung, passed = self.firsts[self.bracket_of(root)], 0
        while rung <= epochs:
            if self.most is not None:
                return 1, math.inf
            rung, passed = rung * self.factor, passed + 1
        return passed, rung

    def go_on(self, reached: int) -> int:
        """Return how many go on of those that have reached a rung."""
        return max(1, reached // self.factor) if self.most is None else self.most

    def most_paused(self, budget: int) -> int:
        """Return how many individuals can be paused at once that may be promoted, in a run of so many evaluations."""
        return budget // (self.factor - 1) if self.most is None else self.most

    def needed(self, place: int) -> int | None:
        """Return how many have to reach a rung so that the one at a place, from 0, goes on; None where none suffice."""
        if self.most is not None:
            return 1 if place < self.most else None
        return self.factor * (place + 1) if place else 1


# Each has one in three go on, as Hyperband does; 300 epochs have six rungs.
HALVINGS = {
    "asha": Halving(),
    "hyperband": Halving(firsts=(1, 3, 9)),
    "one-epoch": Halving(most=3),
}


@dataclass(frozen=True)
class Rung:
    """A rung of a bracket, after so many epochs, and the individuals that have reached it, by their first trials.

    `losses` are their lowest until then, best first, infinite where one has failed since; `go_on` of them are to go on,
    and those that `went_on` have been trained further. Of the others, `paused` wait. Where it does not count, it holds
    those alone that were paused there, before the first evaluation was complete, and all go on.
    """

    bracket: int
    epochs: int
    counts: bool
    losses: list[tuple[float, int]]
    go_on: int
    went_on: set[int]
    paused: Mapping[int, Evaluation] = field(repr=False)

    def place(self, root: int) -> int:
        """Return the place of an individual, from 0."""
        return next(place for place, (_, one) in enumerate(self.losses) if one == root)

    @property
    def promotable(self) -> list[Evaluation]:
        """What is paused here, and is among the best by now."""
        return [self.paused[root] for _, root in self.losses[: self.go_on] if root in self.paused]


def rungs_of(halving: Halving, evaluations: Sequence[Evaluation]) -> list[Rung]:
    """Return the rungs that were reached, those of the first bracket first.

    A rung counts only if there is another one before the end of the longest complete evaluation, or if there is only
    one, as many epochs again. What was taken over from another run is on none: it is in no budget.
    """
    complete = [max(one.curve, default=0) for one in evaluations if one.state == "complete"]
    highest = max(complete, default=math.inf) / (2 if halving.most else halving.factor)
    groups = individuals([one for one in evaluations if not one.origin])
    reached: dict[tuple[int, int], list[tuple[float, int]]] = {}
    paused: dict[tuple[int, int], dict[int, Evaluation]] = {}
    went_on: dict[tuple[int, int], set[int]] = {}
    for root, group in groups.items():
        latest, curve = group[-1], max((one.curve for one in group), key=len)
        bracket = halving.bracket_of(root)
        epochs, most = halving.firsts[bracket], max(curve, default=0)
        while epochs <= most:
            if epochs <= highest or latest.paused_after == epochs:
                loss = min((_known(curve[epoch]) for epoch in curve if epoch <= epochs), default=math.inf)
                failed = latest.state == "failed"
                reached.setdefault((bracket, epochs), []).append((math.inf if failed else loss, root))
                went_on.setdefault((bracket, epochs), set()).update({root} if most > epochs else ())
                if latest.state == "paused" and latest.paused_after == epochs:
                    paused.setdefault((bracket, epochs), {})[root] = latest
            if halving.most is not None:
                break
            epochs *= halving.factor
    found = []
    for key, losses in sorted(reached.items()):
        counts = key[1] <= highest
        go_on = halving.go_on(len(losses)) if counts else len(losses)
        found.append(Rung(*key, counts, sorted(losses), go_on, went_on[key], paused.get(key, {})))
    return found


def promotable(halving: Halving | None, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that are to be promoted, those on the highest rungs first."""
    rungs = rungs_of(halving, evaluations) if halving else []
    return [one for rung in sorted(rungs, key=lambda rung: -rung.epochs) for one in rung.promotable]


def is_over(evaluations: Sequence[Evaluation], budget: float, pruner: str) -> bool:
    """Tell whether a search has spent its budget, and has nothing to promote."""
    spent = sum(evaluation.counts for evaluation in evaluations) >= budget
    return spent and not promotable(HALVINGS.get(pruner), evaluations)


def individuals(evaluations: Sequence[Evaluation]) -> dict[int, list[Evaluation]]:
    """Return the evaluations of each individual, by the first of them."""
    roots: dict[int, int] = {}
    groups: dict[int, list[Evaluation]] = {}
    for one in evaluations:
        roots[one.trial] = one.trial if one.repeats is None else roots.get(one.repeats, one.trial)
        groups.setdefault(roots[one.trial], []).append(one)
    return groups


def _known(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
