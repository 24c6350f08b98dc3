"""Compare pruners in simulated searches on recorded learning curves.

    python -m benchmarks.fidelity

Eight workers draw individuals at random, with replacement, from benchmarks/curves.parquet. A search
lasts as long as eight workers take to train a third of the individuals. The table compares each
pruner with a search without a pruner. The first figure is the time until the lowest loss of this
search is reached, as a share of the duration. The second is the ratio of the lowest losses at the
end. Checkpoints take no time.

With PBT (population based training), an evaluation has 3 epochs. An individual continues a parent
that differs only in mutable parameters. Its losses after the parent are not recorded. They are
taken from the individual's own curve, after the first epoch whose loss is at most the parent's
final loss. So no schedule can be better than the best curve.
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

from benchmarks.curves import EPOCHS, Curve, list_fixed_parameters, load
from hpo.store.pruning import HALVING_SCHEDULES, HalvingSchedule

WORKERS = 8
_TOLERANCE = 1e-3  # Relative tolerance of the loss to reach.
_MANY = 5000  # More individuals than a search draws.
_SHORT = 3  # Epochs of an evaluation with PBT.
_PARENTS = 10


class NoPruner:
    """A pruner that stops no individual.

    Subclasses stop or pause individuals, and select paused ones to continue.
    """

    def should_continue(self, _: int, losses: Sequence[float]) -> bool:
        """Return whether an individual trains for another epoch, given its losses so far."""
        return len(losses) < EPOCHS

    def pop_promoted(self) -> int | None:
        """Remove a paused individual to continue, and return it; None if there is none."""
        return None

    def fail(self, individual: int) -> None:
        """Record that an individual has failed."""


class MedianPruner(NoPruner):
    """Stops an individual if its lowest loss exceeds the median of complete ones at that epoch.

    Optuna's median pruner does the same.
    """

    def __init__(self) -> None:
        self._complete: list[Sequence[float]] = []

    def should_continue(self, _: int, losses: Sequence[float]) -> bool:
        """Return whether an individual trains for another epoch, given its losses so far."""
        if len(losses) == EPOCHS:
            self._complete.append(losses)
            return False
        others = [curve[len(losses) - 1] for curve in self._complete]
        return len(others) < 5 or min(losses) <= statistics.median(others)


class HalvingPruner(NoPruner):
    """Continues the best individuals at each rung.

    It decides as `hpo.store.pruning` does. It pauses the other individuals, or stops them if
    `pauses` is false.
    """

    def __init__(self, halving: HalvingSchedule, pauses: bool) -> None:
        self._halving = halving
        self._pauses = pauses
        self._reached: dict[tuple[int, int], list[tuple[float, int]]] = {}
        self._paused: dict[tuple[int, int], list[tuple[float, int]]] = {}
        # Last rung of each individual, and its loss there.
        self._at: dict[int, tuple[tuple[int, int], float]] = {}

    def should_continue(self, individual: int, losses: Sequence[float]) -> bool:
        """Return whether an individual trains for another epoch, given its losses so far."""
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

    def pop_promoted(self) -> int | None:
        """Remove a paused individual to continue, and return it; None if there is none."""
        for key in sorted(self._paused, key=lambda key: -key[1]):
            paused, reached = self._paused[key], self._reached[key]
            if paused and bisect_left(reached, paused[0]) < self._halving.count_promoted(
                len(reached)
            ):
                return paused.pop(0)[1]
        return None

    def fail(self, individual: int) -> None:
        """Record that an individual has failed. It ranks behind all others."""
        if individual in self._at:
            key, loss = self._at[individual]
            self._reached[key].remove((loss, individual))
            insort(self._reached[key], (math.inf, individual))


class Search:
    """A search in simulated time.

    `complete` lists the end time and the lowest loss of each complete evaluation.
    """

    def __init__(self, curves: Sequence[Curve], pruner: NoPruner) -> None:
        self._curves = curves
        self._pruner = pruner
        self._epochs: list[int] = []  # Epochs of each individual so far.
        self.complete: list[tuple[float, float]] = []

    def run(self, until: float) -> Search:
        """Search until the simulated time `until`, in seconds."""
        events = [(0.0, worker, -1) for worker in range(WORKERS)]
        while events:
            now, worker, individual = heapq.heappop(events)
            if now > until:
                break
            if individual < 0 or not self._train_epoch(individual, now):
                individual = self._choose_next()
            heapq.heappush(events, (now + self._curves[individual].seconds, worker, individual))
        return self

    def find_lowest_loss(self) -> float:
        """Return the lowest loss of the complete evaluations."""
        return min((loss for _, loss in self.complete), default=math.inf)

    def compute_seconds_to(self, loss: float) -> float:
        """Return the time of the first complete evaluation with at most `loss`, or infinity."""
        return min((time for time, found in self.complete if found <= loss), default=math.inf)

    def _choose_next(self) -> int:
        promoted = self._pruner.pop_promoted()
        if promoted is not None:
            return promoted
        self._epochs.append(0)
        return len(self._epochs) - 1

    def _train_epoch(self, individual: int, now: float) -> bool:
        """Train an individual for an epoch, and return whether it continues."""
        curve = self._curves[individual].losses
        if self._epochs[individual] == len(curve):
            self._pruner.fail(individual)
            return False
        self._epochs[individual] += 1
        losses = list(map(float, curve[: self._epochs[individual]]))
        if len(losses) == EPOCHS:
            self.complete.append((now, min(losses)))
        return self._pruner.should_continue(individual, losses)


class PbtSearch(Search):
    """A search with population based training (PBT), whose evaluations have 3 epochs.

    The parent of an individual is one of the ten best ended individuals, and differs only in
    mutable parameters. If there are several, it is the best. Without a parent, an individual starts
    with the first epoch.
    """

    def __init__(self, curves: Sequence[Curve], fixed: Sequence[str]) -> None:
        super().__init__(curves, NoPruner())
        self._fixed = fixed
        self._ended: list[tuple[float, int, float]] = []  # Lowest loss, individual and last loss.
        self._first_epochs: list[int] = []  # First epoch on its own curve, for each individual.

    def _choose_next(self) -> int:
        individual = super()._choose_next()
        params, losses = self._curves[individual].params, self._curves[individual].losses
        for _, other, last in self._ended[:_PARENTS]:
            if all(self._curves[other].params[name] == params[name] for name in self._fixed):
                begin = next(
                    (epoch for epoch, loss in enumerate(losses, start=1) if loss <= last), EPOCHS
                )
                self._first_epochs.append(min(begin, EPOCHS - _SHORT))
                return individual
        self._first_epochs.append(0)
        return individual

    def _train_epoch(self, individual: int, now: float) -> bool:
        curve, begin = self._curves[individual].losses, self._first_epochs[individual]
        self._epochs[individual] += 1
        if begin + self._epochs[individual] > len(curve):
            return False
        if self._epochs[individual] < _SHORT:
            return True
        losses = list(map(float, curve[begin : begin + _SHORT]))
        self.complete.append((now, min(losses)))
        insort(self._ended, (min(losses), individual, losses[-1]))
        return False


def make_pruners() -> dict[str, Callable[[], NoPruner]]:
    """Return functions by name, each of which makes a pruner.

    Halving pruners pause, or stop in a second variant.
    """
    found: dict[str, Callable[[], NoPruner]] = {"none": NoPruner, "median": MedianPruner}
    for name, halving in HALVING_SCHEDULES.items():
        for pauses in (False, True):
            found[name if pauses else f"{name}, stopping"] = partial(HalvingPruner, halving, pauses)
    return found


def _make_search(make: Callable[[], NoPruner], curves: Sequence[Curve]) -> Search:
    return Search(curves, make())


def _describe_correlations(curves: Sequence[Curve]) -> str:
    """Describe the rank correlation of the lowest losses after few epochs with those after all.

    The few epochs are 1, 3 and 9.
    """
    lowest = np.array(
        [np.minimum.accumulate(one.losses) for one in curves if len(one.losses) == EPOCHS]
    )
    found = {epoch: spearmanr(lowest[:, epoch - 1], lowest[:, -1])[0] for epoch in (1, 3, 9)}
    return ", ".join(f"{rho:.2f} after {epoch}" for epoch, rho in found.items())


def main() -> None:
    """Print a table for each search space, with medians over the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("search_spaces", nargs="*", default=["digits_cnn", "text_transformer"])
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    for name in chosen.search_spaces:
        curves = load(name)
        until = sum(one.seconds * len(one.losses) for one in curves) / 3 / WORKERS
        print(f"\n{name}: {len(curves)} individuals, {until:.0f} s of {WORKERS} workers")
        print(f"rank correlation of losses with the last ones: {_describe_correlations(curves)}")
        print(
            f"{'pruner':22s}time to none's lowest   reached   lowest / none's lowest    worst  "
            "complete"
        )
        orders = [random.Random(seed).choices(curves, k=_MANY) for seed in range(chosen.seeds)]
        full = [Search(order, NoPruner()).run(until) for order in orders]
        searches: dict[str, Callable[[Sequence[Curve]], Search]] = {
            **{pruner: partial(_make_search, make) for pruner, make in make_pruners().items()},
            "PBT": partial(PbtSearch, fixed=list_fixed_parameters(name)),
        }
        for pruner, search in searches.items():
            times, ends, complete = [], [], []
            for order, other in zip(orders, full, strict=True):
                found = search(order).run(until)
                times.append(
                    found.compute_seconds_to(other.find_lowest_loss() * (1 + _TOLERANCE)) / until
                )
                ends.append(found.find_lowest_loss() / other.find_lowest_loss())
                complete.append(len(found.complete))
            reached = sum(map(math.isfinite, times))
            print(
                f"{pruner:22s}{statistics.median(times):21.2f}{reached:7d}/{len(times)}"
                f"{statistics.median(ends):24.3f}{max(ends):13.3f}{statistics.median(complete):10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
