"""The propagator `tpe`: Optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import random
import warnings
from collections import deque
from dataclasses import replace

import optuna
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.population import Individual
from hpo.breeding.propagators import Propagator
from hpo.dominance import sort_best_first
from hpo.space import Gene, Ordinal
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import compute_costs
from hpo.store.record import make_directions

_COMPARED_EVALUATIONS = 20  # Number of last evaluations for comparison in a run with inheritance.
# Trials of the sampler. Its time grows with them: for 10,000, one individual takes 0.2 s.
_MOST_TRIALS = 512


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
        self._distributions = history.space.make_distributions()
        for name, parameter in self._parameters.items():
            if isinstance(parameter, Ordinal):  # The sampler learns the index of the choice.
                self._distributions[name] = IntDistribution(0, parameter.size - 1)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._sampler = optuna.samplers.TPESampler(seed=rng.getrandbits(31), constant_liar=True)
        self._learned_count = 0  # Changes of the history that the study has.
        self._known: dict[int, Evaluation] = {}  # Ended evaluations in the study, by trial.
        self._running: dict[int, Evaluation] = {}  # Pending and failed evaluations, by trial.
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
        genes: dict[str, Gene] = {}
        for name, value in trial.params.items():
            parameter = self._parameters[name]
            is_index = isinstance(parameter, Ordinal)
            genes[name] = int(value) if is_index else parameter.encode(value)
        return self.history.space.round_genes(genes)

    def _learn(self) -> None:
        """Add the new changes of the history to the study.

        With population based training, the loss is replaced by a rank among the latest evaluations
        that have a parent, or among the latest that have none.
        """
        pool = self.history.parent_pool
        for change in self.history.changes[self._learned_count :]:
            evaluation = change
            if evaluation.has_succeeded and pool.uses_pbt:
                cost = pool.compute_cost(evaluation)
                last = self._last_costs[pool.find_context(evaluation) is not None]
                last.append(cost)
                better = sum(rival < cost for rival in last)
                equal = sum(rival == cost for rival in last)
                evaluation = replace(evaluation, loss=(better + equal / 2) / len(last))
            elif evaluation.has_succeeded and evaluation.inherits is not None:
                evaluation = replace(evaluation, state="interrupted")
            self._add_to_study(evaluation)
        self._learned_count = len(self.history.changes)

    def _add_to_study(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the study of the sampler.

        A failed one stays pending, so that it counts as bad. The sampler would ignore a failed
        trial, and come back to where evaluations fail.
        """
        storage = self._study._storage
        self._running.pop(evaluation.trial, None)
        if evaluation.state == "promoted":
            self._known.pop(evaluation.trial, None)  # A new study will not contain it.
            if (trial := self._trials.pop(evaluation.trial, None)) is not None:
                storage.set_trial_state_values(trial, TrialState.FAIL)
            return
        if (trial := self._trials.pop(evaluation.trial, None)) is None:
            params = dict(evaluation.params)
            for name in params:
                if isinstance(parameter := self._parameters[name], Ordinal):
                    params[name] = parameter.encode(params[name])
            template = create_trial(
                state=TrialState.RUNNING,
                params=params,
                distributions={name: self._distributions[name] for name in evaluation.params},
            )
            trial = storage.create_new_trial(self._study._study_id, template)
        has_all_values = len(evaluation.values) == len(self.history.objectives.names)
        if evaluation.has_succeeded and has_all_values:
            storage.set_trial_state_values(trial, TrialState.COMPLETE, evaluation.values)
            self._known[evaluation.trial] = evaluation
        elif evaluation.state in ("running", "waiting", "failed"):
            self._trials[evaluation.trial] = trial
            self._running[evaluation.trial] = evaluation
        else:
            storage.set_trial_state_values(trial, TrialState.FAIL)

    def _restart_study(self) -> None:
        """Begin a smaller study for the sampler, because the sampler is slower in a larger study.

        The new study has the best ended evaluations, the latest of the others and of those that
        failed, and all pending evaluations.
        """
        known = list(self._known.values())
        costs = compute_costs(known, self.history.objectives)
        ranked = [known[index] for index in sort_best_first(costs)]
        best = ranked[: _MOST_TRIALS // 4]
        rest = ranked[_MOST_TRIALS // 4 :]
        last = sorted(rest, key=lambda evaluation: evaluation.ended)[-(_MOST_TRIALS // 4) :]
        running = list(self._running.values())
        failed = [evaluation for evaluation in running if evaluation.state == "failed"]
        running = [evaluation for evaluation in running if evaluation.state != "failed"]
        self._study = optuna.create_study(
            sampler=self._sampler, directions=make_directions(self.history.objectives)
        )
        self._known = {}
        self._trials = {}
        self._running = {}
        for evaluation in [*best, *last, *failed[-(_MOST_TRIALS // 4) :], *running]:
            self._add_to_study(evaluation)
