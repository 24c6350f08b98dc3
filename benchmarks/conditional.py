"""Conditional spaces made of tables: which of three networks to train, each with hyperparameters of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import tables
from benchmarks.tables import Table
from hpo.parameters import Categorical, Parameter
from hpo.space import SearchSpace

FAMILIES = ("conditional", "flattened")  # flattened: the same problems, where all hyperparameters always exist
_MARGIN = 0.1  # of a median regret, by which the best of a table is worse than that of the next better one
_ORDERS = list(itertools.permutations(range(len(tables.FAMILIES))))  # of tables, the best first


@dataclass(frozen=True)
class Choice:
    """One network of each kind, of which one is to be chosen; regrets are those of its table, and a margin."""

    name: str
    space: SearchSpace
    _tables: Mapping[str, Table]
    _margins: Mapping[str, float]

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of a network, and how long it takes in seconds, as if all kinds took as long."""
        kind = params["network"]
        table = self._tables[kind]
        own = {name: params[f"{kind}_{name}"] for name in table.space.parameters}
        regret, seconds = table.evaluate(own)
        return regret + self._margins[kind], seconds / float(table.seconds.mean())


def names() -> list[str]:
    """Return the names of the problems: a table of each family, each family the best one in two of six."""
    return [str(number) for number in range(len(_ORDERS))]


def load(family: str, name: str) -> Choice:
    """Make a problem."""
    chosen = {kind: _table(kind, int(name)) for kind in tables.FAMILIES}
    parameters = {
        f"{kind}_{parameter}": one if family == "flattened" else _only(one, kind)
        for kind, table in chosen.items()
        for parameter, one in table.space.parameters.items()
    }
    margins = dict(zip(tables.FAMILIES, (_MARGIN * place for place in _ORDERS[int(name)]), strict=True))
    return Choice(name, SearchSpace(network=Categorical(*chosen), **parameters), chosen, margins)


def _table(kind: str, number: int) -> Table:
    available = tables.FAMILIES[kind][0].available_dataset_names
    return tables.load(kind, available[number % len(available)])


def _only(parameter: Parameter, kind: str) -> Parameter:
    """Return a parameter that exists only where this kind of network is trained."""
    if isinstance(parameter, Categorical):
        return Categorical(*parameter.choices, when={"network": kind})
    return replace(parameter, when={"network": kind})
