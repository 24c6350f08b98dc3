"""Let the leader of a worker (its first rank) read and write the study through the writer.

The writer is the only process that writes the study (`hpo.store.study_writer`).
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import LEAVE, SHARED_FIELDS, WAIT, Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.pruning import PruningDecision
    from hpo.store.study_writer import StudyWriter


_SECONDS_BETWEEN_CLAIMS = 0.5  # of a worker that must wait


class WriterConnection(Protocol):
    """Let a leader call methods in the process that writes the study."""

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the writer by its name, without waiting for it."""

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Call a method of the writer by its name, after all earlier calls, and return its result.

        Raises TimeoutError after `limit` seconds without a result.
        """


class DirectConnection:
    """Call a writer in the same thread. All changes are durable (on disk) at once."""

    def __init__(self, writer: StudyWriter) -> None:
        self._writer = writer

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the writer by its name."""
        self._writer(name, *arguments, **options)
        self._writer.commit()

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:  # noqa: ARG002 - it never waits
        """Call a method of the writer by its name, and return its result."""
        answer = self._writer(name, *arguments, **options)
        self._writer.commit()
        return answer


class StudyClient:
    """Record the evaluations of one worker by calls to the writer of the study.

    No evaluation is started when `is_stopping()` returns True.

    Attributes:
        objectives: Objectives of the run.
        listeners: Functions that `read_changes` calls with each changed evaluation. Its fields in
            `hpo.store.evaluations.SHARED_FIELDS` are set; other fields have their defaults.
    """

    def __init__(
        self,
        connection: WriterConnection,
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connection = connection
        self.objectives = objectives
        self.is_stopping = is_stopping
        self._change_count = 0
        self.listeners: list[Callable[[Evaluation], None]] = []

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that were added, or changed their state, since the previous call.

        The first call returns all evaluations.
        """
        content, self._change_count = self._connection.call("read_changes", self._change_count)
        stream, changes = io.BytesIO(content), []
        while stream.tell() < len(content):
            changes.append(Evaluation(**dict(zip(SHARED_FIELDS, pickle.load(stream), strict=True))))
        for evaluation in changes:
            for listener in self.listeners:
                listener(evaluation)
        return changes

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start the next evaluation of this worker, see `hpo.store.claims.Claims.claim`. Wait if it must wait."""
        return self._claim("claim", params, **attributes)

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start a waiting evaluation, or promote a paused one, see `hpo.store.claims.Claims.claim_waiting`."""
        return self._claim("claim_waiting", **attributes)

    def _claim(self, method: str, *arguments: Any, **attributes: Any) -> Assignment | None:
        while not self.is_stopping():
            claim = self._connection.call(method, *arguments, **attributes)
            if claim == LEAVE:
                return None
            if claim != WAIT:
                return cast("Assignment | None", claim)
            time.sleep(_SECONDS_BETWEEN_CLAIMS)
        return None

    def flush(self, limit: float = math.inf) -> None:
        """Wait until all changes are durable (on disk). Raises TimeoutError after `limit` seconds."""
        self._connection.call("commit", limit=limit)

    # These methods call the methods of `Record` with the same names.

    def report(self, assignment: Assignment, step: int, loss: float) -> None:
        """Record the loss of a step."""
        self._connection.notify("report", assignment, step, loss)

    def record_resume(self, assignment: Assignment, losses: Sequence[float], seconds: float) -> None:
        """Record the losses and the seconds that a resumed evaluation takes over from its previous trial."""
        self._connection.notify("record_resume", assignment, losses, seconds)

    def record_checkpoint(self, assignment: Assignment, losses: int) -> None:
        """Record that a checkpoint was saved after this number of losses."""
        self._connection.notify("record_checkpoint", assignment, losses)

    def clear_inheritance(self, assignment: Assignment) -> None:
        """Record that an evaluation started without the checkpoint of its parent."""
        self._connection.notify("clear_inheritance", assignment)

    def complete(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation is complete; `attributes` may contain `cut_after`, see `Evaluation`."""
        self._connection.notify("complete", assignment, loss, seconds, dict(metrics), **attributes)

    def prune(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation was pruned, or that it was paused if `attributes` contain `paused_after`."""
        self._connection.notify("prune", assignment, loss, seconds, dict(metrics), **attributes)

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed."""
        self._connection.notify("fail", assignment, reason, traceback, seconds)

    def interrupt(self, assignment: Assignment) -> None:
        """Record that an evaluation was interrupted, and enqueue its retry."""
        self._connection.notify("interrupt", assignment)

    def end_test(self, assignment: Assignment, failure: str) -> None:
        """Record the end of the test of this worker; `failure` is empty if it has passed."""
        self._connection.notify("end_test", assignment, failure)

    def log_output(self, trial: int, text: str) -> None:
        """Store lines that an evaluation has printed."""
        if text:
            self._connection.notify("log_output", trial, text)

    # These methods call the methods of `StudyWriter` with the same names.

    def decide_pruning(
        self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]
    ) -> PruningDecision:
        """Let the pruner decide whether an evaluation continues after this number of losses.

        `loss` is its lowest loss so far, and `metrics` were reported with this loss.
        """
        values = (loss, *self.objectives.select_metric_values(metrics)) if self.objectives.is_multi_objective else ()
        return cast("PruningDecision", self._connection.call("decide_pruning", assignment, losses, values))

    def count_initial_failures(self) -> int:
        """Return the number of evaluations that failed in this session.

        Return 0 if any evaluation of the run is complete, pruned or paused.
        """
        return int(self._connection.call("count_initial_failures"))

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether to keep the weights of a confirmation (training with another seed) with this loss."""
        return bool(self._connection.call("should_keep_weights", trial, loss))

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files to which the weights of a complete evaluation should be written; empty to discard them."""
        return list(self._connection.call("list_weight_files", trial))

    def move_weights(self, trial: int) -> None:
        """Move the weights of a trial from drafts (temporary files) to their files, if they are still wanted there."""
        self._connection.notify("move_weights", trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return bool(self._connection.call("has_losses"))

    def is_first_warning(self, text: str) -> bool:
        """Return whether no worker has called this method with this text before in this session."""
        return bool(self._connection.call("is_first_warning", text))

    def read_previous_losses(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that this trial retries or continues.

        Return no losses and 0 seconds for the first trial of an individual.
        """
        losses, seconds = self._connection.call("read_previous_losses", trial)
        return list(losses), float(seconds)

    def read_checkpoint_step(self, trial: int) -> int:
        """Return the number of losses at the latest checkpoint of an evaluation; 0 without a checkpoint."""
        return int(self._connection.call("read_checkpoint_step", trial))

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Return whether individuals may start from the checkpoint of an evaluation that ends with this loss."""
        return bool(self._connection.call("is_parent_candidate", trial, loss))

    def drop_superseded(self, trial: int) -> None:
        """Remove the checkpoints of individuals that this trial displaces from the best of its island."""
        self._connection.notify("drop_superseded", trial)
