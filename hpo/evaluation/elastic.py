"""Elastic workers: decide when a worker uses the ranks of idle workers, and when an idle worker helps another.

Method: resource-adaptive successive doubling (Aach et al., "Resource-adaptive successive doubling for hyperparameter
optimization with large datasets on high-performance computing systems", 2024). An evaluation doubles its workers at
each rung (step at which losses are compared) that it passes. At the end of a run, it uses all free workers. It
continues on its new workers from its latest checkpoint. This move takes time, so an evaluation moves only if it then
saves more time.
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

_IDEAL_DOUBLING = 0.5  # time of a loss with twice the ranks, relative to the time before


@dataclass(frozen=True)
class Invitation:
    """A request to several workers (groups of ranks) to continue one evaluation together."""

    assignment: Assignment
    workers: tuple[int, ...]
    """Numbers of the workers; the first is the evaluation's own worker."""


Claim = Callable[[], "Assignment | None"]
NextTask = Union["Assignment", Invitation, None]


class ElasticController:
    """Decides, on the leader (first rank) of a worker, when its evaluations use more workers and when it helps others.

    Args:
        matching: Exchanges messages with the leaders of the other workers.
        recorder: The leader's connection to the study.
    """

    def __init__(self, matching: HelperMatching, recorder: StudyClient) -> None:
        self._matching = matching
        self._recorder = recorder
        self._own_worker: tuple[int, ...] = (matching.worker,)
        self._workers: tuple[int, ...] = self._own_worker  # that run this worker's evaluation
        self._reserved_workers: list[int] = []
        self._began_at = 0.0  # when the current workers began
        self._loss_times: list[float] = []  # seconds from then to each loss
        self._start_seconds = 0.0  # start time of the last group of workers
        self._previous_workers: tuple[int, ...] = self._own_worker  # workers before the last expansion
        self._previous_seconds = 0.0  # their time per loss
        self._doubling_factor = _IDEAL_DOUBLING  # replaced by a measurement after the first expansion
        self._is_disabled = False  # true if the objective does not resume from its checkpoint
        self._has_saved = False  # whether this evaluation has saved a checkpoint
        self._may_warn = matching.worker == 0  # one warning per run about an objective that does not save
        self._awaited_trials: set[int] = set()  # promoted trials that did not use this worker in time

    def claim_next(self, claim: Claim) -> NextTask:
        """Return the next task of this worker.

        Tasks come in this order: help with a promoted evaluation (resumed because it is among the best of its rung),
        then a new evaluation, then help with any other evaluation.

        Args:
            claim: Claims a new evaluation; returns None if there is none.

        Returns:
            An Assignment (a new evaluation) or an Invitation (help). None if no worker has work.
        """
        if invitation := self._wait_for_promoted():
            return invitation
        if not self._matching.is_retired and (assignment := claim()) is not None:
            return assignment
        self._matching.retire()
        # A broken worker offers its help to no other worker.
        task: NextTask = self._matching.wait_for_task(() if self._recorder.has_left else None)
        return task

    def _wait_for_promoted(self) -> Invitation | None:
        candidates = [
            candidate
            for candidate in self._recorder.find_expandable()
            if candidate.worker != self._matching.worker and candidate.trial not in self._awaited_trials
        ]
        if not candidates:
            return None
        invitation: Invitation | None = self._matching.wait_for_task(
            {candidate.worker for candidate in candidates}, max(candidate.max_wait for candidate in candidates)
        )
        if invitation is None:
            self._awaited_trials.update(candidate.trial for candidate in candidates)
        return invitation

    # For an evaluation of this worker

    def begin_evaluation(self, assignment: Assignment, workers: tuple[int, ...], saved: int = 0) -> None:
        """Record which workers run an evaluation, and send it to the idle workers that were reserved for it.

        A reserved worker that is not in `workers` is released.

        Args:
            assignment: The evaluation.
            workers: Numbers of its workers from now on.
            saved: Number of losses in the checkpoint that was made for this change of workers; 0 if none was made.
        """
        self._has_saved = saved > 0
        if workers != self._workers:
            self._recorder.record_worker_group(
                assignment, saved or self._recorder.read_checkpoint_step(assignment.number), workers
            )
        self._matching.send_task(
            [worker for worker in self._reserved_workers if worker in workers], Invitation(assignment, workers)
        )
        self._matching.send_task([worker for worker in self._reserved_workers if worker not in workers], None)
        self._workers, self._reserved_workers, self._loss_times, self._began_at = workers, [], [], clock.now()

    def close(self) -> None:
        """Drop pending messages. Collective: call on all leaders, when no worker has work."""
        self._matching.close()

    def release_reserved(self) -> None:
        """Release the workers that were reserved for an evaluation that has ended."""
        self._matching.send_task(self._reserved_workers, None)
        self._reserved_workers, self._workers = [], self._own_worker

    def record_failure(self, attempt: Attempt) -> None:
        """Print a warning that an evaluation has failed with several workers, and add no workers from now on."""
        self._doubling_factor = 1.0
        warn(
            f"warning: --elastic: trial {attempt.assignment.number} continues with 1 worker, since it failed with "
            f"{len(self._workers)}: {attempt.verdict.failure}"
        )

    def decide(self, decide: Decider, leader: Leader, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Return the leader's verdict on a loss, which may move the evaluation to more or fewer workers.

        Args:
            decide: Returns the leader's verdict on the loss, without a decision on the number of workers.
            leader: The leader of this worker.
            attempt: The evaluation.
            verdict: Verdict of all ranks on the step.
            printed: Lines that the ranks have printed in the step.
        """
        if attempt.is_test:
            return decide(verdict, printed)
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
        if verdict.state == "complete" and len(attempt.losses) > 1 and not self._has_saved and self._may_warn:
            self._may_warn = False
            warn(
                f"warning: --elastic has no effect: trial {attempt.assignment.number} has not called "
                "worker.save_checkpoint. Call it before each yield, and resume from worker.checkpoint"
            )

    def _check_resumption(self, attempt: Attempt) -> None:
        """Stop adding workers to evaluations if an objective restarts instead of resuming from its checkpoint."""
        # It has none if the copy has failed, about which there is a warning already.
        was_given = attempt.checkpoint_info is not None
        if len(self._workers) > 1 and was_given and not attempt.has_loss and not attempt.restored_count:
            self._is_disabled = True
            number, workers = attempt.assignment.number, len(self._workers)
            why = "its objective saves checkpoints, but has not read worker.checkpoint"
            warn(f"warning: --elastic: trial {number} has restarted with {workers} workers: {why}")

    def _choose_previous_workers(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the workers before the last expansion if they would end the evaluation earlier, otherwise ().

        Also measure how much a doubling of the workers shortens the time per loss.
        """
        workers, previous_seconds = self._previous_workers, self._previous_seconds
        if len(self._workers) <= len(workers) or len(self._loss_times) != 2:
            return ()
        seconds, starting = self._measure_pace()
        self._start_seconds = starting
        self._doubling_factor = (seconds / previous_seconds) ** (1 / math.log2(len(self._workers) / len(workers)))
        return workers if (seconds - previous_seconds) * self._count_losses_left(attempt) > starting else ()

    def _reserve_workers(self, attempt: Attempt) -> tuple[int, ...]:
        """Reserve idle workers for one or several doublings, if this saves time.

        Returns:
            All workers of the evaluation from now on. Empty if it keeps its current workers.
        """
        helpers = self._matching.find_helpers()
        doublings = (1 + len(helpers) // len(self._workers)).bit_length() - 1
        if not doublings or len(self._loss_times) < 2:
            return ()
        seconds, starting = self._measure_pace()
        while (
            doublings
            and seconds * (1 - self._doubling_factor**doublings) * self._count_losses_left(attempt) <= starting
        ):
            doublings -= 1
        most = len(self._workers) * (2**doublings - 1)
        for worker in helpers:
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
        """Return the seconds per loss of the current workers, and the seconds that they took to start."""
        seconds = statistics.median(b - a for a, b in pairwise(self._loss_times))
        return seconds, max(self._start_seconds, self._loss_times[0] - seconds)

    def _count_losses_left(self, attempt: Attempt) -> int:
        return self._recorder.estimate_losses_left(len(attempt.losses) + 1)
