"""Let the leader of a worker read and write the study through the process that writes it."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import SHARED_FIELDS, Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.elastic_candidates import ExpandableEvaluation
    from hpo.store.pruning import PruningDecision
    from hpo.store.study_writer import StudyWriter


class WriterConnection(Protocol):
    """Connect a leader to the writer of the study."""

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer call a method, without waiting for it."""

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Let the writer call a method after all earlier ones, and return the result.

        Raises TimeoutError after `limit` seconds.
        """


class DirectConnection:
    """Connect to a writer in the same thread; all changes are durable at once."""

    def __init__(self, writer: StudyWriter) -> None:
        self._writer = writer

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer call a method."""
        self._writer(name, *arguments, **options)
        self._writer.commit()

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:  # noqa: ARG002 - it never waits
        """Let the writer call a method, and return the result."""
        answer = self._writer(name, *arguments, **options)
        self._writer.commit()
        return answer


class StudyClient:
    """Record the evaluations of one worker through the writer.

    It claims no evaluations once `is_stopping()` is true.

    Attributes:
        objectives: Objectives of the run.
        listeners: Functions that `read_changes` calls with each evaluation, of which only
            `hpo.store.evaluations.SHARED_FIELDS` are known.
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
        """Return the evaluations that started, ended or were promoted since the last call; all at the first call."""
        content, self._change_count = self._connection.call("read_changes", self._change_count)
        stream, changes = io.BytesIO(content), []
        while stream.tell() < len(content):
            changes.append(Evaluation(**dict(zip(SHARED_FIELDS, pickle.load(stream), strict=True))))
        for evaluation in changes:
            for listener in self.listeners:
                listener(evaluation)
        return changes

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start an evaluation, see `hpo.store.claims.Claims.claim`."""
        if self.is_stopping():
            return None
        return cast("Assignment | None", self._connection.call("claim", params, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start an evaluation, see `hpo.store.claims.Claims.claim_waiting`."""
        return (
            None
            if self.is_stopping()
            else cast("Assignment | None", self._connection.call("claim_waiting", **attributes))
        )

    def flush(self, limit: float = math.inf) -> None:
        """Wait until all changes are durable. Raises TimeoutError after `limit` seconds."""
        self._connection.call("commit", limit=limit)

    # These methods call the methods of `Record` with the same names.

    def report(self, assignment: Assignment, step: int, loss: float) -> None:
        """Record the loss of a step."""
        self._connection.notify("report", assignment, step, loss)

    def record_resume(self, assignment: Assignment, losses: Sequence[float], seconds: float) -> None:
        """Record the losses and the seconds that a resumed evaluation takes over from the trial that it continues."""
        self._connection.notify("record_resume", assignment, losses, seconds)

    def record_checkpoint(self, assignment: Assignment, losses: int) -> None:
        """Record the number of losses at the last checkpoint."""
        self._connection.notify("record_checkpoint", assignment, losses)

    def record_worker_group(self, assignment: Assignment, losses: int, workers: Sequence[int]) -> None:
        """Record that these workers run an evaluation from now on."""
        self._connection.notify("record_worker_group", assignment, losses, workers)

    def clear_inheritance(self, assignment: Assignment) -> None:
        """Record that an evaluation started without its parent checkpoint."""
        self._connection.notify("clear_inheritance", assignment)

    def complete(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation succeeded."""
        self._connection.notify("complete", assignment, loss, seconds, dict(metrics), **attributes)

    def prune(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation was pruned or paused."""
        self._connection.notify("prune", assignment, loss, seconds, dict(metrics), **attributes)

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed."""
        self._connection.notify("fail", assignment, reason, traceback, seconds)

    def interrupt(self, assignment: Assignment) -> None:
        """End an evaluation that did not end by itself, and enqueue its retry."""
        self._connection.notify("interrupt", assignment)

    def log_output(self, trial: int, text: str) -> None:
        """Store the output of an evaluation."""
        if text:
            self._connection.notify("log_output", trial, text)

    # These methods call the methods of `StudyWriter` with the same names.

    def decide_pruning(
        self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]
    ) -> PruningDecision:
        """Let the pruner decide on an evaluation after `losses` losses, by its lowest loss and the metrics of it."""
        values = (loss, *self.objectives.select_metric_values(metrics)) if self.objectives.is_multi_objective else ()
        return cast("PruningDecision", self._connection.call("decide_pruning", assignment, losses, values))

    def count_initial_failures(self) -> int:
        """Return the number of evaluations that failed in this session; 0 if any evaluation of the run succeeded."""
        return int(self._connection.call("count_initial_failures"))

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether to keep the weights of a confirmation that has this loss."""
        return bool(self._connection.call("should_keep_weights", trial, loss))

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files that the weights of a complete evaluation should be written to."""
        return list(self._connection.call("list_weight_files", trial))

    def move_weights(self, trial: int) -> None:
        """Move written weights from their drafts to their files."""
        self._connection.notify("move_weights", trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return bool(self._connection.call("has_losses"))

    def is_first_warning(self, text: str) -> bool:
        """Return whether this is the first call with this text in the run, over all workers."""
        return bool(self._connection.call("is_first_warning", text))

    def read_previous_losses(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that this trial continues; none if it continues none."""
        losses, seconds = self._connection.call("read_previous_losses", trial)
        return list(losses), float(seconds)

    def read_checkpoint_step(self, trial: int) -> int:
        """Return the number of losses at the last checkpoint of an evaluation."""
        return int(self._connection.call("read_checkpoint_step", trial))

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Return whether individuals may inherit from an evaluation that ends with this loss."""
        return bool(self._connection.call("is_parent_candidate", trial, loss))

    def drop_superseded(self, trial: int) -> None:
        """Remove the checkpoints of individuals that this evaluation displaces from the best of its island."""
        self._connection.notify("drop_superseded", trial)

    def find_expandable(self) -> list[ExpandableEvaluation]:
        """Return the evaluations that more workers may join."""
        return list(self._connection.call("find_expandable"))

    def estimate_losses_left(self, losses: int) -> int:
        """Estimate how many losses an evaluation will still report after this number of losses."""
        return int(self._connection.call("estimate_losses_left", losses))
