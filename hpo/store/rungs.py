"""Successive halving: which evaluations go on at a rung, which ones are paused there, and which are promoted later.

Li et al., "A system for massively parallel hyperparameter tuning" (2020), with promotion as in their algorithm 2, and
Hyperband's brackets; Egele et al., "Is one epoch all you need for multi-fidelity hyperparameter optimization?" (2023).
With several objectives, the best are chosen by dominance (`hpo.store.ranking`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import Evaluation, find_root
from hpo.store.ranking import Ranking, make_ranking


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

    def rungs(self, bracket: int, epochs: int) -> list[int]:
        """Return after how many epochs there are rungs in a bracket, up to so many."""
        found: list[int] = []
        rung = self.firsts[bracket]
        while rung <= epochs and not (found and self.most is not None):
            found.append(rung)
            rung *= self.factor
        return found

    def has_rung(self, root: int, epochs: int) -> bool:
        """Tell whether there is a rung after so many epochs in the bracket of an individual."""
        return epochs in self.rungs(self.bracket_of(root), epochs)

    def passed(self, root: int, epochs: int) -> tuple[int, float]:
        """Return how many rungs there are in so many epochs of an individual, and when the next one is."""
        first = self.firsts[self.bracket_of(root)]
        passed = len(self.rungs(self.bracket_of(root), epochs))
        return passed, math.inf if passed and self.most is not None else first * self.factor**passed

    def go_on(self, reached: int) -> int:
        """Return how many go on of those that have reached a rung."""
        return max(1, reached // self.factor) if self.most is None else self.most

    def most_paused(self, budget: int, objectives: Objectives) -> int:
        """Return how many individuals can be paused at once that may be promoted, in a run of so many evaluations.

        With several objectives, that may be all, since all may be on one front.
        """
        if objectives.are_several:
            return budget
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

    `ranking` orders them by their costs until then, which are infinite if an individual has failed since. The best
    `go_on` of them continue, and `went_on` have been trained further. Of the others, `paused` wait, and `stopped` never
    continue. Where it does not count, it holds those alone that were paused there, before the first evaluation was
    complete, and all go on.
    """

    bracket: int
    epochs: int
    counts: bool
    ranking: Ranking = field(repr=False, compare=False)
    go_on: int
    went_on: set[int]
    paused: Mapping[int, Evaluation] = field(repr=False)
    stopped: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def losses(self) -> list[tuple[float, int]]:
        """The lowest loss of each individual until then, and its first trial, best first."""
        return self.ranking.entries

    def goes_on(self, root: int) -> bool:
        """Tell whether an individual that is here now goes on; also one that has been further and lost its state."""
        return root in self.went_on or self.ranking.is_best(root, self.go_on, self.paused, self.stopped)

    @property
    def promotable(self) -> list[Evaluation]:
        """What is paused here, and is among the best by now."""
        return [self.paused[root] for root in self.ranking.best(self.go_on, self.paused, self.stopped)]

    @property
    def next(self) -> tuple[int, Evaluation] | None:
        """The best of what is paused here, and its position, from 0."""
        found = self.ranking.next(self.paused, self.stopped)
        return found and (found[0], self.paused[found[1]])


class _Reached:
    """The individuals that have reached a rung, by their first trials: a `Rung` is made from them."""

    def __init__(self, objectives: Objectives) -> None:
        self.ranking = make_ranking(len(objectives.names))
        self.went_on: set[int] = set()
        self.paused: dict[int, Evaluation] = {}
        self.was_paused: set[int] = set()  # who was paused here last, and may be running by now
        self.stopped: set[int] = set()

    def note(self, root: int, latest: Evaluation, epochs: int, most: int) -> None:
        """Learn what has become of an individual that is ranked here."""
        self._forget(root)
        if most > epochs:
            self.went_on.add(root)
        if latest.paused_after == epochs:
            self.was_paused.add(root)
            if latest.state == "paused":
                self.paused[root] = latest
        elif latest.state == "pruned" and most == epochs:
            self.stopped.add(root)

    def remove(self, root: int) -> None:
        self.ranking.remove(root)
        self._forget(root)

    def _forget(self, root: int) -> None:
        for group in (self.went_on, self.was_paused, self.stopped):
            group.discard(root)
        self.paused.pop(root, None)


