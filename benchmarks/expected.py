"""Measure the errors of expected losses, and the regrets of the lowest expected losses.

An expected loss is the prediction of the model of this project. A table has the losses of each
network with several seeds. Their mean over seeds counts as the true loss. The default search runs
with 8 workers in simulated time. An evaluation returns the loss of its network with a random seed.
All figures are divided by the distance from the lowest to the median of the table's mean losses.
Requires `pip install '.[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import tables
from hpo.results.models import compute_expected_losses
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation, rank_evaluations
from tests.support.simulation import SimulatedIslands, simulate

AFTER = (32, 64, 128)
LABELS = (
    "measured: error (size)",
    "expected: error (size)",
    "regret: lowest measured",
    "lowest expected",
    "of 5 by measured",
    "of 5 by expected",
    "of 3 measured, 2 expected",
    "lowest mean of repeats",
)
_REPEATED = 0.2  # Share of the evaluations that are repeats in the last selection.
_REPEATS = 3  # Of each individual.


def measure_run(family: str, name: str, seed: int) -> list[list[float]]:
    """Run a search on a table.

    Return the figures of `LABELS` after each number of evaluations in `AFTER`.
    """
    warnings.simplefilter("ignore")
    table, losses = tables.load(family, name), tables.load_losses(family, name)
    draws, evaluations = random.Random(seed), list[Evaluation]()

    def evaluate(params: Mapping[str, Any]) -> tuple[float, float]:
        loss = draws.choice(losses[tuple(params.values())])
        evaluations.append(Evaluation(len(evaluations), "complete", loss, dict(params), 0, 0, 0))
        return loss, table.evaluate(params)[1]

    simulate(SimulatedIslands(table.space, ("ga",), 2, seed), evaluate, AFTER[-1])
    means = {index: float(np.mean(of_seeds)) for index, of_seeds in losses.items()}
    lowest = min(means.values())
    unit = float(np.median(list(means.values()))) - lowest
    return [
        [
            figure / unit
            for figure in [
                *_compute_figures(evaluations[:count], table.space, means, lowest),
                _repeat_best(evaluations[:count], losses, draws) - lowest,
            ]
        ]
        for count in AFTER
    ]


def _compute_figures(
    evaluations: Sequence[Evaluation],
    space: SearchSpace,
    means: Mapping[tuple[int, ...], float],
    lowest: float,
) -> list[float]:
    """Return the first seven figures of `LABELS`.

    They are two errors, and the regrets of five selections of individuals.

    The errors are of the individual with the lowest measured loss: its measured loss, and its
    expected loss, each minus its mean loss over seeds. The regret of a selection is the lowest mean
    loss of its individuals minus `lowest`, the lowest mean loss of the table. A selection has the
    individuals with the lowest measured or expected losses.
    """
    expected = compute_expected_losses(evaluations, space)
    means_of = {one.trial: means[tuple(one.params.values())] for one in evaluations}
    by_loss = [one.trial for one in rank_evaluations(evaluations, len(evaluations))]
    # Too few different losses for a model.
    by_model = sorted(expected, key=lambda trial: expected[trial]) or by_loss
    first, loss = by_loss[0], rank_evaluations(evaluations, 1)[0].loss
    chosen = [
        by_loss[:1],
        by_model[:1],
        by_loss[:5],
        by_model[:5],
        list(dict.fromkeys([*by_loss[:3], *by_model]))[:5],
    ]
    regrets = [min(means_of[trial] for trial in trials) - lowest for trials in chosen]
    return [loss - means_of[first], expected.get(first, loss) - means_of[first], *regrets]


def _repeat_best(
    evaluations: Sequence[Evaluation],
    losses: Mapping[tuple[int, ...], Sequence[float]],
    draws: random.Random,
) -> float:
    """Return the mean loss over all seeds of the individual that repeats select.

    The last fifth of the evaluations are not used. Instead, the best others are evaluated 3 more
    times each, with random seeds, and the lowest mean wins.
    """
    repeats = int(_REPEATED * len(evaluations))
    best = rank_evaluations(evaluations[: len(evaluations) - repeats], max(1, repeats // _REPEATS))

    def measure_mean(evaluation: Evaluation) -> float:
        others = [draws.choice(losses[tuple(evaluation.params.values())]) for _ in range(_REPEATS)]
        return float(np.mean([evaluation.loss, *others]))

    return float(np.mean(losses[tuple(min(best, key=measure_mean).params.values())]))


def main() -> None:
    """Print means over tables and seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    for family in tables.FAMILIES:
        names = tables.FAMILIES[family][0].available_dataset_names
        with ProcessPoolExecutor(chosen.processes) as pool:
            jobs = [
                pool.submit(measure_run, family, name, seed)
                for name in names
                for seed in range(chosen.seeds)
            ]
            of_runs: npt.NDArray[np.float64] = np.array([job.result() for job in jobs])
        print(f"{family:28s}" + "".join(f"{f'after {count}':>18s}" for count in AFTER))
        for index, label in enumerate(LABELS):
            means, sizes = (
                of_runs[:, :, index].mean(axis=0),
                np.abs(of_runs[:, :, index]).mean(axis=0),
            )
            cells = [
                f"{mean:+.3f} ({size:.3f})" if index < 2 else f"{mean:.4f}"
                for mean, size in zip(means, sizes, strict=True)
            ]
            print(f"    {label:24s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
