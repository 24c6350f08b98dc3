"""A sampler for Optuna: a propagator of this project suggests the parameters of its trials."""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.breeding.propagators import make_following_propagator
from hpo.errors import UsageError
from hpo.objectives import LOSS, Objectives
from hpo.options import PROPAGATORS_WITHOUT_MPI
from hpo.space import Categorical, Float, Int, SearchSpace, Value
from hpo.space.parameters import Parameter
from hpo.store.evaluations import Evaluation

Distributions = Mapping[str, BaseDistribution]

_WHOLE = (TrialState.COMPLETE, TrialState.PRUNED)
_TRIES = 10  # Individuals that are drawn if another thread has just got the same.


class IslandSampler(BaseSampler):
    """Suggests the parameters of an Optuna study by a propagator.

    The search space may depend on earlier suggestions (define by run). Parameters that are always
    suggested together are bred together. A parameter that no trial has had before is drawn at
    random, and so is each parameter of the first trial.

    Args:
        propagator: "ga", "tpe" or "random".
        seed: The seed. None: a different one each time.

    Example:
        ::

            study = optuna.create_study(sampler=hpo.optuna.IslandSampler(seed=0))
            study.optimize(objective, n_trials=100)
    """

    def __init__(self, propagator: str = "ga", seed: int | None = None) -> None:
        if propagator not in PROPAGATORS_WITHOUT_MPI:
            names = ", ".join(map(repr, PROPAGATORS_WITHOUT_MPI))
            raise UsageError(f"propagator must be one of {names}, got {propagator!r}")
        self._propagator = propagator
        self._seed = seed
        self._random = RandomSampler(seed)
        # Optuna may call a sampler in several threads.
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._storage: BaseStorage | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[IslandSampler], tuple[str, int | None]]:
        """Copy the arguments: all else is learned from the study again."""
        return type(self), (self._propagator, self._seed)

    def reseed_rng(self) -> None:
        """Draw other random values. Optuna calls it in each thread, and these breed together."""
        self._random.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters of all earlier trials, as the latest trial with each had it."""
        space: dict[str, BaseDistribution] = {}
        for earlier in study.get_trials(deepcopy=False):
            if earlier.number != trial.number:
                space.update(earlier.distributions)
        return {name: each for name, each in space.items() if _convert(each) is not None}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Distributions
    ) -> dict[str, Any]:
        """Return a value for each parameter of the search space."""
        params: dict[str, Any] = {}
        if os.getpid() != self._pid:  # A forked process must breed other individuals.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self._groups = {}
            self._random.reseed_rng()
        with self._lock:
            others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
            before = self._groups if study._storage is self._storage else {}
            self._groups = {}
            self._storage = study._storage
            # A trial that runs, or has failed, may lack parameters that it would have suggested.
            ended = [one for one in others if one.state in _WHOLE] or others
            for names in _list_groups([set(one.distributions) for one in ended], search_space):
                distributions = {name: search_space[name] for name in names}
                key = f"{study.study_name} {distributions}"
                self._groups[key] = before.get(key) or self._make_group(study, distributions, trial)
                params |= self._groups[key].suggest(trial.number, others)
        return params

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a random value for a parameter that no trial has had before."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _make_group(self, study: Study, distributions: Distributions, trial: FrozenTrial) -> _Group:
        seed = random.random() if self._seed is None else self._seed
        # Other processes with the same seed have other trials.
        return _Group(distributions, study.directions, self._propagator, f"{seed}/{trial.number}")


class _Group:
    """Parameters that are always suggested together, with the propagator that breeds them."""

    def __init__(
        self,
        distributions: Distributions,
        directions: Sequence[StudyDirection],
        propagator: str,
        seed: str,
    ) -> None:
        self._distributions = dict(distributions)
        parameters = {name: _convert(each) for name, each in distributions.items()}
        # Names in Optuna may be any texts.
        self._genes = {name: f"p{index}" for index, name in enumerate(parameters)}
        space = SearchSpace(
            **{self._genes[name]: each for name, each in parameters.items() if each is not None}
        )
        self._space = space
        self._directions = directions
        self._trials: Sequence[FrozenTrial] = ()
        self._known: dict[int, TrialState] = {}
        self._suggested: dict[int, dict[str, Value]] = {}  # By the numbers of trials.
        names = (LOSS, *(f"value {index}" for index in range(1, len(directions))))
        self._propagator = make_following_propagator(
            propagator, space, Objectives(names), seed, self._read_changes
        )

    def suggest(self, number: int, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Return a value of a trial for each parameter, given all other trials of the study."""
        self._trials = trials
        # Optuna records the values of another thread's trial after that thread has left the lock.
        self._suggested = {
            trial.number: self._suggested[trial.number]
            for trial in trials
            if trial.number in self._suggested
            and not trial.state.is_finished()
            and self._find_params(trial) is None
        }
        self._propagator.history.update()
        found = self._propagator.ask().params
        for _ in range(_TRIES):
            if found not in self._suggested.values():
                break
            found = self._propagator.ask().params
        self._suggested[number] = found
        return {name: self._decode(name, found[gene]) for name, gene in self._genes.items()}

    def _decode(self, name: str, value: Value) -> Any:
        distribution = self._distributions[name]
        if isinstance(distribution, CategoricalDistribution):
            return distribution.choices[int(value)]
        return value

    def _read_changes(self) -> list[Evaluation]:
        """Return the trials that have started or ended since the previous call."""
        changes = []
        for trial in self._trials:
            if self._known.get(trial.number) == trial.state:
                continue
            evaluation = self._make_evaluation(trial)
            if evaluation is not None:
                changes.append(evaluation)
            # A running trial may get the parameters of this group later.
            if evaluation is not None or trial.state.is_finished():
                self._known[trial.number] = trial.state
        return changes

    def _make_evaluation(self, trial: FrozenTrial) -> Evaluation | None:
        """Return a trial as an evaluation; None if it does not have these parameters."""
        params = self._find_params(trial)
        if params is None:
            return None
        state, costs = self._find_outcome(trial)
        duration = trial.duration
        completed = trial.datetime_complete
        return Evaluation(
            trial.number,
            state,
            costs[0],
            params,
            island=0,
            worker=0,
            generation=trial.number,
            other_values=costs[1:],
            seconds=duration.total_seconds() if duration else math.nan,
            ended=completed.timestamp() if completed else math.nan,
        )

    def _find_params(self, trial: FrozenTrial) -> dict[str, Value] | None:
        """Return the parameters of a trial by their genes; None if it does not have these."""
        params: dict[str, Value] = {}
        for name, distribution in self._distributions.items():
            if trial.distributions.get(name) != distribution:
                return None
            gene = self._genes[name]
            value = trial.params[name]
            if isinstance(distribution, CategoricalDistribution):
                value = int(distribution.to_internal_repr(value))  # NaN equals itself here.
            parameter = self._space.parameters[gene]
            params[gene] = parameter.decode(parameter.encode(value))  # rounded to 12 digits
        return params

    def _find_outcome(self, trial: FrozenTrial) -> tuple[str, tuple[float, ...]]:
        """Return the state of a trial, and its values with lower ones better."""
        if not trial.state.is_finished():
            return "running", (math.inf,)
        values = trial.values or ()
        state = "complete"
        if trial.state == TrialState.PRUNED and len(self._directions) == 1:
            state = "pruned"
            values = tuple(trial.intermediate_values.values())
        signs = [-1 if one == StudyDirection.MAXIMIZE else 1 for one in self._directions]
        costs = tuple(sign * value for sign, value in zip(signs, values, strict=False))
        if state == "pruned":
            costs = (min((signs[0] * value for value in values), default=math.inf),)
        if trial.state == TrialState.FAIL or not costs or not all(map(math.isfinite, costs)):
            return "failed", (math.inf,)
        return state, costs


def _list_groups(trials: Sequence[set[str]], names: Iterable[str]) -> list[list[str]]:
    """Return the parameters in groups: two are in one group if all trials have both or none."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        having = tuple(index for index, params in enumerate(trials) if name in params)
        groups.setdefault(having, []).append(name)
    return list(groups.values())


def _convert(distribution: BaseDistribution) -> Parameter | None:
    """Return a distribution as a parameter; None for a single value, or an unusual range.

    The values of a categorical parameter are the indices of its choices, which may have any type.
    """
    parameter: Parameter
    if isinstance(distribution, CategoricalDistribution):
        parameter = Categorical(*range(len(distribution.choices)))
    elif isinstance(distribution, IntDistribution):
        limits = (distribution.low, distribution.high)
        parameter = Int(*limits, log=distribution.log, step=distribution.step)
    elif isinstance(distribution, FloatDistribution):
        parameter = Float(
            distribution.low, distribution.high, log=distribution.log, step=distribution.step
        )
    else:
        return None
    return None if distribution.single() or parameter.find_problem() else parameter
