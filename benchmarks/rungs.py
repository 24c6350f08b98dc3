"""Measure pruners with two objectives, a loss and a size, in simulated searches.

    python -m benchmarks.rungs

Four workers draw individuals at random. A search has 60 * 27 epochs, and an individual trains for
at most 27. The loss of an individual falls towards a limit. A larger individual has a lower limit,
but needs more epochs. At a rung (epoch at which a pruner decides), individuals are compared by the
loss alone, or by both objectives (Pareto dominance).

The script prints means over seeds: the number of complete evaluations, the number of evaluations on
the Pareto front, and the hypervolume as a share of the best possible one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpo.dominance import compute_hypervolume
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import find_front
from hpo.store.pruning import HALVING_SCHEDULES, SuccessiveHalving

WORKERS, EPOCHS, TRAININGS = 4, 27, 60
TWO = Objectives(("loss", "size"))
REFERENCE = (2.0, 1.0)
_SIZES = np.linspace(0, 1, 2001)


def compute_limit(size: float) -> float:
    """Compute the limit of the loss of an individual whose size is from 0 to 1."""
    return float((1 - size**0.5) ** 2)


class Individual:
    """An individual with two hyperparameters, its size and a rate, drawn from 0 to 1.

    A lower rate is always better.
    """

    def __init__(self, drawn: random.Random) -> None:
        self.size, self.rate = drawn.random(), drawn.random()
        self._noise = [drawn.gauss(0, 0.01) for _ in range(EPOCHS)]

    def loss(self, epoch: int) -> float:
        """Compute the loss after an epoch, counted from 1."""
        left = (1 + 2 * self.size) / (epoch + 1)
        return compute_limit(self.size) + 0.5 * self.rate + left + self._noise[epoch - 1]


class Search:
    """A simulated search.

    Its pruner compares individuals by `objectives`: the loss, or both. "none" never pauses.
    """

    def __init__(self, pruner: str, objectives: Objectives, seed: int) -> None:
        self._drawn = random.Random(seed)
        self._halving = HALVING_SCHEDULES.get(pruner)
        self._ladder = SuccessiveHalving(self._halving, objectives) if self._halving else None
        self._individuals: dict[int, Individual] = {}
        self._roots: dict[int, int] = {}
        self.evaluations: list[Evaluation] = []

    def run(self) -> Search:
        """Search until the epochs are spent. Then complete the evaluations that are running."""
        working: list[int] = []
        for _ in range(TRAININGS * EPOCHS):
            while len(working) < WORKERS:
                working.append(self._start_evaluation())
            trial = working.pop(0)
            if self._train_epoch(trial):
                working.append(trial)
        for trial in working:
            while self._train_epoch(trial):
                pass
        return self

    def _start_evaluation(self) -> int:
        trial = len(self.evaluations)
        waiting = self._ladder.update(self.evaluations).find_promotable() if self._ladder else []
        one = Evaluation(trial, "running", 9.0, {}, 0, 0, 0)
        self._roots[trial] = trial
        if waiting:
            paused = waiting[0]
            self.evaluations[paused.trial] = replace(paused, state="promoted")
            self._roots[trial] = self._roots[paused.trial]
            one = replace(
                paused, trial=trial, state="running", retry_of=paused.trial, paused_after=0
            )
        else:
            self._individuals[trial] = Individual(self._drawn)
        self.evaluations.append(one)
        return trial

    def _train_epoch(self, trial: int) -> bool:
        """Train an evaluation for an epoch, and return whether it continues."""
        root = self._roots[trial]
        individual, one = self._individuals[root], self.evaluations[trial]
        epoch = len(one.curve) + 1
        curve = {**one.curve, epoch: individual.loss(epoch)}
        one = replace(one, curve=curve, loss=min(curve.values()), other_values=(individual.size,))
        is_rung = self._halving is not None and self._halving.has_rung(root, epoch)
        self.evaluations[trial] = (
            replace(one, at_rungs={**one.at_rungs, epoch: one.values}) if is_rung else one
        )
        if epoch == EPOCHS:
            self.evaluations[trial] = replace(self.evaluations[trial], state="complete")
            return False
        if is_rung and not self._should_continue(root, epoch):
            self.evaluations[trial] = replace(
                self.evaluations[trial], state="paused", paused_after=epoch
            )
            return False
        return True

    def _should_continue(self, root: int, epoch: int) -> bool:
        assert self._ladder is not None
        assert self._halving is not None
        rung = self._ladder.update(self.evaluations).find_rung(
            self._halving.find_bracket(root), epoch
        )
        return rung is None or not rung.is_effective or rung.is_promoted(root)

    def compute_result(self) -> tuple[float, float, float]:
        """Return three results of the search.

        Returns:
            The number of complete evaluations; the number of evaluations on the Pareto front; and
            the hypervolume as a share of the best possible one.
        """
        complete = sum(one.state == "complete" for one in self.evaluations)
        best = find_front(self.evaluations, TWO)
        return (
            complete,
            len(best),
            compute_hypervolume(np.array([one.values for one in best]), REFERENCE)
            / _compute_largest_hypervolume(),
        )


def _compute_largest_hypervolume() -> float:
    """Compute the hypervolume if the best individuals of all sizes are found."""
    losses = [compute_limit(size) + (1 + 2 * size) / (EPOCHS + 1) for size in _SIZES]
    return compute_hypervolume(np.stack([losses, _SIZES], axis=1), REFERENCE)


def time_decisions(reached: int) -> tuple[float, float]:
    """Return the median seconds to find evaluations to promote, and to decide on a pause.

    `reached` individuals have been compared at the first rung before.
    """
    drawn = random.Random(0)
    ladder = SuccessiveHalving(HALVING_SCHEDULES["asha"], TWO)
    evaluations = [Evaluation(trial, "running", 9.0, {}, 0, 0, 0) for trial in range(reached)]
    for trial in range(reached):
        loss, size = drawn.random(), drawn.random()
        evaluations[trial] = replace(
            evaluations[trial],
            state="paused",
            paused_after=1,
            loss=loss,
            curve={1: loss},
            at_rungs={1: (loss, size)},
        )
    for one in ladder.update(evaluations).find_promotable():
        evaluations[one.trial] = replace(one, state="promoted")
        evaluations.append(
            replace(
                one, trial=len(evaluations), state="running", retry_of=one.trial, paused_after=0
            )
        )
    ladder = SuccessiveHalving(HALVING_SCHEDULES["asha"], TWO).update(evaluations)
    claims, decisions = [], []
    for _ in range(50):
        values = (drawn.random(), drawn.random())
        one = Evaluation(
            len(evaluations),
            "running",
            9.0,
            {},
            0,
            0,
            0,
            curve={1: values[0]},
            at_rungs={1: values},
        )
        evaluations.append(one)
        before = time.perf_counter()
        rung = ladder.update(evaluations).find_rung(0, 1)
        assert rung is not None
        rung.is_promoted(one.trial)
        judged = time.perf_counter()
        ladder.find_promotable()
        claims.append(time.perf_counter() - judged)
        decisions.append(judged - before)
    return statistics.median(claims), statistics.median(decisions)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of the pruners, and the times of decisions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args(arguments).seeds)
    print(f"{'':34} evaluations  complete  on the front  hypervolume (standard error)")
    for name, pruner, objectives in (
        ("none", "none", TWO),
        *((f"{pruner}, by the loss", pruner, ONLY_LOSS) for pruner in HALVING_SCHEDULES),
        *((f"{pruner}, by dominance", pruner, TWO) for pruner in HALVING_SCHEDULES),
    ):
        searches = [Search(pruner, objectives, seed).run() for seed in seeds]
        begun = statistics.mean(len(search._individuals) for search in searches)
        complete, best, volume = (
            list(column)
            for column in zip(*(search.compute_result() for search in searches), strict=True)
        )
        error = statistics.stdev(volume) / len(volume) ** 0.5 if len(volume) > 1 else 0.0
        print(
            f"{name:34} {begun:11.0f} {statistics.mean(complete):9.1f} "
            f"{statistics.mean(best):13.1f}"
            f"  {statistics.mean(volume):11.3f} ({error:.3f})"
        )
    for reached in (1000, 10_000):
        claim, decision = time_decisions(reached)
        print(
            f"{reached} at a rung: {1000 * claim:.2f} ms per claim, "
            f"{1000 * decision:.2f} ms per decision"
        )


if __name__ == "__main__":
    main()
