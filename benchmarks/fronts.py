"""How good a search for several objectives is: on tables of networks, and on functions, whose fronts are known.

Prints the hypervolume that is dominated after so many evaluations, as a share of what the problem's own front
dominates, beside Optuna's NSGA-II and its TPE. `pip install '.[benchmarks]'` first.
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
from benchmarks.searchers import OptunaStudy, Searcher, optuna_sampler
from benchmarks.simulation import WORKERS, SimulatedIslands, simulate
from benchmarks.trades import Trade

AFTER = (50, 100, 200)
FAMILIES = ("hpobench", "hpolib", "nasbench201", "functions")

Vector = npt.NDArray[np.float64]
Make = Callable[[Trade, int], Searcher]  # from a problem and a seed


def _islands(islands: int, name: str, trade: Trade, seed: int) -> Searcher:
    return SimulatedIslands(trade.space, (name,), islands, seed, objectives=trade.objectives)


def _study(name: str, trade: Trade, seed: int) -> Searcher:
    return OptunaStudy(trade.space, optuna_sampler(name, seed), len(trade.objectives.names))


METHODS: dict[str, Make] = {
    "default, 2 islands": partial(_islands, 2, "ga"),
    "default, 4 islands": partial(_islands, 4, "ga"),
    "tpe, 2 islands": partial(_islands, 2, "tpe"),
    "random": partial(_islands, 1, "random"),
    "Optuna's NSGA-II": partial(_study, "NSGA-II"),
    "Optuna's TPE": partial(_study, "TPE"),
}


def _shares(make: Make, family: str, name: str, seed: int) -> list[float]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    trade = trades.load(family, name)
    costs = simulate(make(trade, seed), trade.evaluate, AFTER[-1], WORKERS)
    return [trade.share(costs[:count]) for count in AFTER]


def measure(make: Make, families: list[str], seeds: int, processes: int) -> dict[str, Vector]:
    """Return the shares of each problem, shape (seeds, numbers of evaluations)."""
    with ProcessPoolExecutor(processes) as pool:
        jobs = {
            f"{family}/{name}": [pool.submit(_shares, make, family, name, seed) for seed in range(seeds)]
            for family in families
            for name in trades.names(family)
        }
        return {name: np.array([job.result() for job in runs]) for name, runs in jobs.items()}


def main() -> None:
    """Measure, and print means over problems, and over those of each family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    families = chosen.families.split(",")
    print(f"{'hypervolume':22s}" + "".join(f"{f'after {count}':>12s}" for count in AFTER) + "   of each family")
    for label, make in METHODS.items():
        shares = measure(make, families, chosen.seeds, chosen.processes)
        means = np.mean([one.mean(axis=0) for one in shares.values()], axis=0)
        cells = "".join(f"{mean:12.4f}" for mean in means)
        for family in families:
            own = np.mean([one.mean(axis=0) for name, one in shares.items() if name.startswith(family)], axis=0)
            cells += "   " + " ".join(f"{mean:.4f}" for mean in own)
        print(f"{label:22s}{cells}", flush=True)


if __name__ == "__main__":
    main()