class Ladder:
    """The rungs of a search, which learn what is new in it: what that takes does not grow with the search.

    A rung counts only if there is another one before the end of the longest complete evaluation, or if there is only
    one, as many epochs again. What was taken over from another run is on none: it is in no budget.
    """

    def __init__(self, halving: Halving, objectives: Objectives = ONLY_LOSS) -> None:
        self._halving = halving
        self._objectives = objectives
        self._seen = 0  # evaluations
        self._roots: dict[int, int] = {}  # the first trials of individuals, by trial
        self._groups: dict[int, list[int]] = {}  # the places of each individual's evaluations, by its first trial
        self._going: dict[int, Evaluation] = {}
        self._reached: dict[tuple[int, int], _Reached] = {}
        self._places: dict[int, dict[tuple[int, int], tuple[float, ...]]] = {}  # rungs of individuals, and costs
        self._longest: int | None = None  # complete evaluation, in epochs

    def learn(self, evaluations: Sequence[Evaluation]) -> Ladder:
        """Learn what has become of a search's evaluations, which are the same as before, and more; return this."""
        changed = [place for place, one in self._going.items() if evaluations[place] is not one]
        moved = set()
        for place in (*changed, *range(self._seen, len(evaluations))):
            one = evaluations[place]
            self._look_at(place, one)
            if one.imported_from:
                continue
            moved.add(root := find_root(one, self._roots))
            if place >= self._seen:
                self._groups.setdefault(root, []).append(place)
        self._seen = len(evaluations)
        for root in moved:
            self._put(root, [evaluations[place] for place in self._groups[root]])
        return self

    def _look_at(self, place: int, one: Evaluation) -> None:
        if one.state in ("running", "waiting"):
            self._going[place] = one
            return
        self._going.pop(place, None)
        if one.state == "complete" and not one.cut_after:
            self._longest = max(self._longest or 0, *one.curve, 0)

    def _put(self, root: int, group: Sequence[Evaluation]) -> None:
        """Put an individual where it is by now."""
        latest, longest = group[-1], max(group, key=lambda one: len(one.curve))
        bracket, most = self._halving.bracket_of(root), max(longest.curve, default=0)
        before, now = self._places.get(root, {}), {}
        others = next((one.others for one in reversed(group) if one.others), ())
        for epochs in self._halving.rungs(bracket, most):
            now[bracket, epochs] = self._costs(longest, epochs, others, latest.state == "failed")
        for key in before.keys() - now.keys():
            self._reached[key].remove(root)
        for key, costs in now.items():
            reached = self._reached.setdefault(key, _Reached(self._objectives))
            if before.get(key) != costs:
                if key in before:
                    reached.remove(root)
                reached.ranking.add(root, costs)
            reached.note(root, latest, key[1], most)
        self._places[root] = now

    def _costs(self, one: Evaluation, epochs: int, others: tuple[float, ...], has_failed: bool) -> tuple[float, ...]:
        """Return the costs of an individual at a rung: of its lowest loss until then, and infinite if it has failed.

        If the other objectives at the rung are not known, `others` count: the last that are known of the individual.
        """
        lowest = min((_known(loss) for epoch, loss in one.curve.items() if epoch <= epochs), default=math.inf)
        if not self._objectives.are_several:
            return (math.inf if has_failed else lowest,)
        values = one.at_rungs.get(epochs, (lowest, *others))
        return self._objectives.costs(() if has_failed else values)

    def rung(self, bracket: int, epochs: int) -> Rung | None:
        """Return a rung; None where nobody has reached it, or it does not count and nobody was paused there."""
        reached = self._reached.get((bracket, epochs))
        if reached is None:
            return None
        factor = 2 if self._halving.most else self._halving.factor
        ranking, went_on = reached.ranking, reached.went_on
        counts = self._longest is None or epochs <= self._longest / factor
        if not counts:
            ranking, went_on = ranking.only(reached.was_paused), went_on & reached.was_paused
            if not len(ranking):
                return None
        go_on = self._halving.go_on(len(ranking)) if counts else len(ranking)
        return Rung(bracket, epochs, counts, ranking, go_on, went_on, reached.paused, reached.stopped)

    def rungs(self) -> list[Rung]:
        """Return the rungs that were reached, those of the first bracket first."""
        found = (self.rung(*key) for key, reached in sorted(self._reached.items()) if len(reached.ranking))
        return [rung for rung in found if rung is not None]

    def promotable(self) -> list[Evaluation]:
        """Return the evaluations that are to be promoted, those on the highest rungs first."""
        return [one for rung in sorted(self.rungs(), key=lambda rung: -rung.epochs) for one in rung.promotable]


def rungs_of(halving: Halving, evaluations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS) -> list[Rung]:
    """Return the rungs that were reached, those of the first bracket first."""
    return Ladder(halving, objectives).learn(evaluations).rungs()


def promotable(
    halving: Halving | None, evaluations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> list[Evaluation]:
    """Return the evaluations that are to be promoted, those on the highest rungs first."""
    return Ladder(halving, objectives).learn(evaluations).promotable() if halving else []


def is_over(evaluations: Sequence[Evaluation], budget: float, pruner: str, objectives: Objectives = ONLY_LOSS) -> bool:
    """Tell whether a search has spent its budget, and has nothing to promote."""
    spent = sum(evaluation.counts for evaluation in evaluations) >= budget
    return spent and not promotable(HALVINGS.get(pruner), evaluations, objectives)


def _known(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
