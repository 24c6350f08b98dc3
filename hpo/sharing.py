"""One copy of large arrays per host, whatever the number of ranks on it."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpo.communicator import SleepingComm
from hpo.errors import UsageError

_ALIGNMENT = 64


def share(obj: Any, host: SleepingComm) -> Any:
    """Give all ranks of a host the object of its first rank; collective over the host.

    The object is pickled and sent, but its numpy arrays (the buffers that pickle's protocol 5 leaves out) are mapped
    from one file, which has no name any more when this returns: the system frees it with the last process, however that
    ends. Every rank may write to its arrays; what it writes is its own.

    Raises UsageError on all ranks of the host where that cannot be done.
    """
    if host.size == 1:
        return obj
    path, spans, payload, failure = host.bcast(_write(obj) if host.rank == 0 else None)
    if failure is not None:
        raise failure
    try:
        with Path(path).open("rb") as file:
            # Private and writable: torch warns of read-only arrays, and pages are shared until somebody writes.
            whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    finally:
        host.barrier()
        if host.rank == 0:
            Path(path).unlink()
    view = memoryview(whole)
    return pickle.loads(payload, buffers=[view[start:end] for start, end in spans])


def _write(obj: Any) -> tuple[str, Sequence[tuple[int, int]], bytes, UsageError | None]:
    buffers: list[pickle.PickleBuffer] = []
    try:
        payload = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        return "", [], b"", UsageError(f"what prepare returned cannot be given to other ranks: {error}")
    spans = []
    handle, path = tempfile.mkstemp(prefix="hpo-")
    with os.fdopen(handle, "wb") as file:
        try:
            file.write(b"\0")  # an empty file cannot be mapped
            for buffer in buffers:
                start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                file.write(buffer.raw())
                spans.append((start, file.tell()))
            file.flush()
        except OSError as error:
            Path(path).unlink()
            full = UsageError(f"no room for the data: {path}: {error.strerror}; TMPDIR=FOLDER names another place")
            return path, [], b"", full
    return path, spans, payload, None
