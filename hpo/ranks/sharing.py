"""The data that a search prepares: one copy per host, which each evaluation gets as it was prepared."""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import re
import socket
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpo.errors import UsageError
from hpo.process.leaving import is_alive
from hpo.ranks.communicator import SleepingComm

_ALIGNMENT = 64
_MOST_MAPPED = 16  # each has a descriptor; those of past evaluations live as long as reference cycles hold them


class Shared:
    """An object of a host's first rank, for all ranks of the host; made by all of them together.

    The object is pickled and sent, but the contents of its numpy arrays and torch tensors (the buffers that pickle's
    protocol 5 leaves out) are mapped from one file. The file is unlinked once all ranks have opened it, so that the
    system frees it with the last process, however that ends.

    Raises UsageError on all ranks of the host where the object cannot be pickled, or the file not written.
    """

    def __init__(self, obj: Any, host: SleepingComm) -> None:
        self._mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        path, self._spans, self._payload, failure = host.bcast(_write(obj) if host.rank == 0 else None)
        if failure is not None:
            raise failure
        try:
            self._file = Path(path).open("rb") if self._spans else None  # noqa: SIM115 - closed when this is left
        finally:
            host.barrier()
            if host.rank == 0 and path:
                Path(path).unlink()

    def __enter__(self) -> Shared:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def load(self) -> Any:
        """Return a new copy of the object, as it was prepared; changes to it, or to its arrays, change this copy only.

        The arrays are mapped, not copied: pages are shared with all ranks and all other evaluations until somebody
        writes to them.
        """
        if self._file is None:
            return pickle.loads(self._payload)
        # Private and writable: torch warns of read-only arrays, and writing to read-only pages would end the process.
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._mapped.add(mapped)
        if len(self._mapped) > _MOST_MAPPED:
            gc.collect()
        view = memoryview(mapped)
        return pickle.loads(self._payload, buffers=[view[start:end] for start, end in self._spans])


class _Pickler(pickle.Pickler):
    """Leaves the contents of tensors out of the pickle, as numpy's arrays do by themselves."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.requires_grad or obj.numel() < 2:
            return NotImplemented
        if obj.device.type != "cpu" or obj.layout != torch.strided or obj.is_quantized or obj.__dict__:
            return NotImplemented
        plain = obj.resolve_conj().resolve_neg()
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)  # such as channels last
        dense = plain.permute(order).contiguous().view(-1)
        if dense.stride(0) != 1:
            return NotImplemented
        dtype = str(obj.dtype).removeprefix("torch.")
        return _tensor, (pickle.PickleBuffer(dense.view(torch.uint8).numpy()), dtype, tuple(obj.shape), order)


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...], order: Sequence[int]) -> Any:
    import torch

    flat = torch.frombuffer(buffer, dtype=torch.uint8).view(getattr(torch, dtype))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.reshape([shape[place] for place in order]).permute(inverse)


def temporary_file() -> tuple[int, str]:
    """Make a file on this host, and return its descriptor and path; another run removes it if this one is killed."""
    return tempfile.mkstemp(prefix=f"{_prefix()}{os.getpid()}-")


def _prefix() -> str:
    return f"hpo-{socket.gethostname()}-"


def _remove_those_of_the_dead() -> None:
    """Remove the files of processes that were killed before all ranks had opened them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        process = re.match(r"(\d{1,9})-", path.name.removeprefix(_prefix()))
        if process and not is_alive(int(process[1])):
            with suppress(OSError):  # another user's
                path.unlink()


def _write(obj: Any) -> tuple[str, Sequence[tuple[int, int]], bytes, UsageError | None]:
    buffers: list[pickle.PickleBuffer] = []
    payload = io.BytesIO()
    try:
        _Pickler(payload, protocol=5, buffer_callback=buffers.append).dump(obj)
        pickle.loads(payload.getvalue(), buffers=buffers)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        mistake = UsageError(
            f"what prepare returned cannot be copied for each evaluation ({reason}): return arrays, tensors and plain "
            "values, and open files in the objective"
        )
        return "", [], b"", mistake
    if not buffers:
        return "", [], payload.getvalue(), None
    spans = []
    _remove_those_of_the_dead()
    handle, path = temporary_file()
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
    return path, spans, payload.getvalue(), None
