"""Find workers that fail because their GPU or host is broken.

A broken worker fails at once, and claims the next individual: in an hour, it can fail the whole
budget. On the other hand, failures are common in some search spaces, for example because a third of
all networks need too much memory. So the failures of a worker in a row are compared with the
evaluations of the other workers. If others fail as often, the hyperparameters are the cause.
Otherwise the worker is suspected, and repeats an individual that another worker has evaluated. If
this test fails too, it waits for more results of other workers, until its failures are clearly its
own. Then it leaves the run. If no other worker is busy, it is tested again. The same comparison is
made between hosts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Union

from hpo.store.evaluations import Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.record import Record

# The chance of a streak of failures, times the number of known evaluations, below which a worker is
# tested, and below which it leaves after a failed test. More evaluations give more occasions for a
# streak. With these values, 1 in 1000 simulated runs loses a healthy worker if a third of all
# evaluations fail at random (tests/store/test_worker_health.py).
_TEST_SIGNIFICANCE = 0.06
_LEAVE_SIGNIFICANCE = 0.005
_MAX_TESTS = 6  # A healthy worker fails as many only if nearly all evaluations fail.
# Messages about a device that is lost, or about connections that the ranks cannot make.
_DEVICE_ERRORS = re.compile(
    r"ECC error|unspecified launch failure|CUDA error: unknown error|busy or unavailable"
    r"|no CUDA-capable device|device.* lost|fallen off the bus|hardware stack error"
    r"|cannot connect to (its peers|each other)",
    re.IGNORECASE,
)


class Condition(Enum):
    """The condition of a worker, which decides about its next claim."""

    HEALTHY = "healthy"
    """It may evaluate the next individual."""
    WAITING = "waiting"
    """Its failures cannot be judged before other workers have ended their evaluations."""
    SUSPECTED = "suspected"
    """It must pass a test first."""
    BROKEN = "broken"
    """It has failed its test, and must leave the run."""
    LEFT = "left"
    """It has left the run."""


@dataclass
class _Ends:
    """The ends of the evaluations of a worker, or of all workers of a host."""

    successes: int = 0
    failures: int = 0
    """Failures before the latest success."""
    streak: list[Evaluation] = field(default_factory=list)
    """Failures since the latest success."""
    failed_tests: int = 0
    """Tests that have failed since the latest success."""
    streak_began: int = 0
    """Number of the first failure since the latest success, among all ends."""
    latest_success: int = -1
    """Number of the latest success among all ends; -1 if there is none."""

    @property
    def length(self) -> int:
        """The number of evaluations and tests that have failed since the latest success."""
        return len(self.streak) + self.failed_tests

    @property
    def known_failures(self) -> int:
        """The failures to compare with. A streak counts as one: it may be broken as well."""
        return self.failures + bool(self.streak)

    def add_success(self, number: int) -> None:
        self.successes += 1
        self.failures += len(self.streak)
        self.streak = []
        self.failed_tests = 0
        self.latest_success = number

    def add_failure(self, evaluation: Evaluation, number: int) -> None:
        self.streak_began = self.streak_began if self.length else number
        self.streak.append(evaluation)


class WorkerHealth:
    """Judges the workers of a session by their failures in a row.

    Args:
        left: Workers that have left the run before. Workers that leave are added.
    """

    def __init__(self, hosts: Sequence[int], left: set[int] | None = None) -> None:
        self._hosts = hosts
        self._workers = [_Ends() for _ in hosts]
        self._ends_of_hosts = {host: _Ends() for host in hosts}
        self._left = set() if left is None else left
        self._end_count = 0
        self._trusts_device_errors = True
        # Workers whose test has failed with an error of the device.
        self._device_tests: set[int] = set()

    def add_end(self, evaluation: Evaluation) -> None:
        """Add an evaluation of this session that has ended by itself, in the order of ends."""
        self._end_count += 1
        for ends in self._list_ends(evaluation.worker):
            if evaluation.state == "failed":
                ends.add_failure(evaluation, self._end_count)
            else:
                ends.add_success(self._end_count)

    def is_healthy(self, worker: int) -> bool:
        """Return whether a worker is in the run, and its latest evaluation has not failed."""
        return worker not in self._left and not self._workers[worker].length

    def judge(self, worker: int, running: Collection[int]) -> Condition:
        """Return the condition of a worker; `running` evaluate an individual now, or soon."""
        own = self._workers[worker]
        if worker in self._left:
            return Condition.LEFT
        if self.is_healthy(worker):
            return Condition.HEALTHY
        others = self._list_others(worker)
        is_device_error = self._has_device_error(worker)
        is_waiting = any(other in running for other in others)
        # If no other worker has succeeded since the streak began, all may fail for the same reason.
        if any(self._workers[other].latest_success > own.streak_began for other in others):
            is_broken = own.failed_tests > 0 and (
                own.failed_tests >= _MAX_TESTS
                or worker in self._device_tests
                or self._is_unlikely(worker, 0, _LEAVE_SIGNIFICANCE)
            )
            if is_broken:
                return Condition.BROKEN
            if is_device_error or self._is_unlikely(worker, 1, _TEST_SIGNIFICANCE):
                return Condition.WAITING if own.failed_tests and is_waiting else Condition.SUSPECTED
        may_be_broken = is_device_error or (
            own.length > 1 and self._may_become_unlikely(worker, running, others)
        )
        return Condition.WAITING if is_waiting and may_be_broken else Condition.HEALTHY

    def pass_test(self, worker: int) -> None:
        """Record that a suspected worker has passed its test: its failures have another cause."""
        self._trusts_device_errors &= not self._has_device_error(worker)
        self._end_count += 1
        for ends in self._list_ends(worker):
            ends.add_success(self._end_count)

    def fail_test(self, worker: int, failure: str) -> None:
        """Record that a suspected worker has failed its test."""
        if self._trusts_device_errors and _DEVICE_ERRORS.search(failure):
            self._device_tests.add(worker)
        for ends in self._list_ends(worker):
            ends.failed_tests += 1

    def remove_worker(self, worker: int) -> list[Evaluation]:
        """Remove a broken worker, and return its failures in a row, which must not count."""
        self._left.add(worker)
        host = self._ends_of_hosts[self._hosts[worker]]
        streak = self._workers[worker].streak
        self._workers[worker].streak = []
        host.streak = [evaluation for evaluation in host.streak if evaluation.worker != worker]
        return streak

    def list_in_run(self) -> set[int]:
        """Return the workers that have not left the run."""
        return set(range(len(self._workers))) - self._left

    def list_without_failures(self) -> set[int]:
        """Return the workers in the run whose latest evaluation has not failed."""
        return {worker for worker in range(len(self._workers)) if self.is_healthy(worker)}

    def _list_ends(self, worker: int) -> tuple[_Ends, _Ends]:
        return self._workers[worker], self._ends_of_hosts[self._hosts[worker]]

    def _list_others(self, worker: int) -> list[int]:
        return sorted(self.list_in_run() - {worker})

    def _has_device_error(self, worker: int) -> bool:
        failures = [evaluation.failure or "" for evaluation in self._workers[worker].streak]
        return self._trusts_device_errors and any(map(_DEVICE_ERRORS.search, failures))

    def _is_unlikely(self, worker: int, more: int, significance: float) -> bool:
        """Return whether the streak of a worker or host is unlikely if `more` evaluations fail."""
        own, own_host = self._list_ends(worker)
        others = [self._workers[other] for other in self._list_others(worker)]
        hosts = [ends for ends in self._ends_of_hosts.values() if ends is not own_host]
        return _is_streak_unlikely(own.length + more, others, significance) or (
            bool(hosts) and _is_streak_unlikely(own_host.length + more, hosts, significance)
        )

    def _may_become_unlikely(
        self, worker: int, running: Collection[int], others: Sequence[int]
    ) -> bool:
        """Return whether a worker's streak would be unlikely if the `running` others succeed."""
        ends = [self._workers[other] for other in others]
        successes = sum(other in running for other in others) + sum(one.successes for one in ends)
        failures = sum(one.known_failures for one in ends)
        chance = _compute_chance(self._workers[worker].length + 1, successes, failures)
        return chance < _TEST_SIGNIFICANCE / (1 + successes + failures)


