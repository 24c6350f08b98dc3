"""What it is worth to pause instead of to train to the end: searches in simulated time, on curves of real networks.

    python -m benchmarks.fidelity

lets 8 workers draw individuals at random from benchmarks/curves.parquet, with each seed others, for as long as it
takes to train a third of them to the end. It says when, with each pruner, a complete evaluation has the loss that is
the lowest without one, as a share of that time, and what the lowest is at the end. Individuals are drawn with
replacement, as from a space that is not exhausted. Saving takes no time here.

With inheritance, evaluations of 3 epochs begin where others have ended that differ in mutable parameters alone. What
they would learn is not known: it is taken to be what their own curve does from the epoch on at which it is as low. So
nothing can be better than the best curve, however good a schedule is: see the real thing.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from scipy.stats import spearmanr

from benchmarks.curves import EPOCHS, Curve, fixed_of, load
from hpo.store.successive_halving import HALVING_SCHEDULES, HalvingSchedule

WORKERS = 8
_TOLERANCE = 1e-3  # of the loss that is to be reached
_MANY = 5000  # more than are drawn
_SHORT, _PARENTS = 3, 10


class Unpruned:
    """Lets all individuals go on; a pruner is told of each loss, and asked who goes on next."""

    def goes_on(self, _: int, losses: Sequence[float]) -> bool:
        """Tell whether an individual goes on, given its losses so far."""
        return len(losses) < EPOCHS

    def promoted(self) -> int | None:
        """Return a paused individual that goes on; None where there is none."""
        return None

    def fail(self, individual: int) -> None:
        """Learn that an individual has failed."""


class Median(Unpruned):
    """Stops what is worse than the median of the others at its epoch, as Optuna's pruner does by default."""

    def __init__(self) -> None:
        self._complete: list[Sequence[float]] = []

    def goes_on(self, _: int, losses: Sequence[float]) -> bool:
        """Tell whether an individual goes on, given its losses so far."""
        if len(losses) == EPOCHS:
            self._complete.append(losses)
            return False
        others = [curve[len(losses) - 1] for curve in self._complete]
        return len(others) < 5 or min(losses) <= statistics.median(others)


class Halved(Unpruned):
    """Lets the best of each rung go on.

    As `hpo.store.successive_halving` does, and pauses the others, or stops them.
    """

    def __init__(self, halving: HalvingSchedule, pauses: bool) -> None:
        self._halving = halving
        self._pauses = pauses
        self._reached: dict[tuple[int, int], list[tuple[float, int]]] = {}
        self._paused: dict[tuple[int, int], list[tuple[float, int]]] = {}
        self._at: dict[int, tuple[tuple[int, int], float]] = {}  # the last rung of an individual

    def goes_on(self, individual: int, losses: Sequence[float]) -> bool:
        """Tell whether an individual goes on, given its losses so far."""
        epochs, halving = len(losses), self._halving
        if epochs == EPOCHS or not halving.has_rung(individual, epochs):
            return epochs < EPOCHS
        if epochs * (2 if halving.promotion_limit else halving.factor) > EPOCHS:
            return True
        key, entry = (halving.find_bracket(individual), epochs), (min(losses), individual)
        reached = self._reached.setdefault(key, [])
        insort(reached, entry)
        self._at[individual] = key, min(losses)
        if bisect_left(reached, entry) < halving.count_promoted(len(reached)):
            return True
        if self._pauses:
            insort(self._paused.setdefault(key, []), entry)
        return False

    def promoted(self) -> int | None:
        """Return a paused individual that goes on; None where there is none."""
        for key in sorted(self._paused, key=lambda key: -key[1]):
            paused, reached = self._paused[key], self._reached[key]
            if paused and bisect_left(reached, paused[0]) < self._halving.count_promoted(len(reached)):
                return paused.pop(0)[1]
        return None

    def fail(self, individual: int) -> None:
        """Learn that an individual has failed: it is behind all others."""
        if individual in self._at:
            key, loss = self._at[individual]
            self._reached[key].remove((loss, individual))
            insort(self._reached[key], (math.inf, individual))


