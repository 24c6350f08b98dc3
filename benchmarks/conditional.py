"""Problems with conditional parameters.

One of three kinds of networks is chosen, each with its own hyperparameters.

Each kind has a table of trained networks. The regret in a table is 0 for its best network, and 1
for the median.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import tables
from benchmarks.tables import Table
from hpo.space import Categorical, Parameter, SearchSpace

# In flattened problems, all hyperparameters are always active.
FAMILIES = ("conditional", "flattened")
_MARGIN = 0.1  # Difference between the lowest regrets of two kinds, in units of the median regret.
# Orders of the tables, the best first.
_ORDERS = list(itertools.permutations(range(len(tables.FAMILIES))))


@dataclass(frozen=True)
class Choice:
    """A problem with a table of trained networks for each kind of network.

    The regret of a network is its regret in the table, plus a margin: 0 for the best kind, more for
    the other kinds.
    """

    name: str
    space: SearchSpace
    _tables: Mapping[str, Table]
    _margins: Mapping[str, float]

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of a network, and its training time relative to its table's mean."""
        kind = params["network"]
        table = self._tables[kind]
        own = {name: params[f"{kind}_{name}"] for name in table.space.parameters}
        regret, seconds = table.evaluate(own)
        return regret + self._margins[kind], seconds / float(table.seconds.mean())


def list_names() -> list[str]:
    """Return the names of the six problems. Each kind of network is the best one in two of them."""
    return [str(number) for number in range(len(_ORDERS))]


def load(family: str, name: str) -> Choice:
    """Load a problem.

    In the family "flattened", the hyperparameters of all kinds are always active.
    """
    chosen = {kind: _load_table(kind, int(name)) for kind in tables.FAMILIES}
    parameters = {
        f"{kind}_{name_of_parameter}": parameter
        if family == "flattened"
        else _add_condition(parameter, kind)
        for kind, table in chosen.items()
        for name_of_parameter, parameter in table.space.parameters.items()
    }
    margins = dict(
        zip(tables.FAMILIES, (_MARGIN * position for position in _ORDERS[int(name)]), strict=True)
    )
    return Choice(name, SearchSpace(network=Categorical(*chosen), **parameters), chosen, margins)


def _load_table(kind: str, number: int) -> Table:
    available = tables.FAMILIES[kind][0].available_dataset_names
    return tables.load(kind, available[number % len(available)])


def _add_condition(parameter: Parameter, kind: str) -> Parameter:
    """Return the parameter, active only if the chosen network is of this kind."""
    if isinstance(parameter, Categorical):
        return Categorical(*parameter.choices, when={"network": kind})
    return replace(parameter, when={"network": kind})
