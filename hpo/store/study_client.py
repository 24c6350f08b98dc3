"""Let the leader of a worker read and write the study through the writer.

While workers evaluate, only the writer, a thread of the first rank, writes the study
(`hpo.store.study_writer`).
"""

from __future__ import annotations

import io
import os
import pickle
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
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
        name: Name of the file, which no other file has.
        path: Path of the file, for other processes of the host.
    """

    def __init__(self) -> None:
        self._position = 0  # Number of bytes that this leader has read.
        self.name = f"hpo-changes-{uuid.uuid4().hex}"
        self._use_file(os.memfd_create(self.name))

    def _use_file(self, file: int) -> None:
        self._file = file
        self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._finalizer = weakref.finalize(self, os.close, file)

    def share_file(self, path: str, name: str) -> None:
        """Use the file of another leader instead, if it can be opened.

        On another host, or in another container, the path may be that of another file.
        """
        with suppress(OSError):
            if f"memfd:{name} " in str(Path(path).readlink()):
                file = os.open(path, os.O_RDWR)
                self._finalizer()
                self._use_file(file)

    def read(self, fetch: Callable[[int], bytes]) -> bytes:
        """Return all changes that this leader has not read.

        Args:
            fetch: Returns the writer's changes without the given number of bytes at the start.
        """
        size = os.fstat(self._file).st_size
        count = max(0, size - self._position)  # The file is shorter if memory was full before.
        shared = os.pread(self._file, count, self._position)  # May be a part, of more than 2 GiB.
        start = self._position + len(shared)
        new = fetch(start)
        if start <= size:  # Otherwise, the file would have a gap.
            with suppress(OSError):
                os.pwrite(self._file, new, start)
        self._position = start + len(new)
        return shared + new


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
        self._received = received
        self.listeners: list[Callable[[Evaluation], None]] = []

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that were added, or changed, since the previous call."""
        if self._received is None:
            self._received = ReceivedChanges()
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
