"""Let the leader of a worker read and write the study through the writer.

The writer is the only process that writes the study (`hpo.store.study_writer`).
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import LEAVE, SHARED_FIELDS, WAIT, Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.study_writer import StudyWriter
    from hpo.store.worker_health import Claim


_SECONDS_BETWEEN_CLAIMS = 0.5  # of a worker that must wait
WITHOUT_RESULT = frozenset(
    (
        *(
            "clear_inheritance",
            "complete",
            "drop_superseded",
            "end_test",
            "fail",
            "interrupt",
            "log_output",
        ),
        *("move_weights", "prune", "record_checkpoint", "record_resume", "report"),
    )
)
"""Methods of the writer and of its record that leaders do not wait for."""


class WriterConnection(Protocol):
    """Let a leader call methods in the process that writes the study."""

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the writer by its name, without waiting for it."""

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the writer by name, after all earlier calls. Return its result."""


class DirectConnection:
    """Call a writer in the same thread. All changes are durable (on disk) at once."""

    def __init__(self, writer: StudyWriter) -> None:
        self._writer = writer

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the writer by its name."""
        self._writer(name, *arguments, **options)
        self._writer.commit()

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the writer by its name, and return its result."""
        answer = self._writer(name, *arguments, **options)
        self._writer.commit()
        return answer


class WriterProxy:
    """Has the methods of the writer and of its record, and calls them through a connection.

    Use it as a `StudyWriter`. The calls of a rank are answered in their order.
    """

    def __init__(self, connection: WriterConnection, prefix: str = "") -> None:
        self._connection = connection
        self._prefix = prefix

    @property
    def record(self) -> WriterProxy:
        """The record of the writer."""
        return WriterProxy(self._connection, "record.")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = self._connection.notify if name in WITHOUT_RESULT else self._connection.call
        return partial(call, f"{self._prefix}{name}")


class StudyClient:
    """Read the changes of the study, and claim evaluations for one worker.

    No evaluation is started when `is_stopping()` returns True.

    Attributes:
        objectives: Objectives of the run.
        writer: The writer of the study, in another process.
        listeners: Functions that `read_changes` calls with each changed evaluation. Its fields in
            `hpo.store.evaluations.SHARED_FIELDS` are set; other fields have their defaults.
    """

    def __init__(
        self,
        connection: WriterConnection,
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.writer = cast("StudyWriter", WriterProxy(connection))
        self.objectives = objectives
        self.is_stopping = is_stopping
        self._change_count = 0
        self.listeners: list[Callable[[Evaluation], None]] = []

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that were added, or changed their state, since the previous call.

        The first call returns all evaluations.
        """
        content, self._change_count = self.writer.read_changes(self._change_count)
        stream, changes = io.BytesIO(content), []
        while stream.tell() < len(content):
            changes.append(Evaluation(**dict(zip(SHARED_FIELDS, pickle.load(stream), strict=True))))
        for evaluation in changes:
            for listener in self.listeners:
                listener(evaluation)
        return changes

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start the next evaluation of this worker, see `hpo.store.study_writer.Claims.claim`.

        It waits if the claim has to wait.
        """
        return self._claim(partial(self.writer.claim, params, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start a waiting evaluation, or promote a paused one, see `Claims.claim_waiting`."""
        return self._claim(partial(self.writer.claim_waiting, **attributes))

    def _claim(self, claim: Callable[[], Claim]) -> Assignment | None:
        while not self.is_stopping():
            claimed = claim()
            if claimed == LEAVE:
                return None
            if claimed != WAIT:
                return cast("Assignment | None", claimed)
            time.sleep(_SECONDS_BETWEEN_CLAIMS)
        return None
