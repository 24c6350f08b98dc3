"""The propagator `tpe`: Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual
from hpo.breeding.propagator import Propagator
from hpo.dominance import sort_best_first
from hpo.space import Gene, Ordinal, Parameter
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import compute_costs
from hpo.store.record import make_directions

_COMPARED_EVALUATIONS = 20  # Number of last evaluations for comparison in a run with inheritance.
# Trials of the sampler. Its time grows with them: for 10,000, one individual takes 0.2 s.
_MOST_TRIALS = 512


def _make_distribution(parameter: Parameter) -> BaseDistribution:
    """Return the Optuna distribution of a parameter; of the choice's index if it is ordinal."""
    if isinstance(parameter, Ordinal):
        return IntDistribution(0, parameter.size - 1)
    return parameter.make_distribution()


class TPEPropagator(Propagator):
    """Breeds by Optuna's TPE sampler, which learns from the evaluations of all islands.

    The method is described by Bergstra et al., Algorithms for hyper-parameter optimization (2011).
    Pending evaluations count as bad ("constant liar"), so that workers that breed at the same time
    propose different individuals. In a long run, the sampler learns only from the best and the
    latest evaluations.

    With population based training, losses of evaluations with different parents cannot be compared.
    The sampler then learns a rank instead of the loss: the share of the latest evaluations that are
    better. Evaluations without a parent are ranked by their losses, and evaluations with a parent
    by the relative changes of their losses.
    """

    def __init__(
        self, history: EvaluationHistory, rng: random.Random, worker: int = 0, workers: int = 1
    ) -> None:
        super().__init__(history, rng, worker, workers)
        self._parameters = history.space.parameters
        self._distributions = {
            name: _make_distribution(parameter) for name, parameter in self._parameters.items()
        }
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = optuna.samplers.TPESampler(seed=rng.getrandbits(31), constant_liar=True)
        self._learned_count = 0  # Changes of the history that the study has.
        self._known: dict[int, Evaluation] = {}  # Ended evaluations in the study, by trial.
        self._running: dict[int, Evaluation] = {}  # Pending evaluations, by trial.
        self._trials: dict[int, int] = {}
        self._last_costs: dict[bool, deque[float]] = {
            kind: deque(maxlen=_COMPARED_EVALUATIONS) for kind in (False, True)
        }
        self._restart_study()

    def breed(self, population: list[Individual]) -> dict[str, Gene]:  # noqa: ARG002
        """Return the genes that the sampler suggests."""
        self._learn()
        if len(self._known) > _MOST_TRIALS:
            self._restart_study()
        trial = self._study.ask(self._distributions)
        # It becomes an evaluation when it is claimed.
        self._study.tell(trial, state=TrialState.FAIL)
        genes = {name: self._encode_gene(name, value) for name, value in trial.params.items()}
        return self.history.space.round_genes(genes)

    def _learn(self) -> None:
        """Add the new changes of the history to the study."""
        for evaluation in self.history.changes[self._learned_count :]:
            self._add_evaluation(evaluation)
        self._learned_count = len(self.history.changes)

    def _encode_gene(self, name: str, value: Any) -> Gene:
        parameter = self._parameters[name]
        return int(value) if isinstance(parameter, Ordinal) else parameter.encode(value)

    def _encode_ordinals(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return hyperparameters with ordinal choices replaced by their indices."""
        encoded = dict(params)
        for name, value in params.items():
            if isinstance(self._parameters[name], Ordinal):
                encoded[name] = self._parameters[name].encode(value)
        return encoded

    def _add_evaluation(self, evaluation: Evaluation) -> None:
        """Learn from an evaluation that has started or ended.

        With population based training, the loss is replaced by a rank among the latest evaluations
        that have a parent, or among the latest that have none.
        """
        pool = self.history.parent_pool
        if evaluation.has_succeeded and pool.uses_pbt:
            cost = pool.compute_cost(evaluation)
            last = self._last_costs[pool.find_context(evaluation) is not None]
            last.append(cost)
            better = sum(rival < cost for rival in last) + sum(rival == cost for rival in last) / 2
            evaluation = replace(evaluation, loss=better / len(last))
        elif evaluation.has_succeeded and evaluation.inherits is not None:
            evaluation = replace(evaluation, state="failed")
        self._add_to_study(evaluation)

    def _add_to_study(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the study of the sampler, which ignores failed evaluations."""
        storage = self._study._storage
        self._running.pop(evaluation.trial, None)
        if evaluation.state == "promoted":
            self._known.pop(evaluation.trial, None)  # A new study will not contain it.
            if (trial := self._trials.pop(evaluation.trial, None)) is not None:
                storage.set_trial_state_values(trial, TrialState.FAIL)
            return
        if (trial := self._trials.pop(evaluation.trial, None)) is None:
            template = create_trial(
                state=TrialState.RUNNING,
                params=self._encode_ordinals(evaluation.params),
                distributions={name: self._distributions[name] for name in evaluation.params},
            )
            trial = storage.create_new_trial(self._study._study_id, template)
        has_all_values = len(evaluation.values) == len(self.history.objectives.names)
        if evaluation.has_succeeded and has_all_values:
            storage.set_trial_state_values(trial, TrialState.COMPLETE, evaluation.values)
            self._known[evaluation.trial] = evaluation
        elif evaluation.state in ("running", "waiting"):
            self._trials[evaluation.trial] = trial
            self._running[evaluation.trial] = evaluation
        else:
            storage.set_trial_state_values(trial, TrialState.FAIL)

    def _restart_study(self) -> None:
        """Begin a smaller study for the sampler, because the sampler is slower in a larger study.

        The new study has the best ended evaluations, the latest of the other ended evaluations, and
        all pending evaluations.
        """
        known = list(self._known.values())
        ranked = [
            known[index] for index in sort_best_first(compute_costs(known, self.history.objectives))
        ]
        best = ranked[: _MOST_TRIALS // 4]
        rest = ranked[_MOST_TRIALS // 4 :]
        last = sorted(rest, key=lambda evaluation: evaluation.ended)[-(_MOST_TRIALS // 4) :]
        running = list(self._running.values())
        self._study = optuna.create_study(
            sampler=self._sampler, directions=make_directions(self.history.objectives)
        )
        self._known = {}
        self._trials = {}
        self._running = {}
        for evaluation in [*best, *last, *running]:
            self._add_to_study(evaluation)
