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
class HalvingSchedule:
    """Rungs at `first`, `first * factor`, `first * factor**2`, ... epochs, at each of which the best go on.

    That is one in `factor` of those that have reached the rung, and one at least; or, with `most`, so many, at the
    first rung alone. There is one bracket for each of `firsts`: individuals are dealt to the brackets so that each
    gets about the same number of epochs (Li et al., "Hyperband", 2018), and compete within theirs.
    """

    factor: int = 3
    first_rungs: tuple[int, ...] = (1,)
    promotion_limit: int | None = None

    def find_bracket(self, root: int) -> int:
        """Return the bracket of an individual, by its first trial."""
        return self._bracket_cycle[root % len(self._bracket_cycle)]

    @cached_property
    def _bracket_cycle(self) -> list[int]:
        """The brackets of as many individuals as it takes until they begin anew, evenly mixed."""
        shares = [self.factor ** (len(self.first_rungs) - 1 - bracket) for bracket in range(len(self.first_rungs))]
        turns = sorted(((turn + 0.5) / share, b) for b, share in enumerate(shares) for turn in range(share))
        return [bracket for _, bracket in turns]

    def list_rungs(self, bracket: int, epochs: int) -> list[int]:
        """Return after how many epochs there are rungs in a bracket, up to so many."""
        found: list[int] = []
        rung = self.first_rungs[bracket]
        while rung <= epochs and not (found and self.promotion_limit is not None):
            found.append(rung)
            rung *= self.factor
        return found

    def has_rung(self, root: int, epochs: int) -> bool:
        """Tell whether there is a rung after so many epochs in the bracket of an individual."""
        return epochs in self.list_rungs(self.find_bracket(root), epochs)

    def locate_in_rungs(self, root: int, epochs: int) -> tuple[int, float]:
        """Return how many rungs there are in so many epochs of an individual, and when the next one is."""
        first = self.first_rungs[self.find_bracket(root)]
        passed = len(self.list_rungs(self.find_bracket(root), epochs))
        return passed, math.inf if passed and self.promotion_limit is not None else first * self.factor**passed

    def count_promoted(self, reached: int) -> int:
        """Return how many go on of those that have reached a rung."""
        return max(1, reached // self.factor) if self.promotion_limit is None else self.promotion_limit

    def compute_max_paused(self, budget: int, objectives: Objectives) -> int:
        """Return how many individuals can be paused at once that may be promoted, in a run of so many evaluations.

        With several objectives, that may be all, since all may be on one front.
        """
        if objectives.is_multi_objective:
            return budget
        return budget // (self.factor - 1) if self.promotion_limit is None else self.promotion_limit

    def count_needed(self, position: int) -> int | None:
        """Return how many have to reach a rung so that the one at a place, from 0, goes on; None where none suffice."""
        if self.promotion_limit is not None:
            return 1 if position < self.promotion_limit else None
        return self.factor * (position + 1) if position else 1


# Each has one in three go on, as Hyperband does; 300 epochs have six rungs.
HALVING_SCHEDULES = {
    "asha": HalvingSchedule(),
    "hyperband": HalvingSchedule(first_rungs=(1, 3, 9)),
    "one-epoch": HalvingSchedule(promotion_limit=3),
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
    is_effective: bool
    ranking: Ranking = field(repr=False, compare=False)
    promoted_count: int
    continued: set[int]
    paused: Mapping[int, Evaluation] = field(repr=False)
    stopped: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def losses(self) -> list[tuple[float, int]]:
        """The lowest loss of each individual until then, and its first trial, best first."""
        return self.ranking.entries

    def is_promoted(self, root: int) -> bool:
        """Tell whether an individual that is here now goes on; also one that has been further and lost its state."""
        return root in self.continued or self.ranking.is_best(root, self.promoted_count, self.paused, self.stopped)

    @property
    def promotable(self) -> list[Evaluation]:
        """What is paused here, and is among the best by now."""
        return [self.paused[root] for root in self.ranking.select_best(self.promoted_count, self.paused, self.stopped)]

    @property
    def next_paused(self) -> tuple[int, Evaluation] | None:
        """The best of what is paused here, and its position, from 0."""
        found = self.ranking.find_next(self.paused, self.stopped)
        return found and (found[0], self.paused[found[1]])


class _RungMembers:
    """The individuals that have reached a rung, by their first trials: a `Rung` is made from them."""

    def __init__(self, objectives: Objectives) -> None:
        self.ranking = make_ranking(len(objectives.names))
        self.continued: set[int] = set()
        self.paused: dict[int, Evaluation] = {}
        self.last_paused: set[int] = set()  # who was paused here last, and may be running by now
        self.stopped: set[int] = set()

    def update(self, root: int, latest: Evaluation, epochs: int, most: int) -> None:
        """Learn what has become of an individual that is ranked here."""
        self._forget(root)
        if most > epochs:
            self.continued.add(root)
        if latest.paused_after == epochs:
            self.last_paused.add(root)
            if latest.state == "paused":
                self.paused[root] = latest
        elif latest.state == "pruned" and most == epochs:
            self.stopped.add(root)

    def remove(self, root: int) -> None:
        self.ranking.remove(root)
        self._forget(root)

    def _forget(self, root: int) -> None:
        for group in (self.continued, self.last_paused, self.stopped):
            group.discard(root)
        self.paused.pop(root, None)


class SuccessiveHalving:
    """The rungs of a search, which learn what is new in it: what that takes does not grow with the search.

    A rung counts only if there is another one before the end of the longest complete evaluation, or if there is only
    one, as many epochs again. What was taken over from another run is on none: it is in no budget.
    """

    def __init__(self, halving: HalvingSchedule, objectives: Objectives = ONLY_LOSS) -> None:
        self._halving = halving
        self._objectives = objectives
        self._seen_count = 0  # evaluations
        self._roots: dict[int, int] = {}  # the first trials of individuals, by trial
        self._group_indices: dict[
            int, list[int]
        ] = {}  # the places of each individual's evaluations, by its first trial
        self._unfinished: dict[int, Evaluation] = {}
        self._members: dict[tuple[int, int], _RungMembers] = {}
        self._rung_costs: dict[int, dict[tuple[int, int], tuple[float, ...]]] = {}  # rungs of individuals, and costs
        self._longest_complete: int | None = None  # complete evaluation, in epochs

    def update(self, evaluations: Sequence[Evaluation]) -> SuccessiveHalving:
        """Learn what has become of a search's evaluations, which are the same as before, and more; return this."""
        changed = [place for place, one in self._unfinished.items() if evaluations[place] is not one]
        moved = set()
        for place in (*changed, *range(self._seen_count, len(evaluations))):
            one = evaluations[place]
            self._track_state(place, one)
            if one.imported_from:
                continue
            moved.add(root := find_root(one, self._roots))
            if place >= self._seen_count:
                self._group_indices.setdefault(root, []).append(place)
        self._seen_count = len(evaluations)
        for root in moved:
            self._update_rungs(root, [evaluations[place] for place in self._group_indices[root]])
        return self

    def _track_state(self, place: int, one: Evaluation) -> None:
        if one.state in ("running", "waiting"):
            self._unfinished[place] = one
            return
        self._unfinished.pop(place, None)
        if one.state == "complete" and not one.cut_after:
            self._longest_complete = max(self._longest_complete or 0, *one.curve, 0)

    def _update_rungs(self, root: int, group: Sequence[Evaluation]) -> None:
        """Put an individual where it is by now."""
        latest, longest = group[-1], max(group, key=lambda one: len(one.curve))
        bracket, most = self._halving.find_bracket(root), max(longest.curve, default=0)
        before, now = self._rung_costs.get(root, {}), {}
        others = next((one.other_values for one in reversed(group) if one.other_values), ())
        for epochs in self._halving.list_rungs(bracket, most):
            now[bracket, epochs] = self._compute_costs(longest, epochs, others, latest.state == "failed")
        for key in before.keys() - now.keys():
            self._members[key].remove(root)
        for key, costs in now.items():
            reached = self._members.setdefault(key, _RungMembers(self._objectives))
            if before.get(key) != costs:
                if key in before:
                    reached.remove(root)
                reached.ranking.add(root, costs)
            reached.update(root, latest, key[1], most)
        self._rung_costs[root] = now

    def _compute_costs(
        self, one: Evaluation, epochs: int, others: tuple[float, ...], has_failed: bool
    ) -> tuple[float, ...]:
        """Return the costs of an individual at a rung: of its lowest loss until then, and infinite if it has failed.

        If the other objectives at the rung are not known, `others` count: the last that are known of the individual.
        """
        lowest = min((_replace_nan(loss) for epoch, loss in one.curve.items() if epoch <= epochs), default=math.inf)
        if not self._objectives.is_multi_objective:
            return (math.inf if has_failed else lowest,)
        values = one.at_rungs.get(epochs, (lowest, *others))
        return self._objectives.compute_costs(() if has_failed else values)

    def find_rung(self, bracket: int, epochs: int) -> Rung | None:
        """Return a rung; None where nobody has reached it, or it does not count and nobody was paused there."""
        reached = self._members.get((bracket, epochs))
        if reached is None:
            return None
        factor = 2 if self._halving.promotion_limit else self._halving.factor
        ranking, went_on = reached.ranking, reached.continued
        counts = self._longest_complete is None or epochs <= self._longest_complete / factor
        if not counts:
            ranking, went_on = ranking.restrict_to(reached.last_paused), went_on & reached.last_paused
            if not len(ranking):
                return None
        go_on = self._halving.count_promoted(len(ranking)) if counts else len(ranking)
        return Rung(bracket, epochs, counts, ranking, go_on, went_on, reached.paused, reached.stopped)

    def list_rungs(self) -> list[Rung]:
        """Return the rungs that were reached, those of the first bracket first."""
        found = (self.find_rung(*key) for key, reached in sorted(self._members.items()) if len(reached.ranking))
        return [rung for rung in found if rung is not None]

    def find_promotable(self) -> list[Evaluation]:
        """Return the evaluations that are to be promoted, those on the highest rungs first."""
        return [one for rung in sorted(self.list_rungs(), key=lambda rung: -rung.epochs) for one in rung.promotable]


def compute_rungs(
    halving: HalvingSchedule, evaluations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> list[Rung]:
    """Return the rungs that were reached, those of the first bracket first."""
    return SuccessiveHalving(halving, objectives).update(evaluations).list_rungs()


def find_promotable(
    halving: HalvingSchedule | None, evaluations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> list[Evaluation]:
    """Return the evaluations that are to be promoted, those on the highest rungs first."""
    return SuccessiveHalving(halving, objectives).update(evaluations).find_promotable() if halving else []


def is_search_over(
    evaluations: Sequence[Evaluation], budget: float, pruner: str, objectives: Objectives = ONLY_LOSS
) -> bool:
    """Tell whether a search has spent its budget, and has nothing to promote."""
    spent = sum(evaluation.counts_for_budget for evaluation in evaluations) >= budget
    return spent and not find_promotable(HALVING_SCHEDULES.get(pruner), evaluations, objectives)


def _replace_nan(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
