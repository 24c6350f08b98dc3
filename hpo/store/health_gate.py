"""Let workers claim trials unless their failures say that they are broken; test suspected workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from hpo.store.evaluations import LEAVE, WAIT, Assignment, Evaluation
from hpo.store.worker_health import Condition, WorkerHealth

if TYPE_CHECKING:
    from hpo.store.record import Record

# The assignment of a trial that has started, `WAIT` if the worker must claim again later, `LEAVE`, or None.
Claim = Union[Assignment, str, None]


class HealthGate:
    """Decides before each claim whether a worker may claim, must wait, must pass a test, or leaves the run.

    Args:
        health: Judges workers by their failures.
        dismiss: Called with a broken worker, which leaves the run, and its failures in a row.
    """

    def __init__(
        self, record: Record, health: WorkerHealth, dismiss: Callable[[int, Sequence[Evaluation]], object]
    ) -> None:
        self._record = record
        self._health = health
        self._dismiss = dismiss
        self._changes = record.follow()
        self._changes.read()  # Workers of earlier sessions may have been others.
        self._busy_workers: dict[int, int] = {}  # Workers by their running trials.
        self._ended_workers: set[int] = set()  # Workers that will not claim again.
        self._idle_workers: set[int] = set()  # Workers that have found nothing left to claim at their latest try.

    def claim(self, claim: Callable[[], Assignment | None], attributes: Mapping[str, Any]) -> Claim:
        """Let a worker call `claim`, unless it must wait, is tested, or leaves the run.

        Args:
            claim: Starts the next trial of the worker; returns None if there is none.
            attributes: Attributes to record for the trial that starts, with the `worker`.
        """
        self._update()
        worker = attributes["worker"]
        condition = self._judge(worker)
        if condition == Condition.LEFT:
            return LEAVE
        if condition == Condition.BROKEN and self._health.list_in_run() - self._ended_workers - {worker}:
            self._dismiss(worker, self._health.remove_worker(worker))
            return LEAVE
        if condition == Condition.WAITING:
            return WAIT
        if condition == Condition.SUSPECTED and (repeated := self._find_test(worker)):
            return self._record.start_test(repeated, attributes)
        self._idle_workers.discard(worker)
        if (assignment := claim()) is not None:
            return assignment
        self._idle_workers.add(worker)
        # The failures of a broken worker are retried when it leaves.
        if any(map(self._is_undecided, self._health.list_in_run() - self._idle_workers)):
            return WAIT
        self._ended_workers.add(worker)
        return None

    def end_test(self, assignment: Assignment, failure: str) -> None:
        """Record the end of the test of a suspected worker; `failure` is empty if the worker has passed."""
        self._update()
        worker = self._busy_workers[assignment.number]
        self._record.end_test(assignment, failure)
        if failure:
            self._health.fail_test(worker, failure)
        else:
            self._health.pass_test(worker)

    def _update(self) -> None:
        # The order of ends decides about streaks. Evaluations that have not ended come first, in the order of changes.
        for evaluation in sorted(self._changes.read(), key=lambda one: one.ended if one.has_ended else -math.inf):
            self._busy_workers.pop(evaluation.trial, None)
            if evaluation.state == "running":
                self._busy_workers[evaluation.trial] = evaluation.worker
            elif evaluation.is_finished:
                self._health.add_end(evaluation)

    def _judge(self, worker: int) -> Condition:
        # A worker without failures will claim soon, if it is not busy already.
        claiming = self._health.list_without_failures() - self._idle_workers
        return self._health.judge(worker, claiming.union(self._busy_workers.values()))

    def _is_undecided(self, worker: int) -> bool:
        """Return whether a worker may soon leave, so that its failures must be retried."""
        return self._judge(worker) in (Condition.WAITING, Condition.SUSPECTED, Condition.BROKEN)

    def _find_test(self, worker: int) -> Evaluation | None:
        """Return the latest complete evaluation of another worker, without a parent; None if there is none."""
        complete = [
            evaluation
            for evaluation in self._record.read_evaluations()
            if evaluation.state == "complete" and evaluation.inherits is None and not evaluation.imported_from
        ]
        others = [one for one in complete if one.worker != worker]
        return max(others, key=lambda evaluation: evaluation.ended, default=None)
