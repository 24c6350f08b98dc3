"""Choose the next trial for a worker, and start it within the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from hpo.errors import DuplicateError
from hpo.store.crash_isolation import select_next_waiting
from hpo.store.evaluations import Assignment
from hpo.store.record import Record
from hpo.store.successive_halving import HalvingSchedule, SuccessiveHalving
from hpo.store.trials import find_retried_trial, is_counted, is_test

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class Claims:
    """Start the trials of a run for its workers.

    No other process may start trials of the study. The budget limits the number of individuals that
    are trained. An individual counts once, even if it is retried or promoted. Imported individuals
    do not count.

    Args:
        distributions: Distributions of all parameters of the search space.
        budget: Maximum number of individuals to train.
        is_stopping: Function that returns whether the run is stopping. If it is, no trial starts.
        halving: Schedule by which paused trials are promoted; None if the pruner never pauses.

    Attributes:
        budget: Maximum number of individuals to train.
    """

    def __init__(
        self,
        record: Record,
        distributions: Mapping[str, BaseDistribution],
        budget: int,
        is_stopping: Callable[[], bool] = lambda: False,
        halving: HalvingSchedule | None = None,
    ) -> None:
        self.record = record
        self._distributions = dict(distributions)
        self.budget = budget
        self._is_stopping = is_stopping
        self._successive_halving = SuccessiveHalving(halving, record.objectives) if halving else None
        self._tried_params: set[frozenset[tuple[str, Any]]] = set()
        self._seen_count = self._ended_count = 0  # Trials in total, and ended trials in the budget.
        self._unfinished: list[int] = []  # Only trials that have not ended can change.

    def claim(self, params: Mapping[str, Any], inherits: int | None = None, **attributes: Any) -> Assignment | None:
        """Start the next trial of a worker, and return its assignment.

        A waiting trial comes first. Next comes the promotion of a paused trial, whose individual is then trained
        further. If there is neither, a new individual starts.

        Args:
            params: Hyperparameters of the new individual.
            inherits: Trial from whose checkpoint the new individual starts; None to start without a checkpoint.
            attributes: Attributes to record for the trial that starts, such as its worker.

        Returns:
            The assignment (the trial to run); None if the run is stopping, or if the budget allows no new individual.

        Raises:
            DuplicateError: If the study already has a trial with these hyperparameters.
        """
        return self._claim(params, attributes, {} if inherits is None else {"inherits": inherits})

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start a waiting trial. If no waiting trial may start, promote a paused one (train it further).

        Waiting trials whose individual has not crashed start first. Of the paused trials to promote, the best at the
        highest rung is promoted.

        Args:
            attributes: Attributes to record for the trial that starts, such as its worker.

        Returns:
            The assignment (the trial to run); None if neither is possible.
        """
        return self._claim(None, attributes, {})

    def _claim(
        self, params: Mapping[str, Any] | None, attributes: Mapping[str, Any], new_attributes: Mapping[str, Any]
    ) -> Assignment | None:
        if self._is_stopping():
            return None
        trials = self.record.read_trials()
        self._update(trials)
        waiting = [trials[number] for number in self._unfinished if trials[number].state == TrialState.WAITING]
        claimed = self._ended_count + len(self._unfinished)
        is_spent = claimed - len(waiting) >= self.budget
        is_last = params is None or claimed >= self.budget
        paused = (
            self._successive_halving.update(self.record.read_evaluations()).find_promotable()
            if self._successive_halving
            else []
        )
        if waiting and not is_spent and (trial := select_next_waiting(waiting, trials, is_last and not paused)):
            return self.record.start_waiting(trial, attributes)
        if paused:
            return self.record.promote(paused[0], attributes)
        if params is None or is_last:
            return None
        if frozenset(params.items()) in self._tried_params:
            raise DuplicateError
        return self.record.start_trial(params, self._distributions, {**attributes, **new_attributes})

    def _update(self, trials: Sequence[FrozenTrial]) -> None:
        new = [trial for trial in trials[self._seen_count :] if not is_test(trial)]
        self._tried_params.update(frozenset(trial.params.items()) for trial in new)
        pending = [*self._unfinished, *(trial.number for trial in new)]
        self._seen_count = len(trials)
        self._unfinished = [number for number in pending if not trials[number].state.is_finished()]
        ended = [trials[number] for number in pending if is_counted(trials[number])]
        self._ended_count += sum("imported_from" not in trial.user_attrs for trial in ended)
        repeated = [find_retried_trial(trial) for trial in new]
        self._ended_count -= sum(number is not None and is_counted(trials[number]) for number in repeated)
