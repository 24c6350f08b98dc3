"""Workers that grow: when a worker takes others on for its evaluation, and when one without work helps another.

As in resource-adaptive successive doubling (Aach et al., "Resource-adaptive successive doubling for hyperparameter
optimization with large datasets on high-performance computing systems", 2024): an evaluation has twice the workers for
each rung that it has passed, and at the end of a run as many as are free. An evaluation goes on elsewhere from what it
has saved with a loss, which takes time; it only does so where it gains more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Union

from hpo.process import clock
from hpo.process.standard_streams import warn

if TYPE_CHECKING:
    from hpo.evaluation.attempt import Attempt
    from hpo.evaluation.leader import Leader
    from hpo.evaluation.step_sync import Decider
    from hpo.evaluation.step_verdict import Verdict
    from hpo.ranks.helper_matching import HelperMatching
    from hpo.store.evaluations import Assignment
    from hpo.store.study_client import StudyClient

_IDEAL_DOUBLING = 0.5  # of the time that a loss takes, with twice the ranks


@dataclass(frozen=True)
class Invitation:
    """An evaluation that goes on with all of these workers, the first of which is its own."""

    assignment: Assignment
    workers: tuple[int, ...]


Claim = Callable[[], "Assignment | None"]
NextTask = Union["Assignment", Invitation, None]


class ElasticController:
    """What the leader of a worker does so that its evaluations grow, and that it helps others."""

    def __init__(self, matching: HelperMatching, recorder: StudyClient) -> None:
        self._matching = matching
        self._recorder = recorder
        self._own_worker: tuple[int, ...] = (matching.worker,)
        self._workers: tuple[int, ...] = self._own_worker  # at this worker's evaluation
        self._reserved_workers: list[int] = []
        self._began_at = 0.0  # when these workers did
        self._loss_times: list[float] = []  # at which losses came, in seconds since then
        self._start_seconds = 0.0  # seconds that it took the last team to begin
        self._previous_workers: tuple[int, ...] = self._own_worker  # those before them
        self._previous_seconds = 0.0  # that a loss took those
        self._doubling_factor = (
            _IDEAL_DOUBLING  # what twice the workers make of the time that a loss takes, as far as is known
        )
        self._is_disabled = False  # since the objective begins again
        self._has_saved = False  # in this evaluation
        self._may_warn = matching.worker == 0  # of an objective that does not save, once a run
        self._awaited_trials: set[int] = set()  # trials that did not take this worker on

    def claim_next(self, claim: Claim) -> NextTask:
        """Return what to do next: to help with an evaluation that is promoted, a new one, or whatever others are at.

        Returns None where no worker has anything to do.
        """
        if invitation := self._wait_for_promoted():
            return invitation
        if not self._matching.is_retired and (assignment := claim()) is not None:
            return assignment
        self._matching.retire()
        wanted: Invitation | None = self._matching.wait_for_task()
        return wanted

    def _wait_for_promoted(self) -> Invitation | None:
        found = [one for one in self._recorder.find_expandable() if one.worker != self._matching.worker]
        found = [one for one in found if one.trial not in self._awaited_trials]
        if not found:
            return None
        invitation: Invitation | None = self._matching.wait_for_task(
            {one.worker for one in found}, max(one.max_wait for one in found)
        )
        if invitation is None:
            self._awaited_trials.update(one.trial for one in found)
        return invitation

    # For an evaluation of this worker

    def begin_evaluation(self, assignment: Assignment, workers: tuple[int, ...], saved: int = 0) -> None:
        """Begin with these workers, or go on after so many losses that were saved; those that were reserved come."""
        self._has_saved = saved > 0
        if workers != self._workers:
            self._recorder.record_worker_group(
                assignment, saved or self._recorder.read_checkpoint_step(assignment.number), workers
            )
        self._matching.send_task(
            [one for one in self._reserved_workers if one in workers], Invitation(assignment, workers)
        )
        self._matching.send_task([one for one in self._reserved_workers if one not in workers], None)
        self._workers, self._reserved_workers, self._loss_times, self._began_at = workers, [], [], clock.now()

    def close(self) -> None:
        """Drop messages that are on their way; by all leaders together, once none has anything to do."""
        self._matching.close()

    def release_reserved(self) -> None:
        """Let workers go that were reserved for an evaluation that has ended."""
        self._matching.send_task(self._reserved_workers, None)
        self._reserved_workers, self._workers = [], self._own_worker

    def record_failure(self, attempt: Attempt) -> None:
        """Take note that an evaluation could not go on with more workers."""
        self._doubling_factor = 1.0
        warn(
            f"warning: --elastic: trial {attempt.assignment.number} goes on with 1 worker, since it could not with "
            f"{len(self._workers)}: {attempt.verdict.failure}"
        )

    def decide(self, decide: Decider, leader: Leader, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Let the leader decide on a loss, and perhaps let the evaluation go on with more workers, or with fewer."""
        if verdict.loss is not None:
            self._loss_times.append(clock.now() - self._began_at)
            self._check_resumption(attempt)
        self._has_saved |= attempt.has_saved
        verdict = decide(verdict, printed)
        self._warn_if_never_saved(attempt, verdict)
        if verdict.loss is None or verdict.state != "going" or not leader.can_move_to_workers(attempt):
            return verdict
        workers = () if self._is_disabled else self._choose_previous_workers(attempt) or self._reserve_workers(attempt)
        return replace(verdict, state="regrouped", save=True, workers=workers) if workers else verdict

    def _warn_if_never_saved(self, attempt: Attempt, verdict: Verdict) -> None:
        """Warn if an evaluation of several losses is complete, and has saved nothing for other workers."""
        if verdict.state == "complete" and len(attempt.losses) > 1 and not self._has_saved and self._may_warn:
            self._may_warn = False
            warn(
                f"warning: --elastic does nothing: trial {attempt.assignment.number} has not called "
                f"worker.save_checkpoint. Call it "
                "before each yield, and continue from worker.checkpoint"
            )

    def _check_resumption(self, attempt: Attempt) -> None:
        """Let nothing grow any more where an objective begins again in the place of going on."""
        was_given = (
            attempt.checkpoint_info is not None
        )  # it was not if the state could not be copied, which has been said
        if len(self._workers) > 1 and was_given and not attempt.has_loss and not attempt.restored_count:
            self._is_disabled = True
            number, workers = attempt.assignment.number, len(self._workers)
            why = "its objective has saved what it goes on from, and has not asked for worker.checkpoint"
            warn(f"warning: --elastic: trial {number} has begun again with {workers} workers: {why}")

    def _choose_previous_workers(self, attempt: Attempt) -> tuple[int, ...]:
        """Return those that there were before where more workers are slower; learn from it what they gain."""
        workers, before = self._previous_workers, self._previous_seconds
        if len(self._workers) <= len(workers) or len(self._loss_times) != 2:
            return ()
        seconds, starting = self._measure_pace()
        self._start_seconds = starting
        self._doubling_factor = (seconds / before) ** (1 / math.log2(len(self._workers) / len(workers)))
        return workers if (seconds - before) * self._count_losses_left(attempt) > starting else ()

    def _reserve_workers(self, attempt: Attempt) -> tuple[int, ...]:
        """Reserve as many workers as double those that there are, and again, where there is time to gain."""
        standing = self._matching.find_helpers()
        doublings = (1 + len(standing) // len(self._workers)).bit_length() - 1
        if not doublings or len(self._loss_times) < 2:
            return ()
        seconds, starting = self._measure_pace()
        while (
            doublings
            and seconds * (1 - self._doubling_factor**doublings) * self._count_losses_left(attempt) <= starting
        ):
            doublings -= 1
        most = len(self._workers) * (2**doublings - 1)
        for worker in standing:
            if len(self._reserved_workers) < most and self._matching.reserve_helper(worker):
                self._reserved_workers.append(worker)
        taken = len(self._workers) * (
            2 ** ((1 + len(self._reserved_workers) // len(self._workers)).bit_length() - 1) - 1
        )
        self._matching.send_task(self._reserved_workers[taken:], None)
        self._reserved_workers = self._reserved_workers[:taken]
        if not taken:
            return ()
        self._previous_workers, self._previous_seconds = self._workers, seconds
        return (*self._workers, *self._reserved_workers)

    def _measure_pace(self) -> tuple[float, float]:
        """Return the seconds that a loss takes these workers, and those that it takes to start."""
        seconds = statistics.median(b - a for a, b in pairwise(self._loss_times))
        return seconds, max(self._start_seconds, self._loss_times[0] - seconds)

    def _count_losses_left(self, attempt: Attempt) -> int:
        return self._recorder.estimate_losses_left(len(attempt.losses) + 1)
