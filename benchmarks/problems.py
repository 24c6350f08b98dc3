"""All problems that a search is measured on, by their families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from benchmarks import conditional, functions, machines, tables
from hpo.space import SearchSpace

_OF_TABLES = (*tables.FAMILIES, *conditional.FAMILIES)
FAMILIES = (*_OF_TABLES, *functions.SUITES, "machines")


class Problem(Protocol):
    """A space, and what its hyperparameters are worth."""

    @property
    def space(self) -> SearchSpace:
        """The hyperparameters that it has."""

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of hyperparameters, and how many seconds it takes to learn it."""


def names(family: str) -> list[str]:
    """Return the names of a family's problems."""
    if family in tables.FAMILIES:
        return list(tables.FAMILIES[family][0].available_dataset_names)
    if family in conditional.FAMILIES:
        return conditional.names()
    return functions.names(family) if family in functions.SUITES else list(machines.NAMES)


def load(family: str, name: str) -> Problem:
    """Make a problem."""
    if family in tables.FAMILIES:
        return tables.load(family, name)
    if family in conditional.FAMILIES:
        return conditional.load(family, name)
    return functions.load(family, name) if family in functions.SUITES else machines.load(name)


def after(family: str) -> tuple[int, ...]:
    """Return after how many evaluations searches are compared; the last is their budget."""
    return (50, 100, 200) if family in _OF_TABLES else (32, 64, 128)


def means(family: str) -> str:
    """Return how regrets are averaged over problems: those of functions and machines have no scale in common."""
    return "arithmetic" if family in _OF_TABLES else "geometric"
