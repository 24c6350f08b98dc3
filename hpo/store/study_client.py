"""Let the leader of a worker read and write the study through the writer.

While workers evaluate, only the writer, a thread of the first rank, writes the study
(`hpo.store.study_writer`).
"""

from __future__ import annotations

import io
import os
import pickle
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
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


class ReceivedChanges:
    """The changes of a study that leaders of one host have received from the writer.

    The leaders share a file in memory with the beginning of all changes, so that most changes are
    sent to a host only once. They need no lock: if several leaders add changes at the same time,
    they write the same bytes to the same place.

    Attributes:
        path: Path of the file, for other processes of the host.
    """

    def __init__(self) -> None:
        self._position = 0  # Number of bytes that this leader has read.
        self._use_file(os.memfd_create("hpo-changes"))

    def _use_file(self, file: int) -> None:
        self._file = file
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._finalizer = weakref.finalize(self, os.close, file)

    def share_file(self, path: str) -> None:
        """Use the file of another leader instead, if it can be opened."""
        with suppress(OSError):
            file = os.open(path, os.O_RDWR)
            self._finalizer()
            self._use_file(file)

    def read(self, fetch: Callable[[int], bytes]) -> bytes:
        """Return all changes that this leader has not read.

        Args:
            fetch: Returns the writer's changes without the given number of bytes at the start.
        """
        size = os.fstat(self._file).st_size
        start = max(size, self._position)
        held = os.pread(self._file, start - self._position, self._position)
        new = fetch(start)
        if start == size:  # Otherwise, the file would have a gap, since memory was full before.
            with suppress(OSError):
                os.pwrite(self._file, new, start)
        self._position = start + len(new)
        return held + new


class StudyClient:
    """Call the writer of the study, for one worker. The calls are answered in their order.

    No evaluation is started when `is_stopping()` returns True.

    Args:
        send_call: Calls a method of the writer by its name, and returns the result.
        send_notification: Calls a method of the writer by its name, without waiting for it.
        places: Attributes of each claimed trial that tell where the worker runs.
        received: The changes that this leader has received, which other leaders may share.

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
        received: ReceivedChanges | None = None,
    ) -> None:
        self.call = cast("StudyWriter", _RemoteMethods(send_call))
        self.notify = cast("StudyWriter", _RemoteMethods(send_notification))
        self.objectives = objectives
        self.is_stopping = is_stopping
        self._places = dict(places or {})
        self._received = received or ReceivedChanges()
        self.listeners: list[Callable[[Evaluation], None]] = []

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that were added, or changed, since the previous call."""
        content = self._received.read(self.call.read_changes)
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
