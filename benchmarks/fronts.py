"""Measure searches with several objectives, on problems with known Pareto fronts.

Prints the hypervolume that is dominated by the front of each search, as a share of the hypervolume
of the true front. Compares this project, Optuna's NSGA-II and Optuna's TPE. Requires `pip install
'.[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import optuna

from benchmarks import trades
from benchmarks.searchers import OptunaStudy, Searcher, make_optuna_sampler
from benchmarks.trades import Trade
from tests.support.simulation import WORKERS, SimulatedIslands, simulate

AFTER = (50, 100, 200)
FAMILIES = ("hpobench", "hpolib", "nasbench201", "functions")

Vector = npt.NDArray[np.float64]
Make = Callable[[Trade, int], Searcher]  # Arguments: a problem and a seed.


def _make_islands(islands: int, name: str, trade: Trade, seed: int) -> Searcher:
    return SimulatedIslands(trade.space, (name,), islands, seed, objectives=trade.objectives)


def _make_study(name: str, trade: Trade, seed: int) -> Searcher:
    return OptunaStudy(trade.space, make_optuna_sampler(name, seed), len(trade.objectives.names))


METHODS: dict[str, Make] = {
    "default, 2 islands": partial(_make_islands, 2, "ga"),
    "default, 4 islands": partial(_make_islands, 4, "ga"),
    "tpe, 2 islands": partial(_make_islands, 2, "tpe"),
    "random": partial(_make_islands, 1, "random"),
    "Optuna's NSGA-II": partial(_make_study, "NSGA-II"),
    "Optuna's TPE": partial(_make_study, "TPE"),
}


def _measure_shares(make: Make, family: str, name: str, seed: int) -> list[float]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trade = trades.load(family, name)
    costs = simulate(make(trade, seed), trade.evaluate, AFTER[-1], WORKERS)
    return [trade.compute_share(costs[:count]) for count in AFTER]


def measure(make: Make, families: list[str], seeds: int, processes: int) -> dict[str, Vector]:
    """Search all problems with all seeds.

    Return shares of the true hypervolume, by FAMILY/NAME of the problem.

    `make` makes the search. The shares have shape (seeds, len(AFTER)): one after each number of
    evaluations in `AFTER`.
    """
    with ProcessPoolExecutor(processes) as pool:
        jobs = {
            f"{family}/{name}": [
                pool.submit(_measure_shares, make, family, name, seed) for seed in range(seeds)
            ]
            for family in families
            for name in trades.list_names(family)
        }
        return {name: np.array([job.result() for job in runs]) for name, runs in jobs.items()}


def main() -> None:
    """Print mean shares of the true hypervolume, over all problems and over each family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    families = chosen.families.split(",")
    print(
        f"{'hypervolume':22s}"
        + "".join(f"{f'after {count}':>12s}" for count in AFTER)
        + "   of each family"
    )
    for label, make in METHODS.items():
        shares = measure(make, families, chosen.seeds, chosen.processes)
        means = np.mean([one.mean(axis=0) for one in shares.values()], axis=0)
        cells = "".join(f"{mean:12.4f}" for mean in means)
        for family in families:
            own = np.mean(
                [one.mean(axis=0) for name, one in shares.items() if name.startswith(family)],
                axis=0,
            )
            cells += "   " + " ".join(f"{mean:.4f}" for mean in own)
        print(f"{label:22s}{cells}", flush=True)


if __name__ == "__main__":
    main()
