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
from hpo.process.printed import warn

if TYPE_CHECKING:
    from hpo.evaluation.attempt import Attempt
    from hpo.evaluation.leader import Leader
    from hpo.evaluation.meeting import Decide
    from hpo.evaluation.verdict import Verdict
    from hpo.ranks.offers import Offers
    from hpo.store.evaluations import Assignment
    from hpo.store.recorder import Recorder

_IDEAL = 0.5  # of the time that a loss takes, with twice the ranks


@dataclass(frozen=True)
class Invitation:
    """An evaluation that goes on with all of these workers, the first of which is its own."""

    assignment: Assignment
    workers: tuple[int, ...]


Claim = Callable[[], "Assignment | None"]
Told = Union["Assignment", Invitation, None]


class Growing:
    """What the leader of a worker does so that its evaluations grow, and that it helps others."""

    def __init__(self, offers: Offers, recorder: Recorder) -> None:
        self._offers = offers
        self._recorder = recorder
        self._alone: tuple[int, ...] = (offers.worker,)
        self._workers: tuple[int, ...] = self._alone  # at this worker's evaluation
        self._reserved: list[int] = []
        self._began = 0.0  # when these workers did
        self._times: list[float] = []  # at which losses came, in seconds since then
        self._starting = 0.0  # seconds that it took the last team to begin
        self._formerly: tuple[int, ...] = self._alone  # those before them
        self._seconds_formerly = 0.0  # that a loss took those
        self._doubling = _IDEAL  # what twice the workers make of the time that a loss takes, as far as is known
        self._is_off = False  # since the objective begins again
        self._has_saved = False  # in this evaluation
        self._warns = offers.worker == 0  # of an objective that does not save, once a run
        self._waited_for: set[int] = set()  # trials that did not take this worker on

    def next(self, claim: Claim) -> Told:
        """Return what to do next: to help with an evaluation that is promoted, a new one, or whatever others are at.

        Returns None where no worker has anything to do.
        """
        if invitation := self._to_promoted():
            return invitation
        if not self._offers.is_retired and (assignment := claim()) is not None:
            return assignment
        self._offers.retire()
        wanted: Invitation | None = self._offers.wait()
        return wanted

    def _to_promoted(self) -> Invitation | None:
        found = [one for one in self._recorder.promising() if one.worker != self._offers.worker]
        found = [one for one in found if one.trial not in self._waited_for]
        if not found:
            return None
        invitation: Invitation | None = self._offers.wait({one.worker for one in found}, max(one.wait for one in found))
        if invitation is None:
            self._waited_for.update(one.trial for one in found)
        return invitation

    # For an evaluation of this worker

    def begin(self, assignment: Assignment, workers: tuple[int, ...], saved: int = 0) -> None:
        """Begin with these workers, or go on after so many losses that were saved; those that were reserved come."""
        self._has_saved = saved > 0
        if workers != self._workers:
            self._recorder.grew(assignment, saved or self._recorder.checkpoint_step(assignment.number), workers)
        self._offers.begin([one for one in self._reserved if one in workers], Invitation(assignment, workers))
        self._offers.begin([one for one in self._reserved if one not in workers], None)
        self._workers, self._reserved, self._times, self._began = workers, [], [], clock.now()

    def close(self) -> None:
        """Drop messages that are on their way; by all leaders together, once none has anything to do."""
        self._offers.close()

    def end(self) -> None:
        """Let workers go that were reserved for an evaluation that has ended."""
        self._offers.begin(self._reserved, None)
        self._reserved, self._workers = [], self._alone

    def fail(self, attempt: Attempt) -> None:
        """Take note that an evaluation could not go on with more workers."""
        self._doubling = 1.0
        warn(
            f"warning: --elastic: trial {attempt.assignment.number} goes on with 1 worker, since it could not with "
            f"{len(self._workers)}: {attempt.verdict.failure}"
        )

    def decide(self, decide: Decide, leader: Leader, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Let the leader decide on a loss, and perhaps let the evaluation go on with more workers, or with fewer."""
        if verdict.loss is not None:
            self._times.append(clock.now() - self._began)
            self._check_goes_on(attempt)
        self._has_saved |= attempt.has_saved
        verdict = decide(verdict, printed)
        self._check_saves(attempt, verdict)
        if verdict.loss is None or verdict.state != "going" or not leader.can_hand_on(attempt):
            return verdict
        workers = () if self._is_off else self._back(attempt) or self._more(attempt)
        return replace(verdict, state="regrouped", save=True, workers=workers) if workers else verdict

    def _check_saves(self, attempt: Attempt, verdict: Verdict) -> None:
        """Warn if an evaluation of several losses is complete, and has saved nothing for other workers."""
        if verdict.state == "complete" and len(attempt.losses) > 1 and not self._has_saved and self._warns:
            self._warns = False
            warn(
                f"warning: --elastic does nothing: trial {attempt.assignment.number} has not called "
                f"worker.save_checkpoint. Call it "
                "before each yield, and continue from worker.checkpoint"
            )

    def _check_goes_on(self, attempt: Attempt) -> None:
        """Let nothing grow any more where an objective begins again in the place of going on."""
        was_given = attempt.restored is not None  # it was not if the state could not be copied, which has been said
        if len(self._workers) > 1 and was_given and not attempt.has_loss and not attempt.taken_over:
            self._is_off = True
            number, workers = attempt.assignment.number, len(self._workers)
            why = "its objective has saved what it goes on from, and has not asked for worker.checkpoint"
            warn(f"warning: --elastic: trial {number} has begun again with {workers} workers: {why}")

    def _back(self, attempt: Attempt) -> tuple[int, ...]:
        """Return those that there were before where more workers are slower; learn from it what they gain."""
        workers, before = self._formerly, self._seconds_formerly
        if len(self._workers) <= len(workers) or len(self._times) != 2:
            return ()
        seconds, starting = self._pace()
        self._starting = starting
        self._doubling = (seconds / before) ** (1 / math.log2(len(self._workers) / len(workers)))
        return workers if (seconds - before) * self._left(attempt) > starting else ()

    def _more(self, attempt: Attempt) -> tuple[int, ...]:
        """Reserve as many workers as double those that there are, and again, where there is time to gain."""
        standing = self._offers.standing()
        doublings = (1 + len(standing) // len(self._workers)).bit_length() - 1
        if not doublings or len(self._times) < 2:
            return ()
        seconds, starting = self._pace()
        while doublings and seconds * (1 - self._doubling**doublings) * self._left(attempt) <= starting:
            doublings -= 1
        most = len(self._workers) * (2**doublings - 1)
        for worker in standing:
            if len(self._reserved) < most and self._offers.reserve(worker):
                self._reserved.append(worker)
        taken = len(self._workers) * (2 ** ((1 + len(self._reserved) // len(self._workers)).bit_length() - 1) - 1)
        self._offers.begin(self._reserved[taken:], None)
        self._reserved = self._reserved[:taken]
        if not taken:
            return ()
        self._formerly, self._seconds_formerly = self._workers, seconds
        return (*self._workers, *self._reserved)

    def _pace(self) -> tuple[float, float]:
        """Return the seconds that a loss takes these workers, and those that it takes to start."""
        seconds = statistics.median(b - a for a, b in pairwise(self._times))
        return seconds, max(self._starting, self._times[0] - seconds)

    def _left(self, attempt: Attempt) -> int:
        return self._recorder.losses_left(len(attempt.losses) + 1)
