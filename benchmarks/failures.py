"""Measure the search where evaluations fail in a part of the space: failed evaluations, and regret.

The evaluations of a half space fail, as networks that need too much memory do. It begins next to
the optimum, and holds a given share of the search space, if such a half space exists.
"""

from __future__ import annotations

import argparse
import math
import random
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna

from benchmarks import functions, problems, tables
from benchmarks.priors import IslandsWithFirst, add_priors
from benchmarks.searchers import OptunaStudy, Searcher, make_optuna_sampler
from hpo.options import DEFAULT_PROPAGATORS
from hpo.space import SearchSpace
from tests.support.simulation import WORKERS, SimulatedIslands, simulate

FAMILIES = ("hpobench", "hpolib", *functions.SUITES)
CLOSE = 1e-3  # Added to regrets before their geometric mean, which would be 0 if one of them is.
_DRAWS = 1000  # Individuals from which the share of the half space is estimated.
_DIRECTIONS = 2000  # Random directions of the half space, of which the best is taken.
_FAILURE_SECONDS = 0.1  # A failure takes a tenth of the seconds of a success.


class ForbiddenRegion:
    """A problem of which the evaluations in a half space fail.

    Args:
        family: The family of the problem.
        name: Its name.
        share: The share of the search space in which evaluations fail.
    """

    def __init__(self, family: str, name: str, share: float) -> None:
        self._problem = problems.load(family, name)
        self._low, self._width = _compute_limits(self.space)
        draws = islice(self.space.iterate_draws(random.Random(1)), _DRAWS)
        drawn = np.array([self._encode_params(params) for params in draws])
        optimum = (_find_optimum(self._problem) - self._low) / self._width
        rng = np.random.default_rng(zlib.crc32(f"{family}/{name}".encode()))
        directions = rng.standard_normal((_DIRECTIONS, len(optimum)))
        limits = directions @ optimum + 1e-6
        shares = np.mean(directions @ drawn.T > limits[:, None], axis=1)
        best = np.argmin(np.abs(shares - share))
        self._direction, self._limit = directions[best], float(limits[best])

    @property
    def space(self) -> SearchSpace:
        """The search space."""
        return self._problem.space

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret, infinite after a failure, and the seconds of the evaluation."""
        regret, seconds = self._problem.evaluate(params)
        return (math.inf, seconds * _FAILURE_SECONDS) if self.fails(params) else (regret, seconds)

    def fails(self, params: Mapping[str, Any]) -> bool:
        """Return whether the evaluation of these hyperparameters fails."""
        return bool(self._encode_params(params) @ self._direction > self._limit)

    def _encode_params(self, params: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        # Unlike `SearchSpace.encode`, this accepts the many digits of Optuna's numbers.
        genes = [
            parameter.encode(params[name]) for name, parameter in self.space.parameters.items()
        ]
        return (np.array(genes, float) - self._low) / self._width


def _compute_limits(space: SearchSpace) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    low, high = np.array(list(space.list_gene_limits().values()), float).T
    return low, np.where(high > low, high - low, 1.0)


def _find_optimum(problem: Any) -> npt.NDArray[np.float64]:
    """Return the genes of the best individual."""
    if isinstance(problem, tables.Table):
        return np.array(np.unravel_index(np.argmin(problem.regrets), problem.regrets.shape), float)
    assert isinstance(problem, functions.Function)
    return problem.optimum


def _make_islands(names: tuple[str, ...], problem: ForbiddenRegion, seed: int) -> Searcher:
    return SimulatedIslands(problem.space, names, 2, seed)


def _make_islands_with_prior(problem: ForbiddenRegion, seed: int) -> Searcher:
    """Return islands with priors of high confidence whose individual fails."""
    draws = problem.space.iterate_draws(random.Random(f"prior/{seed}"))
    prior = next(params for params in draws if problem.fails(params))
    return IslandsWithFirst(add_priors(problem.space, prior, "high"), seed, prior)


def _make_study(name: str, problem: ForbiddenRegion, seed: int) -> Searcher:
    return OptunaStudy(problem.space, make_optuna_sampler(name, seed))


METHODS: dict[str, Callable[[ForbiddenRegion, int], Searcher]] = {
    "default, 2 islands": partial(_make_islands, DEFAULT_PROPAGATORS),
    "tpe, 2 islands": partial(_make_islands, ("tpe",)),
    "a prior that fails": _make_islands_with_prior,
    "Optuna's TPE": partial(_make_study, "TPE"),
    "random": partial(_make_study, "random"),
}


def _measure(
    label: str, family: str, name: str, share: float, seed: int, evaluations: int
) -> tuple[int, float]:
    """Return the number of failed evaluations, and the lowest regret."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = ForbiddenRegion(family, name, share)
    regrets = simulate(METHODS[label](problem, seed), problem.evaluate, evaluations, WORKERS)
    return int(np.isinf(regrets).sum()), float(regrets.min())


def main() -> None:
    """Run all searches, and print the failed evaluations and the regrets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    problems.add_options(parser, FAMILIES)
    parser.add_argument(
        "--share",
        type=float,
        default=0.2,
        help="share of the search space in which evaluations fail",
    )
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--methods", default=",".join(METHODS), help="default: all")
    chosen = parser.parse_args()
    print(
        f"{'':12s}{'':22s}{'failed':>10s}{'regret':>12s}   after {chosen.evaluations} evaluations"
    )
    with ProcessPoolExecutor(chosen.processes) as pool:
        for family in chosen.families.split(","):
            names = problems.list_names(family)[chosen.first :: chosen.every]
            for label in METHODS:
                if not any(label.startswith(part.strip()) for part in chosen.methods.split(",")):
                    continue
                jobs = [
                    [
                        pool.submit(
                            _measure, label, family, name, chosen.share, seed, chosen.evaluations
                        )
                        for seed in range(chosen.seeds)
                    ]
                    for name in names
                ]
                results = np.array([[job.result() for job in runs] for runs in jobs]).mean(axis=1)
                regret = np.exp(np.mean(np.log(results[:, 1] + CLOSE)))
                print(
                    f"{family:12s}{label:22s}{results[:, 0].mean():10.1f}{regret:12.4f}", flush=True
                )


if __name__ == "__main__":
    main()