class Search:
    """A search in simulated time: `complete` are the times at which evaluations have ended, with their losses."""

    def __init__(self, curves: Sequence[Curve], pruner: Unpruned) -> None:
        self._curves = curves
        self._pruner = pruner
        self._epochs: list[int] = []  # of each individual that was drawn
        self.complete: list[tuple[float, float]] = []

    def run(self, until: float) -> Search:
        """Search for so many seconds."""
        events = [(0.0, worker, -1) for worker in range(WORKERS)]
        while events:
            now, worker, individual = heapq.heappop(events)
            if now > until:
                break
            if individual < 0 or not self._goes_on(individual, now):
                individual = self._next()
            heapq.heappush(events, (now + self._curves[individual].seconds, worker, individual))
        return self

    def best(self) -> float:
        """Return the lowest loss of the evaluations that are complete."""
        return min((loss for _, loss in self.complete), default=math.inf)

    def seconds_to(self, loss: float) -> float:
        """Return when an evaluation was complete that had such a loss, or a lower one; infinity where none was."""
        return min((time for time, found in self.complete if found <= loss), default=math.inf)

    def _next(self) -> int:
        promoted = self._pruner.promoted()
        if promoted is not None:
            return promoted
        self._epochs.append(0)
        return len(self._epochs) - 1

    def _goes_on(self, individual: int, now: float) -> bool:
        """Let an individual go on by an epoch, and tell whether it goes on afterwards."""
        curve = self._curves[individual].losses
        if self._epochs[individual] == len(curve):
            self._pruner.fail(individual)
            return False
        self._epochs[individual] += 1
        losses = list(map(float, curve[: self._epochs[individual]]))
        if len(losses) == EPOCHS:
            self.complete.append((now, min(losses)))
        return self._pruner.goes_on(individual, losses)


class Inheriting(Search):
    """A search whose evaluations are short, and begin where one of the ten best has ended, if one fits."""

    def __init__(self, curves: Sequence[Curve], fixed: Sequence[str]) -> None:
        super().__init__(curves, Unpruned())
        self._fixed = fixed
        self._ended: list[tuple[float, int, float]] = []  # of each: its lowest loss, who it was, its last loss
        self._from: list[int] = []  # the epoch of their own curve at which individuals begin

    def _next(self) -> int:
        individual = super()._next()
        params, losses = self._curves[individual].params, self._curves[individual].losses
        for _, other, last in self._ended[:_PARENTS]:
            if all(self._curves[other].params[name] == params[name] for name in self._fixed):
                begin = next((epoch for epoch, loss in enumerate(losses, start=1) if loss <= last), EPOCHS)
                self._from.append(min(begin, EPOCHS - _SHORT))
                return individual
        self._from.append(0)
        return individual

    def _goes_on(self, individual: int, now: float) -> bool:
        curve, begin = self._curves[individual].losses, self._from[individual]
        self._epochs[individual] += 1
        if begin + self._epochs[individual] > len(curve):
            return False
        if self._epochs[individual] < _SHORT:
            return True
        losses = list(map(float, curve[begin : begin + _SHORT]))
        self.complete.append((now, min(losses)))
        insort(self._ended, (min(losses), individual, losses[-1]))
        return False


def pruners() -> dict[str, Callable[[], Unpruned]]:
    """Return what makes pruners, by their names; those of the project that pause can also stop instead."""
    found: dict[str, Callable[[], Unpruned]] = {"none": Unpruned, "median": Median}
    for name, halving in HALVING_SCHEDULES.items():
        for pauses in (False, True):
            found[name if pauses else f"{name}, stopping"] = partial(Halved, halving, pauses)
    return found


def _pruned(make: Callable[[], Unpruned], curves: Sequence[Curve]) -> Search:
    return Search(curves, make())


def _correlations(curves: Sequence[Curve]) -> str:
    """Return as text how well the lowest loss until an epoch tells the lowest of all, by the order of individuals."""
    lowest = np.array([np.minimum.accumulate(one.losses) for one in curves if len(one.losses) == EPOCHS])
    found = {epoch: spearmanr(lowest[:, epoch - 1], lowest[:, -1])[0] for epoch in (1, 3, 9)}
    return ", ".join(f"{rho:.2f} after {epoch}" for epoch, rho in found.items())


def main() -> None:
    """Print medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search_spaces", nargs="*", default=["digits_cnn", "text_transformer"])
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    for name in chosen.search_spaces:
        curves = load(name)
        until = sum(one.seconds * len(one.losses) for one in curves) / 3 / WORKERS
        print(f"\n{name}: {len(curves)} individuals, {until:.0f} s of {WORKERS} workers")
        print(f"rank correlation of losses with the last ones: {_correlations(curves)}")
        print(f"{'pruner':22s}time to none's lowest   reached   lowest, beside none's     at worst  complete")
        orders = [random.Random(seed).choices(curves, k=_MANY) for seed in range(chosen.seeds)]
        full = [Search(order, Unpruned()).run(until) for order in orders]
        searches: dict[str, Callable[[Sequence[Curve]], Search]] = {
            **{pruner: partial(_pruned, make) for pruner, make in pruners().items()},
            "inheritance": partial(Inheriting, fixed=fixed_of(name)),
        }
        for pruner, search in searches.items():
            times, ends, complete = [], [], []
            for order, other in zip(orders, full, strict=True):
                found = search(order).run(until)
                times.append(found.seconds_to(other.best() * (1 + _TOLERANCE)) / until)
                ends.append(found.best() / other.best())
                complete.append(len(found.complete))
            reached = sum(map(math.isfinite, times))
            print(
                f"{pruner:22s}{statistics.median(times):21.2f}{reached:7d}/{len(times)}"
                f"{statistics.median(ends):24.3f}{max(ends):13.3f}{statistics.median(complete):10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
