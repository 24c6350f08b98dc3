"""Search methods of other projects, for comparison: Optuna's samplers and HEBO."""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import numpy as np
import optuna

from hpo.space import Categorical, Float, Ordinal, Parameter, SearchSpace

_AT_ONCE = 4  # Individuals per call of HEBO, which takes seconds.


class Searcher(Protocol):
    """A search with several workers."""

    def ask(self, worker: int) -> dict[str, Any]:
        """Return hyperparameters for a worker to evaluate."""

    def tell(self, worker: int, loss: float, *others: float) -> None:
        """Record the values of all objectives of the hyperparameters that the worker received."""


class OptunaStudy:
    """An Optuna study that all workers share."""

    def __init__(
        self, space: SearchSpace, sampler: optuna.samplers.BaseSampler, objectives: int = 1
    ) -> None:
        self._space = space
        self._study = optuna.create_study(sampler=sampler, directions=["minimize"] * objectives)
        self._distributions = space.make_distributions()
        self._trials: dict[int, optuna.Trial] = {}

    def ask(self, worker: int) -> dict[str, Any]:
        """Return hyperparameters that the study suggests."""
        always = {
            name: one
            for name, one in self._distributions.items()
            if not self._space.conditions[name]
        }
        trial = self._trials[worker] = self._study.ask(always)
        for name, one in self._distributions.items():
            if name not in always and self._space.is_active(name, trial.params):
                trial._suggest(name, one)  # The functions suggest_float, ... do the same.
        return {name: trial.params[name] for name in self._distributions if name in trial.params}

    def tell(self, worker: int, loss: float, *others: float) -> None:
        """Record the loss, and the values of other objectives, of the worker's trial.

        An infinite loss is a failure.
        """
        trial = self._trials.pop(worker)
        if np.isfinite(loss):
            self._study.tell(trial, [loss, *others])
        else:
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)


def make_optuna_sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Make one of Optuna's samplers with its default settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        kinds: dict[str, Any] = {
            "TPE": optuna.samplers.TPESampler,
            "GP": optuna.samplers.GPSampler,
            "CMA-ES": optuna.samplers.CmaEsSampler,
            "NSGA-II": optuna.samplers.NSGAIISampler,
            "random": optuna.samplers.RandomSampler,
        }
        sampler: optuna.samplers.BaseSampler = kinds[name](seed=seed)
    return sampler


class Hebo:
    """HEBO, shared by all workers. benchmarks/README.md describes how to install it.

    Cowen-Rivers et al., HEBO: pushing the limits of sample-efficient hyperparameter optimisation
    (2022).
    """

    def __init__(self, space: SearchSpace, seed: int) -> None:
        import torch
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        torch.manual_seed(seed)
        np.random.seed(seed)  # HEBO draws from this generator.
        self._parameters = space.parameters
        self._optimizer = HEBO(
            DesignSpace().parse(
                list(map(_describe_parameter, space.parameters, space.parameters.values()))
            )
        )
        self._waiting: list[Any] = []
        self._asked: dict[int, Any] = {}

    def ask(self, worker: int) -> dict[str, Any]:
        """Return hyperparameters that HEBO suggests."""
        if not self._waiting:
            suggested = self._optimizer.suggest(n_suggestions=_AT_ONCE)
            self._waiting = [suggested.iloc[[index]] for index in range(len(suggested))]
        row = self._asked[worker] = self._waiting.pop(0)
        return {
            name: _convert_value(parameter, row[name].item())
            for name, parameter in self._parameters.items()
        }

    def tell(self, worker: int, loss: float, *_: float) -> None:
        """Record the loss of the hyperparameters that the worker received."""
        self._optimizer.observe(self._asked.pop(worker), np.array([[loss]]))


def _describe_parameter(name: str, parameter: Parameter) -> dict[str, Any]:
    """Return the description of a parameter that HEBO expects."""
    if isinstance(parameter, Categorical):
        return {
            "name": name,
            "type": "cat",
            "categories": [str(index) for index in range(len(parameter.choices))],
        }
    assert not isinstance(parameter, Ordinal), "no problem has one"
    kind = "int" if not isinstance(parameter, Float) else "pow" if parameter.log else "num"
    return {"name": name, "type": kind, "lb": parameter.low, "ub": parameter.high}


def _convert_value(parameter: Parameter, suggested: Any) -> Any:
    if isinstance(parameter, Categorical):
        return parameter.choices[int(suggested)]
    return parameter.decode(parameter.encode(suggested))
