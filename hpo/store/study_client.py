"""Let the leader of a worker read and write the study through the writer.

While workers evaluate, only the writer, a thread of the first rank, writes the study
(`hpo.store.study_writer`).
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import SHARED_FIELDS, Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.study_writer import StudyWriter


_SECONDS_BETWEEN_CLAIMS = 0.5  # of a worker that must wait


class _RemoteMethods:
    """Has the methods of the writer: a call sends the name and the arguments of the method."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self._send = send

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._send, name)


class StudyClient:
    """Call the writer of the study, for one worker. The calls are answered in their order.

    No evaluation is started when `is_stopping()` returns True.

    Args:
        send_call: Calls a method of the writer by its name, and returns the result.
        send_notification: Calls a method of the writer by its name, without waiting for it.
        places: Attributes of each claimed trial that tell where the worker runs.

    Attributes:
        call: The writer: a call of a method waits for its result.
        notify: The writer as well: a call returns at once, so the method must have no result.
        objectives: Objectives of the run.
        listeners: Functions that `read_changes` calls with each changed evaluation. Its fields in
            `hpo.store.evaluations.SHARED_FIELDS` are set; other fields have their defaults.
    """

    def __init__(
        self,
        send_call: Callable[..., Any],
        send_notification: Callable[..., Any],
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
        places: Mapping[str, Any] | None = None,
    ) -> None:
        self.call = cast("StudyWriter", _RemoteMethods(send_call))
        self.notify = cast("StudyWriter", _RemoteMethods(send_notification))
        self.objectives = objectives
        self.is_stopping = is_stopping
        self._places = dict(places or {})
        self._change_count = 0
        self.listeners: list[Callable[[Evaluation], None]] = []

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that were added, or changed, since the previous call."""
        content, self._change_count = self.call.read_changes(self._change_count)
        stream = io.BytesIO(content)
        changes = []
        while stream.tell() < len(content):
            changes.append(Evaluation(**dict(zip(SHARED_FIELDS, pickle.load(stream), strict=True))))
        for evaluation in changes:
            for listener in self.listeners:
                listener(evaluation)
        return changes

    def claim(self, params: Mapping[str, Any] | None, **attributes: Any) -> Assignment | None:
        """Start the next evaluation of this worker, see `Claims.claim`; wait if it must wait."""
        while not self.is_stopping():
            claimed = self.call.claim(params, **attributes, **self._places)
            if claimed != "wait":
                return claimed
            time.sleep(_SECONDS_BETWEEN_CLAIMS)
        return None
