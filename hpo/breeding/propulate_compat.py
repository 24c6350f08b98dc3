"""The parts of Propulate that are used, imported without those that are not."""

from __future__ import annotations

from hpo.process.lazy_import import import_lazily

__all__ = [
    "ActiveCMA",
    "CMAPropagator",
    "Individual",
    "Migrator",
    "ParallelNelderMead",
    "Pollinator",
    "Propagator",
    "StatelessPSO",
    "get_default_propagator",
]


# Only Propulate's surrogates and its checks for duplicates, which are not used here, need these. They take 0.8 s and
# 0.1 s of CPU on every rank.
import_lazily("GPy")
import_lazily("deepdiff")

from propulate import Individual, Migrator, Pollinator, get_default_propagator  # noqa: E402
from propulate.propagators import (  # noqa: E402
    ActiveCMA,
    CMAPropagator,
    ParallelNelderMead,
    Propagator,
    StatelessPSO,
)

_original_equal = Individual.__eq__


def _are_equal(self: Individual, other: object) -> bool:
    """Compare individuals as Propulate does, but first by attributes that are cheap and seldom equal, then by genes.

    For each immigrant, every worker compares its whole population: at 3,600 evaluations a quarter of a worker's time.
    """
    if isinstance(other, Individual) and (
        self.generation != other.generation
        or self.rank != other.rank
        or self.island != other.island
        or self.loss != other.loss
    ):
        return False
    return bool(_original_equal(self, other))


Individual.__eq__ = _are_equal
