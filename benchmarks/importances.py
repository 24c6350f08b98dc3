"""How well importances are known after a search, on problems whose importances are known.

Searches of 8 workers and 2 islands in simulated time. A true importance is the Shapley effect over the search space:
the variance of a parameter's effect, and half of that of each effect of two, as a share of the variance of the loss.
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

from benchmarks.simulation import SimulatedIslands, simulate
from hpo.parameters import Categorical, Float, Int, Parameter
from hpo.results.importances import compute_importances
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation

AFTER = (30, 100, 300)
PROPAGATORS = ("ga", "tpe", "random")
_DRAWS = 20_000  # individuals that true importances are computed from
_LEAST = 20  # evaluations, for PED-ANOVA

Effect = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Problem:
    """A loss that is a sum of effects, or a product of their exponentials."""

    space: SearchSpace
    """The search space."""
    effects: Mapping[tuple[str, ...], Effect]
    """The effects, by the names of their parameters. An effect of two has the mean 0 along each of them."""
    noise: float = 0.02
    """The standard deviation of what is added to the sum."""
    is_product: bool = False
    """Whether the loss is the exponential of the sum. Importances are those of the sum."""

    def evaluate(self, params: Mapping[str, Any], draws: random.Random) -> float:
        """Return the loss of hyperparameters, with noise."""
        own = [effect(params) for names, effect in self.effects.items() if params.keys() >= {*names}]
        total = sum(own) + draws.gauss(0, self.noise)
        return math.exp(total) if self.is_product else 1 + total

    def importances(self) -> dict[str, float]:
        """Return the true importance of each parameter."""
        rng = random.Random(0)
        drawn = [self.space.draw(rng) for _ in range(_DRAWS)]
        found = dict.fromkeys(self.space.parameters, 0.0)
        for names, effect in self.effects.items():
            values = [effect(params) for params in drawn if params.keys() >= {*names}]
            for name in names:
                found[name] += float(np.var(values)) * len(values) / len(drawn) / len(names)
        return {name: variance / sum(found.values()) for name, variance in found.items()}


def _ignored(count: int) -> dict[str, Parameter]:
    kinds: list[Parameter] = [Float(0, 1), Int(1, 8), Categorical("p", "q", "r"), Float(1e-4, 1, log=True)]
    return {f"ignored_{place}": kinds[place % len(kinds)] for place in range(count)}


_KINDS = {"x": 0.0, "y": 0.3, "z": 0.6}


def _times_four(effect: Effect) -> Effect:
    return lambda params: 4 * effect(params)


_TEN = SearchSpace(a=Float(0, 1), b=Float(0, 1), kind=Categorical("x", "y", "z"), **_ignored(7))
_THREE: dict[tuple[str, ...], Effect] = {
    ("a",): lambda p: 3 * (p["a"] - 0.3) ** 2,
    ("b",): lambda p: 1.2 * abs(p["b"] - 0.7),
    ("kind",): lambda p: _KINDS[p["kind"]],
}
PROBLEMS = {
    "ten": Problem(_TEN, _THREE),
    "noisy": Problem(_TEN, _THREE, noise=0.15),
    "product": Problem(_TEN, {names: _times_four(effect) for names, effect in _THREE.items()}, is_product=True),
    "sixty": Problem(
        SearchSpace(**_ignored(56), a=Float(0, 1), b=Float(0, 1), kind=Categorical("x", "y", "z"), n=Int(1, 8)),
        {**_THREE, ("n",): lambda p: 0.1 * abs(p["n"] - 6)},
    ),
    "conditional": Problem(
        SearchSpace(
            optimizer=Categorical("sgd", "adam"),
            momentum=Float(0, 1, when={"optimizer": "sgd"}),
            beta=Float(0, 1, when={"optimizer": "adam"}),
            lr=Float(1e-4, 1, log=True),
            **_ignored(6),
        ),
        {
            ("optimizer",): lambda p: 0.3 * (p["optimizer"] == "adam"),
            ("momentum",): lambda p: 2 * abs(p["momentum"] - 0.8) - 0.68,
            ("lr",): lambda p: 0.15 * (math.log10(p["lr"]) + 1.5) ** 2,
        },
    ),
    "logarithmic": Problem(
        SearchSpace(
            lr=Float(1e-5, 1, log=True), width=Int(4, 512, log=True), decay=Float(1e-6, 1e-1, log=True), **_ignored(6)
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


def search(problem: Problem, propagator: str, seed: int) -> list[Evaluation]:
    """Return the evaluations of a search, in the order in which they start."""
    draws, evaluations = random.Random(seed), list[Evaluation]()

    def evaluate(params: Mapping[str, Any]) -> tuple[float, float]:
        loss = problem.evaluate(params, draws)
        evaluations.append(Evaluation(len(evaluations), "complete", loss, dict(params), 0, 0, 0))
        return loss, draws.uniform(1, 2)

    simulate(SimulatedIslands(problem.space, (propagator,), 2, seed), evaluate, AFTER[-1])
    return evaluations


def ped_anova(evaluations: Sequence[Evaluation], space: SearchSpace) -> dict[str, float]:
    """Return importances by Optuna's PED-ANOVA, as reports had them: of what tells the best tenth from the others.

    Conditional parameters are compared among the evaluations that have them.
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
                    params={name: one.params[name] for name in names}, distributions=own, value=one.loss
                )
                for one in having
            )
            weight = sum(names[0] in one.params for one in best) / len(best)
            shares = optuna.importance.get_param_importances(study, normalize=False)
            found |= {name: weight * share for name, share in shares.items()}
    total = sum(found.values()) or 1.0
    return {name: share / total for name, share in found.items()}


