"""Measure the error of importances after a search, on problems with known importances.

Searches have 8 workers and 2 islands, in simulated time. The true importance of a parameter is its
Shapley effect over the search space. This is a share of the variance of the loss: the part that the
parameter causes alone, plus half of each part that it causes together with another parameter.
"""

from __future__ import annotations

import argparse
import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from threadpoolctl import threadpool_limits

from hpo.results.models import compute_importances
from hpo.space import Categorical, Float, Int, Parameter, SearchSpace
from hpo.store.evaluations import Evaluation
from tests.support.simulation import SimulatedIslands, simulate

AFTER = (30, 100, 300)
PROPAGATORS = ("ga", "tpe", "random")
_DRAWS = 20_000  # Individuals to compute true importances.
_LEAST = 20  # Minimum number of evaluations for PED-ANOVA.

Effect = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Problem:
    """A problem whose loss is a sum of effects of parameters, or the exponential of this sum."""

    space: SearchSpace
    """The search space."""
    effects: Mapping[tuple[str, ...], Effect]
    """The terms of the sum, by the names of their parameters.

    A term of two parameters has mean 0 over each of them.
    """
    noise: float = 0.02
    """The standard deviation of the noise that is added to the sum."""
    is_product: bool = False
    """Whether the loss is the exponential of the sum.

    The true importances are always computed from the sum.
    """

    def evaluate(self, params: Mapping[str, Any], draws: random.Random) -> float:
        """Return the loss of hyperparameters, with noise."""
        own = [
            effect(params) for names, effect in self.effects.items() if params.keys() >= {*names}
        ]
        total = sum(own) + draws.gauss(0, self.noise)
        return math.exp(total) if self.is_product else 1 + total

    def compute_importances(self) -> dict[str, float]:
        """Compute the true importance of each parameter."""
        rng = random.Random(0)
        drawn = [self.space.draw(rng) for _ in range(_DRAWS)]
        found = dict.fromkeys(self.space.parameters, 0.0)
        for names, effect in self.effects.items():
            values = [effect(params) for params in drawn if params.keys() >= {*names}]
            for name in names:
                found[name] += float(np.var(values)) * len(values) / len(drawn) / len(names)
        return {name: variance / sum(found.values()) for name, variance in found.items()}


def _make_ignored(count: int) -> dict[str, Parameter]:
    kinds: list[Parameter] = [
        Float(0, 1),
        Int(1, 8),
        Categorical("p", "q", "r"),
        Float(1e-4, 1, log=True),
    ]
    return {f"ignored_{index}": kinds[index % len(kinds)] for index in range(count)}


_KINDS = {"x": 0.0, "y": 0.3, "z": 0.6}


def _scale_by_four(effect: Effect) -> Effect:
    return lambda params: 4 * effect(params)


_TEN = SearchSpace(
    a=Float(0, 1), b=Float(0, 1), kind=Categorical("x", "y", "z"), **_make_ignored(7)
)
_THREE: dict[tuple[str, ...], Effect] = {
    ("a",): lambda p: 3 * (p["a"] - 0.3) ** 2,
    ("b",): lambda p: 1.2 * abs(p["b"] - 0.7),
    ("kind",): lambda p: _KINDS[p["kind"]],
}
PROBLEMS = {
    "ten": Problem(_TEN, _THREE),
    "noisy": Problem(_TEN, _THREE, noise=0.15),
    "product": Problem(
        _TEN, {names: _scale_by_four(effect) for names, effect in _THREE.items()}, is_product=True
    ),
    "sixty": Problem(
        SearchSpace(
            **_make_ignored(56),
            a=Float(0, 1),
            b=Float(0, 1),
            kind=Categorical("x", "y", "z"),
            n=Int(1, 8),
        ),
        {**_THREE, ("n",): lambda p: 0.1 * abs(p["n"] - 6)},
    ),
    "conditional": Problem(
        SearchSpace(
            optimizer=Categorical("sgd", "adam"),
            momentum=Float(0, 1, when={"optimizer": "sgd"}),
            beta=Float(0, 1, when={"optimizer": "adam"}),
            lr=Float(1e-4, 1, log=True),
            **_make_ignored(6),
        ),
        {
            ("optimizer",): lambda p: 0.3 * (p["optimizer"] == "adam"),
            ("momentum",): lambda p: 2 * abs(p["momentum"] - 0.8) - 0.68,
            ("lr",): lambda p: 0.15 * (math.log10(p["lr"]) + 1.5) ** 2,
        },
    ),
    "logarithmic": Problem(
        SearchSpace(
            lr=Float(1e-5, 1, log=True),
            width=Int(4, 512, log=True),
            decay=Float(1e-6, 1e-1, log=True),
            **_make_ignored(6),
        ),
        {
            ("lr",): lambda p: 0.1 * (math.log10(p["lr"]) + 2) ** 2,
            ("width",): lambda p: 0.6 * (1 - math.log(p["width"] / 4) / math.log(128)),
            ("decay",): lambda p: 0.1 * abs(math.log10(p["decay"]) + 4),
        },
    ),
    "interaction": Problem(
        _TEN,
        {
            ("a", "b"): lambda p: 4 * (p["a"] - 0.5) * (p["b"] - 0.5),
            ("a",): lambda p: 0.6 * p["a"],
            ("kind",): lambda p: _KINDS[p["kind"]],
        },
    ),
}


