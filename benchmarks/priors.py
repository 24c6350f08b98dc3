"""Measure the search with priors: its regrets, and when it is as good as one without priors.

A good prior is drawn from the best 5% of 400 random individuals, a bad one from the worst 10%. Each
parameter gets its value as the prior. Each seed has another prior.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import functions, problems
from hpo.options import DEFAULT_PROPAGATORS
from hpo.space import Categorical, Ordinal, Parameter, SearchSpace
from tests.support.simulation import WORKERS, SimulatedIslands, simulate

FAMILIES = ("hpobench", "hpolib", *functions.SUITES)
KINDS = ("none", "good", "bad")
CLOSE = 1e-3  # Added to regrets before their geometric mean, which would be 0 if one of them is.
_DRAWS = 400
_BEST = 20  # 5% of the draws.
_WORST = 40
# Evaluations of a search, as a multiple of the largest number at which it is compared.
_BEYOND = 1.5


def add_priors(space: SearchSpace, params: dict[str, Any], confidence: str) -> SearchSpace:
    """Return the space with `params` as the priors of its parameters."""
    return SearchSpace(
        **{
            name: _add_prior(one, params.get(name), confidence)
            for name, one in space.parameters.items()
        }
    )


def _add_prior(parameter: Parameter, prior: Any, confidence: str) -> Parameter:
    if prior is None:
        return parameter
    if isinstance(parameter, (Categorical, Ordinal)):
        return type(parameter)(
            *parameter.choices, when=parameter.when, prior=prior, confidence=confidence
        )
    return dataclasses.replace(parameter, prior=prior, confidence=confidence)


def _draw_prior(problem: problems.Problem, kind: str, seed: str) -> dict[str, Any]:
    rng = random.Random(seed)
    drawn = sorted(
        islice(problem.space.iterate_draws(rng), _DRAWS),
        key=lambda params: problem.evaluate(params)[0],
    )
    return rng.choice(drawn[:_BEST] if kind == "good" else drawn[-_WORST:])


class IslandsWithFirst(SimulatedIslands):
    """Islands that evaluate a given individual first, such as that of the priors."""

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        first: dict[str, Any] | None,
        islands: int = 2,
        workers: int = WORKERS,
    ) -> None:
        super().__init__(space, DEFAULT_PROPAGATORS, islands, seed, workers)
        self._first = first

    def ask(self, worker: int) -> dict[str, Any]:
        """Return the given individual once, and then bred individuals."""
        if self._first is None:
            return super().ask(worker)
        first, self._first = self._first, None
        return self.start(worker, first)


def _measure(
    kind: str, confidence: str, family: str, name: str, seed: int, evaluations: int
) -> npt.NDArray[Any]:
    """Return the lowest regret after each evaluation, shape (evaluations,)."""
    warnings.simplefilter("ignore")
    problem = problems.load(family, name)
    first = None if kind == "none" else _draw_prior(problem, kind, f"{name}/{seed}")
    space = problem.space if first is None else add_priors(problem.space, first, confidence)
    regrets = simulate(IslandsWithFirst(space, seed, first), problem.evaluate, evaluations, WORKERS)
    return np.minimum.accumulate(regrets)


def _count_evaluations(curve: npt.NDArray[Any], regret: float) -> int:
    """Return after how many evaluations the curve is as low as `regret`, or the largest number."""
    reached = np.flatnonzero(curve <= regret + 1e-9)
    return int(reached[0]) + 1 if len(reached) else len(curve)


def main() -> None:
    """Run all searches, and print how they compare with the search without priors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    problems.add_options(parser, FAMILIES)
    parser.add_argument(
        "--after", default="25,50,100", help="numbers of evaluations at which searches are compared"
    )
    parser.add_argument("--confidence", default="medium")
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.after.split(",")]
    evaluations = round(_BEYOND * counts[-1])
    print(
        f"{'':12s}{'prior':8s}{'evaluations':>24s}{'regret':>24s}   after {chosen.after}, "
        "without priors 1"
    )
    rows: dict[str, list[list[float]]] = {kind: [] for kind in KINDS[1:]}
    with ProcessPoolExecutor(chosen.processes) as pool:
        for family in chosen.families.split(","):
            names = problems.list_names(family)[chosen.first :: chosen.every]
            jobs = {
                (kind, name): [
                    pool.submit(_measure, kind, chosen.confidence, family, name, seed, evaluations)
                    for seed in range(chosen.seeds)
                ]
                for kind in KINDS
                for name in names
            }
            # The mean over seeds is geometric, because regrets of functions differ by powers of
            # ten.
            curves = {
                key: np.exp(np.mean([np.log(job.result() + CLOSE) for job in runs], axis=0))
                for key, runs in jobs.items()
            }
            for kind in KINDS[1:]:
                own = []
                for name in names:
                    before, curve = curves["none", name], curves[kind, name]
                    needed = [
                        _count_evaluations(curve, before[n - 1])
                        / _count_evaluations(before, before[n - 1])
                        for n in counts
                    ]
                    own.append([*needed, *(curve[n - 1] / before[n - 1] for n in counts)])
                rows[kind] += own
                _print_means(family, kind, own)
    for kind, own in rows.items():
        _print_means("all", kind, own)


def _print_means(label: str, kind: str, rows: list[list[float]]) -> None:
    means = np.exp(np.mean(np.log(rows), axis=0))
    half = len(means) // 2
    texts = ["  ".join(f"{mean:.2f}" for mean in part) for part in (means[:half], means[half:])]
    print(f"{label:12s}{kind:8s}{texts[0]:>24s}{texts[1]:>24s}", flush=True)


if __name__ == "__main__":
    main()
