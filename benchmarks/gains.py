"""Compare the expected gain of the next tenth of the budget with what searches really gain.

The loss is 1 + regret / median regret, so that a gain is a share of a loss that is not near 0.
"""

from __future__ import annotations

import argparse
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import numpy.typing as npt

from benchmarks import functions, problems, tables
from hpo.breeding.propagator_names import DEFAULT_PROPAGATORS
from hpo.store.evaluations import Evaluation
from hpo.store.search_gain import estimate_next_gain
from tests.support.simulation import WORKERS, SimulatedIslands, simulate

FAMILIES = (*tables.FAMILIES, *functions.SUITES)
SEARCHES = {"default": tuple(DEFAULT_PROPAGATORS), "random": ("random",)}
EVALUATIONS = 200
BUDGETS = (100, 200, 1000)
COUNTS = (20, 30, 50, 70, 100, 150)  # Numbers of evaluations after which the gain is estimated.
SMALL = 0.01  # --stop-gain 1%


def _search(search: str, family: str, name: str, seed: int) -> npt.NDArray[np.float64]:
    """Return the losses of a search, in the order in which its evaluations end."""
    warnings.simplefilter("ignore")
    problem = problems.load(family, name)
    islands = SimulatedIslands(problem.space, SEARCHES[search], 2, seed)
    regrets = simulate(islands, problem.evaluate, EVALUATIONS, WORKERS)
    losses: npt.NDArray[np.float64] = 1 + regrets / np.median(regrets)
    return losses


def _compare(losses: npt.NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return pairs of the real and the expected gain, for each budget and number of evaluations."""
    ended = [
        Evaluation(trial, "complete", float(loss), {}, 0, 0, trial, ended=float(trial))
        for trial, loss in enumerate(losses)
    ]
    pairs: list[tuple[float, float]] = []
    for budget in BUDGETS:
        for count in COUNTS:
            end = count + budget // 10
            expected = estimate_next_gain(ended[:count], budget) if end <= min(budget, len(losses)) else None
            if expected is not None:
                pairs.append((1 - losses[:end].min() / losses[:count].min(), expected.gain))
    return pairs


def main() -> None:
    """Run all searches, and print the mean gains, and how often little is expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    problems.add_options(parser, FAMILIES)
    chosen = parser.parse_args()
    headings = ("real", "expected", "below 1%", "real then")
    print(f"{'':12s}{'':10s}" + "".join(f"{heading:>12s}" for heading in headings))
    with ProcessPoolExecutor(chosen.processes) as pool:
        for family in chosen.families.split(","):
            names = problems.list_names(family)[chosen.first :: chosen.every]
            for search in SEARCHES:
                jobs = [
                    pool.submit(_search, search, family, name, seed) for name in names for seed in range(chosen.seeds)
                ]
                gains = np.array([pair for job in jobs for pair in _compare(job.result())])
                small = gains[gains[:, 1] < SMALL]
                values = (*gains.mean(axis=0), len(small) / len(gains), small[:, 0].mean() if len(small) else 0.0)
                print(f"{family:12s}{search:10s}" + "".join(f"{value:12.1%}" for value in values), flush=True)


if __name__ == "__main__":
    main()
