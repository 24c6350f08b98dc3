"""Choose the next trial for a worker, and start it within the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpo.errors import DuplicateError
from hpo.store.crash_isolation import select_next_waiting
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.record import Record
from hpo.store.successive_halving import HalvingSchedule, SuccessiveHalving

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
        self._changes = record.follow()
        self._tried_params: set[frozenset[tuple[str, Any]]] = set()
        self._ended: set[int] = set()  # Trials that count against the budget.
        self._unfinished: dict[int, Evaluation] = {}

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
        self._update()
        waiting = [one for one in self._unfinished.values() if one.state == "waiting"]
        running = [one for one in self._unfinished.values() if one.state == "running"]
        started = len(self._ended) + sum(one.tests is None for one in running)
        is_last = params is None or started + len(waiting) >= self.budget
        paused = self._find_promotable()
        if waiting and started < self.budget:
            trial = select_next_waiting(waiting, running, is_last and not paused)
            if trial is not None:
                return self.record.start_waiting(trial, attributes)
        if paused:
            return self.record.promote(paused[0], attributes)
        if params is None or is_last:
            return None
        if frozenset(params.items()) in self._tried_params:
            raise DuplicateError
        return self.record.start_trial(params, self._distributions, {**attributes, **new_attributes})

    def _find_promotable(self) -> list[Evaluation]:
        if self._successive_halving is None:
            return []
        return self._successive_halving.update(self.record.read_evaluations()).find_promotable()

    def _update(self) -> None:
        for evaluation in self._changes.read():
            self._unfinished.pop(evaluation.trial, None)
            self._ended.discard(evaluation.trial)
            if evaluation.state in ("running", "waiting"):
                self._unfinished[evaluation.trial] = evaluation
            elif evaluation.counts_for_budget:
                self._ended.add(evaluation.trial)
            if evaluation.tests is None:
                self._tried_params.add(frozenset(evaluation.params.items()))