def measure(name: str, searched: Sequence[Evaluation]) -> list[list[float]]:
    """Return for each number of evaluations how good importances are.

    These are, by PED-ANOVA: whether the parameters that matter come first, and the total error. By the model: the same,
    how many are told apart of those that matter and of those that do not, and the share of intervals that are right.
    """
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem, rows = PROBLEMS[name], []
    truth = problem.importances()
    matter = {name for name, share in truth.items() if share}
    for count in AFTER:
        before = ped_anova(searched[:count], problem.space)
        after = compute_importances(searched[:count], problem.space.describe())
        told_apart = {one.name for one in after if one.is_significant}
        rows.append(
            [
                *_compare(before, truth, matter),
                *_compare({one.name: one.share for one in after}, truth, matter),
                len(told_apart & matter) / len(matter),
                len(told_apart - matter) / (len(truth) - len(matter)),
                float(np.mean([one.low <= truth[one.name] <= one.high for one in after if one.name in matter])),
            ]
        )
    return rows


def _compare(shares: Mapping[str, float], truth: Mapping[str, float], matter: set[str]) -> tuple[float, float]:
    first = sorted(shares, key=lambda name: -shares[name])[: len(matter)]
    return float({*first} == matter), sum(abs(shares[name] - truth[name]) for name in truth) / 2


def run(name: str, propagator: str, seed: int) -> list[list[float]]:
    """Search, and measure importances."""
    warnings.simplefilter("ignore")
    with threadpool_limits(1):
        return measure(name, search(PROBLEMS[name], propagator, seed))


def main() -> None:
    """Measure, and print means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    print("problem      search  evals  PED-ANOVA first  error   model first  error  told apart  wrongly  in interval")
    with ProcessPoolExecutor(chosen.processes) as pool:
        for name in PROBLEMS:
            for propagator in PROPAGATORS:
                jobs = [pool.submit(run, name, propagator, seed) for seed in range(chosen.seeds)]
                means = np.mean([job.result() for job in jobs], axis=0)
                for count, row in zip(AFTER, means, strict=True):
                    cells = zip(row, (15, 7, 14, 7, 12, 9, 13), strict=True)
                    texts = "".join(f"{cell:{width}.2f}" for cell, width in cells)
                    print(f"{name:12s} {propagator:7s} {count:4d}{texts}", flush=True)


if __name__ == "__main__":
    main()
