"""What is used of Propulate, imported without what is not."""

from __future__ import annotations

from hpo.deferred import defer

__all__ = [
    "ActiveCMA",
    "CMAPropagator",
    "Individual",
    "Islands",
    "ParallelNelderMead",
    "Propagator",
    "StatelessPSO",
    "get_default_propagator",
]


# Only Propulate's surrogates, which are not used here, need GPy; it takes 0.8 s of CPU on every rank.
defer("GPy")

from propulate import Individual, Islands, get_default_propagator  # noqa: E402
from propulate.propagators import (  # noqa: E402
    ActiveCMA,
    CMAPropagator,
    ParallelNelderMead,
    Propagator,
    StatelessPSO,
)