def _is_streak_unlikely(length: int, others: Sequence[_Ends], significance: float) -> bool:
    successes = sum(ends.successes for ends in others)
    failures = sum(ends.known_failures for ends in others)
    return successes > 0 and _compute_chance(length, successes, failures) < significance / (
        1 + successes + failures
    )


def _compute_chance(length: int, successes: int, failures: int) -> float:
    """Return the probability of `length` failures in a row, given the results of others.

    The rate of failures has a uniform prior, so each failure has the probability of Laplace's rule
    of succession.
    """
    chance = 1.0
    for index in range(length):
        chance *= (failures + 1 + index) / (successes + failures + 2 + index)
    return chance


# The assignment of a trial that has started; "wait" if the worker must claim again later; None if
# nothing is left for it.
Claim = Union[Assignment, Literal["wait"], None]


class HealthGate:
    """Decides before each claim whether a worker may claim, waits, is tested, or leaves.

    Args:
        health: Judges workers by their failures.
        dismiss: Called with a broken worker, which leaves the run, and its failures in a row.
    """

    def __init__(
        self,
        record: Record,
        health: WorkerHealth,
        dismiss: Callable[[int, Sequence[Evaluation]], object],
    ) -> None:
        self._record = record
        self._health = health
        self._dismiss = dismiss
        self._changes = record.follow()
        self._changes.read()  # Workers of earlier sessions may have been others.
        self._busy_workers: dict[int, int] = {}  # Workers by their running trials.
        self._ended_workers: set[int] = set()  # Workers that will not claim again.
        # Workers that have found nothing left to claim at their latest try.
        self._idle_workers: set[int] = set()

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
            return None
        if condition == Condition.BROKEN and self._health.list_in_run() - self._ended_workers - {
            worker
        }:
            self._dismiss(worker, self._health.remove_worker(worker))
            return None
        if condition == Condition.WAITING:
            return "wait"
        if condition == Condition.SUSPECTED and (repeated := self._find_test(worker)):
            return self._record.start_test(repeated, attributes)
        self._idle_workers.discard(worker)
        if (assignment := claim()) is not None:
            return assignment
        self._idle_workers.add(worker)
        # The failures of a broken worker are retried when it leaves.
        undecided = (Condition.WAITING, Condition.SUSPECTED, Condition.BROKEN)
        others = self._health.list_in_run() - self._idle_workers
        if any(self._judge(other) in undecided for other in others):
            return "wait"
        self._ended_workers.add(worker)
        return None

    def end_test(self, assignment: Assignment, failure: str) -> None:
        """Judge a test before its end is recorded; `failure` is empty if it has passed."""
        self._update()
        worker = self._busy_workers[assignment.number]
        if failure:
            self._health.fail_test(worker, failure)
        else:
            self._health.pass_test(worker)

    def _update(self) -> None:
        # The order of ends decides about streaks. Evaluations that have not ended come first, in
        # the order of changes.
        changes = self._changes.read()
        changes.sort(key=lambda one: one.ended if one.has_ended else -math.inf)
        for evaluation in changes:
            self._busy_workers.pop(evaluation.trial, None)
            if evaluation.state == "running":
                self._busy_workers[evaluation.trial] = evaluation.worker
            elif evaluation.is_finished:
                self._health.add_end(evaluation)

    def _judge(self, worker: int) -> Condition:
        if self._health.is_healthy(worker):  # With thousands of workers, the rest takes long.
            return Condition.HEALTHY
        # A worker without failures will claim soon, if it is not busy already.
        claiming = self._health.list_without_failures() - self._idle_workers
        return self._health.judge(worker, claiming.union(self._busy_workers.values()))

    def _find_test(self, worker: int) -> Evaluation | None:
        """Return the latest complete evaluation of another worker, without a parent."""
        others = [
            evaluation
            for evaluation in self._record.read_evaluations()
            if evaluation.state == "complete"
            and evaluation.inherits is None
            and not evaluation.imported_from
            and evaluation.worker != worker
        ]
        return max(others, key=lambda evaluation: evaluation.ended, default=None)