def run_search(problem: Problem, propagator: str, seed: int) -> list[Evaluation]:
    """Run a search, and return its evaluations in the order of their starts."""
    draws, evaluations = random.Random(seed), list[Evaluation]()

    def evaluate(params: Mapping[str, Any]) -> tuple[float, float]:
        loss = problem.evaluate(params, draws)
        evaluations.append(Evaluation(len(evaluations), "complete", loss, dict(params), 0, 0, 0))
        return loss, draws.uniform(1, 2)

    simulate(SimulatedIslands(problem.space, (propagator,), 2, seed), evaluate, AFTER[-1])
    return evaluations


def compute_ped_anova(evaluations: Sequence[Evaluation], space: SearchSpace) -> dict[str, float]:
    """Compute importances by PED-ANOVA of Optuna: it compares the best tenth with all evaluations.

    A conditional parameter is compared among the evaluations in which it is active.
    """
    best = sorted(evaluations, key=lambda one: one.loss)[: math.ceil(len(evaluations) / 10)]
    distributions, found = space.make_distributions(), dict.fromkeys(space.parameters, 0.0)
    groups: dict[str, list[str]] = {}
    for name, condition in space.conditions.items():
        groups.setdefault(str(condition), []).append(name)
    for names in groups.values():
        having = [one for one in evaluations if names[0] in one.params]
        if len(having) >= _LEAST:
            own = {name: distributions[name] for name in names}
            study = optuna.create_study()
            study.add_trials(
                optuna.trial.create_trial(
                    params={name: one.params[name] for name in names},
                    distributions=own,
                    value=one.loss,
                )
                for one in having
            )
            weight = sum(names[0] in one.params for one in best) / len(best)
            shares = optuna.importance.get_param_importances(study, normalize=False)
            found |= {name: weight * share for name, share in shares.items()}
    total = sum(found.values()) or 1.0
    return {name: share / total for name, share in found.items()}


def measure(name: str, searched: Sequence[Evaluation]) -> list[list[float]]:
    """Measure the errors of importances after each number of evaluations in `AFTER`.

    Returns a row of seven figures for each number. A parameter matters if its true importance is
    above 0. "The model" is the model of this project.

    1. PED-ANOVA: 1 if the parameters that matter have the highest importances, otherwise 0
    2. PED-ANOVA: sum of the absolute errors of all importances, divided by 2
    3. the model: as figure 1
    4. the model: as figure 2
    5. the model: share of the parameters that matter whose importance it distinguishes from 0
    6. the model: share of the parameters that do not matter whose importance it distinguishes from
    0
    7. the model: share of the parameters that matter whose interval contains the true importance
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem, rows = PROBLEMS[name], []
    truth = problem.compute_importances()
    matter = {name for name, share in truth.items() if share}
    for count in AFTER:
        before = compute_ped_anova(searched[:count], problem.space)
        after = compute_importances(searched[:count], problem.space.describe())
        distinguished = {one.name for one in after if one.is_significant}
        rows.append(
            [
                *_compare_shares(before, truth, matter),
                *_compare_shares({one.name: one.share for one in after}, truth, matter),
                len(distinguished & matter) / len(matter),
                len(distinguished - matter) / (len(truth) - len(matter)),
                float(
                    np.mean(
                        [
                            one.low <= truth[one.name] <= one.high
                            for one in after
                            if one.name in matter
                        ]
                    )
                ),
            ]
        )
    return rows


def _compare_shares(
    shares: Mapping[str, float], truth: Mapping[str, float], matter: set[str]
) -> tuple[float, float]:
    first = sorted(shares, key=lambda name: -shares[name])[: len(matter)]
    return float({*first} == matter), sum(abs(shares[name] - truth[name]) for name in truth) / 2


def measure_run(name: str, propagator: str, seed: int) -> list[list[float]]:
    """Run a search and return the figures of `measure`."""
    warnings.simplefilter("ignore")
    with threadpool_limits(1):
        return measure(name, run_search(PROBLEMS[name], propagator, seed))


def main() -> None:
    """Print the mean figures over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    print(
        "problem      search  evals  PED-ANOVA first  error   model first  error"
        "  distinguished  wrongly  in interval"
    )
    with ProcessPoolExecutor(chosen.processes) as pool:
        for name in PROBLEMS:
            for propagator in PROPAGATORS:
                jobs = [
                    pool.submit(measure_run, name, propagator, seed) for seed in range(chosen.seeds)
                ]
                means = np.mean([job.result() for job in jobs], axis=0)
                for count, row in zip(AFTER, means, strict=True):
                    cells = zip(row, (15, 7, 14, 7, 15, 9, 13), strict=True)
                    texts = "".join(f"{cell:{width}.2f}" for cell, width in cells)
                    print(f"{name:12s} {propagator:7s} {count:4d}{texts}", flush=True)


if __name__ == "__main__":
    main()
