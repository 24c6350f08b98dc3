"""A leader's end of the record: it asks and tells the writer, and hears from it what is new in the run."""

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
    """What connects a leader to the writer."""

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something, without waiting for it."""

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Let the writer do something after all that it was told, and return its answer.

        Raises TimeoutError after `limit` seconds.
        """


class DirectConnection:
    """The line to a writer in the same thread; all that it is told is durable at once."""

    def __init__(self, writer: StudyWriter) -> None:
        self._writer = writer

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something."""
        self._writer(name, *arguments, **options)
        self._writer.commit()

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:  # noqa: ARG002 - at once
        """Let the writer do something, and return its answer."""
        answer = self._writer(name, *arguments, **options)
        self._writer.commit()
        return answer


class StudyClient:
    """Records the evaluations of one worker; `objectives` are the run's.

    Nothing new is claimed once `is_stopping()` is true. ``listeners`` are called with each evaluation that has started
    or ended, when its news are asked for. Of these, only what breeding needs is known
    (`hpo.store.evaluations.SHARED_FIELDS`).
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
        """Return the evaluations that have started, ended, or been promoted since the last call; at first, all."""
        content, self._change_count = self._connection.call("read_changes", self._change_count)
        stream, news = io.BytesIO(content), []
        while stream.tell() < len(content):
            news.append(Evaluation(**dict(zip(SHARED_FIELDS, pickle.load(stream), strict=True))))
        for one in news:
            for listener in self.listeners:
                listener(one)
        return news

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start an evaluation as `hpo.store.claims.Claims.claim` does."""
        if self.is_stopping():
            return None
        return cast("Assignment | None", self._connection.call("claim", params, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start an evaluation as `hpo.store.claims.Claims.claim_waiting` does."""
        return (
            None
            if self.is_stopping()
            else cast("Assignment | None", self._connection.call("claim_waiting", **attributes))
        )

    def flush(self, limit: float = math.inf) -> None:
        """Wait until all that was told is durable; raises TimeoutError after `limit` seconds."""
        self._connection.call("commit", limit=limit)

    # Of one evaluation, as the record's own methods of these names

    def report(self, assignment: Assignment, step: int, loss: float) -> None:
        """Record an intermediate value."""
        self._connection.notify("report", assignment, step, loss)

    def record_resume(self, assignment: Assignment, losses: Sequence[float], seconds: float) -> None:
        """Record the losses that an evaluation had when it went on."""
        self._connection.notify("record_resume", assignment, losses, seconds)

    def record_checkpoint(self, assignment: Assignment, losses: int) -> None:
        """Record that an evaluation goes on after so many losses if it is interrupted now."""
        self._connection.notify("record_checkpoint", assignment, losses)

    def record_worker_group(self, assignment: Assignment, losses: int, workers: Sequence[int]) -> None:
        """Record that an evaluation goes on with these workers."""
        self._connection.notify("record_worker_group", assignment, losses, workers)

    def clear_inheritance(self, assignment: Assignment) -> None:
        """Record that an evaluation has begun without what it was to inherit."""
        self._connection.notify("clear_inheritance", assignment)

    def complete(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation succeeded."""
        self._connection.notify("complete", assignment, loss, seconds, dict(metrics), **attributes)

    def prune(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation was pruned, or paused."""
        self._connection.notify("prune", assignment, loss, seconds, dict(metrics), **attributes)

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed."""
        self._connection.notify("fail", assignment, reason, traceback, seconds)

    def interrupt(self, assignment: Assignment) -> None:
        """End an evaluation that could not end by itself, and let it wait to be evaluated again."""
        self._connection.notify("interrupt", assignment)

    def log_output(self, trial: int, text: str) -> None:
        """Keep what an evaluation has printed."""
        if text:
            self._connection.notify("log_output", trial, text)

    # What the writer knows, as its own methods of these names

    def decide_pruning(
        self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]
    ) -> PruningDecision:
        """Let the pruner judge an evaluation after so many losses, by its lowest loss and the metrics of that."""
        values = (loss, *self.objectives.select_metric_values(metrics)) if self.objectives.is_multi_objective else ()
        return cast("PruningDecision", self._connection.call("decide_pruning", assignment, losses, values))

    def count_initial_failures(self) -> int:
        """Return how many evaluations of this session have failed, where none has ever succeeded."""
        return int(self._connection.call("count_initial_failures"))

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether weights of this loss are to be kept, of an evaluation that confirms the best."""
        return bool(self._connection.call("should_keep_weights", trial, loss))

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files that are to hold the weights of an evaluation which is complete."""
        return list(self._connection.call("list_weight_files", trial))

    def move_weights(self, trial: int) -> None:
        """Let weights that were written be put in their place."""
        self._connection.notify("move_weights", trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return bool(self._connection.call("has_losses"))

    def is_first_warning(self, text: str) -> bool:
        """Return whether no worker has asked this about the same text before."""
        return bool(self._connection.call("is_first_warning", text))

    def read_previous_losses(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that a trial repeats; none if it repeats none."""
        losses, seconds = self._connection.call("read_previous_losses", trial)
        return list(losses), float(seconds)

    def read_checkpoint_step(self, trial: int) -> int:
        """Return after how many losses an evaluation was saved last."""
        return int(self._connection.call("read_checkpoint_step", trial))

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Tell whether others may inherit from an evaluation that ends with this loss."""
        return bool(self._connection.call("is_parent_candidate", trial, loss))

    def drop_superseded(self, trial: int) -> None:
        """Let the states of those be forgotten of whom nobody will inherit any more."""
        self._connection.notify("drop_superseded", trial)

    def find_expandable(self) -> list[ExpandableEvaluation]:
        """Return the evaluations that others may help."""
        return list(self._connection.call("find_expandable"))

    def estimate_losses_left(self, losses: int) -> int:
        """Return how many losses an evaluation will still have after so many."""
        return int(self._connection.call("estimate_losses_left", losses))
