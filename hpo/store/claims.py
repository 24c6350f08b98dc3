"""Claiming evaluations from a run's budget: each claim is a trial that starts, and no two workers get the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState

from hpo.errors import DuplicateError
from hpo.store.crash_isolation import select_next_waiting
from hpo.store.evaluations import Assignment
from hpo.store.record import Record
from hpo.store.successive_halving import HalvingSchedule, SuccessiveHalving
from hpo.store.trials import find_retried_trial, is_interrupted, is_paused

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class Claims:
    """The budget of a run, from which one evaluation after the other is claimed; no other process starts any.

    No more than `budget` evaluations are ever started. Interrupted evaluations do not count, since they are repeated,
    nor do those that were taken over from another run. There is nothing to claim once `is_stopping()` is true. With
    `halving`, what was paused is promoted first; it has been counted.
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
        self._budget = budget
        self._is_stopping = is_stopping
        self._successive_halving = SuccessiveHalving(halving, record.objectives) if halving else None
        self._tried_params: set[frozenset[tuple[str, Any]]] = set()
        self._seen_count = self._ended_count = 0  # trials; those that have ended and count
        self._unfinished: list[int] = []  # those that have not ended: only they can change

    def claim(self, params: Mapping[str, Any], inherits: int | None = None, **attributes: Any) -> Assignment | None:
        """Start a trial that has waited, else one that is promoted, else one with these hyperparameters.

        The last one begins with what the trial has learned that it `inherits` from, if there is one. Returns None where
        no more are to be started.

        Raises KnownError if these hyperparameters have been started before.
        """
        return self._claim(params, attributes, {} if inherits is None else {"inherits": inherits})

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start a trial that has waited, or one that is promoted; None where no more are to be started."""
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
        is_spent = claimed - len(waiting) >= self._budget
        is_last = params is None or claimed >= self._budget
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
        """Learn which trials have begun and ended since the last claim."""
        new = trials[self._seen_count :]
        self._tried_params.update(frozenset(trial.params.items()) for trial in new)
        going = [*self._unfinished, *range(self._seen_count, len(trials))]
        self._seen_count = len(trials)
        self._unfinished = [number for number in going if not trials[number].state.is_finished()]
        ended = [trials[number] for number in going if trials[number].state.is_finished()]
        self._ended_count += sum(
            "imported_from" not in trial.user_attrs and not is_interrupted(trial) for trial in ended
        )
        repeated = [find_retried_trial(trial) for trial in new]
        self._ended_count -= sum(number is not None and is_paused(trials[number]) for number in repeated)
