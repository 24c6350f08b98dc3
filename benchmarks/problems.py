"""All problems on which the quality of searches is measured, by family.

Regret is the difference to the lowest known loss. In some families, it is divided by the regret of
the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from benchmarks import conditional, functions, machines, tables
from hpo.space import SearchSpace

_OF_TABLES = (*tables.FAMILIES, *conditional.FAMILIES)
FAMILIES = (*_OF_TABLES, *functions.SUITES, "machines")


class Problem(Protocol):
    """A search space, and a function that evaluates its hyperparameters."""

    @property
    def space(self) -> SearchSpace:
        """The search space."""

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of hyperparameters, and the simulated duration of their training.

        The unit of the duration depends on the family.
        """


def list_names(family: str) -> list[str]:
    """Return the names of a family's problems."""
    if family in tables.FAMILIES:
        return list(tables.FAMILIES[family][0].available_dataset_names)
    if family in conditional.FAMILIES:
        return conditional.list_names()
    return functions.list_names(family) if family in functions.SUITES else list(machines.NAMES)


def load(family: str, name: str) -> Problem:
    """Load the problem `name` of a family."""
    if family in tables.FAMILIES:
        return tables.load(family, name)
    if family in conditional.FAMILIES:
        return conditional.load(family, name)
    return functions.load(family, name) if family in functions.SUITES else machines.load(name)


def list_evaluation_counts(family: str) -> tuple[int, ...]:
    """Return the numbers of evaluations at which searches are compared.

    The last one is the budget.
    """
    return (50, 100, 200) if family in _OF_TABLES else (32, 64, 128)


def select_kind_of_mean(family: str) -> str:
    """Return the kind of mean over problems.

    It is geometric if the regrets of a family's problems have different scales.
    """
    return "arithmetic" if family in _OF_TABLES else "geometric"


def add_options(parser: argparse.ArgumentParser, families: Sequence[str]) -> None:
    """Add the options that select problems and seeds, and the number of processes."""
    parser.add_argument("--families", default=",".join(families))
    parser.add_argument(
        "--first", type=int, default=0, help="the index of the first problem of each family"
    )
    parser.add_argument("--every", type=int, default=1, help="use every Nth problem")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
