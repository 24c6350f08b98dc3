"""Share the data that the user's `prepare` returns among all trainers of a host.

There is one copy in memory. Each evaluation gets the original data, even if an earlier evaluation
has changed its copy.
"""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
# Each has a descriptor, and reference cycles may keep those of past evaluations.
_MAX_MAPPINGS = 16


class SharedData:
    """Reads an object that `pack_data` has written to a file; None if the descriptor is -1.

    Pickle's protocol 5 stores the contents of numpy arrays and torch tensors in separate
    (out-of-band) buffers. These buffers are mapped from the file, not copied.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def load(self) -> Any:
        """Return a new copy of the object, which may be changed.

        All trainers and evaluations share the memory of arrays. A page is copied only when it is
        written to.
        """
        if self._descriptor < 0:
            return None
        # The mapping is private and writable: torch warns of read-only arrays, and a write would
        # crash the process.
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        self._mappings.add(mapped)
        if len(self._mappings) > _MAX_MAPPINGS:
            gc.collect()
        view = memoryview(mapped)
        payload, *spans = json.loads(bytes(view[int.from_bytes(view[:_ALIGNMENT], "little") :]))
        return pickle.loads(view[slice(*payload)], buffers=[view[slice(*span)] for span in spans])


def pack_data(obj: Any) -> int:
    """Write an object to a temporary file without a name, and return the file descriptor.

    Raises the exceptions of pickle, and OSError if the disk is full.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _TensorPickler(stream, protocol=5, buffer_callback=buffers.append).dump(obj)
    payload = stream.getvalue()
    pickle.loads(payload, buffers=buffers)  # Some objects can be pickled, but not unpickled.
    spans = []
    with tempfile.TemporaryFile() as file:
        for part in (memoryview(payload), *(buffer.raw() for buffer in buffers)):
            begin = -(-max(file.tell(), 1) // _ALIGNMENT) * _ALIGNMENT
            file.seek(begin)
            file.write(part)
            spans.append((begin, begin + part.nbytes))
        table = file.tell()
        file.write(json.dumps(spans).encode())
        file.seek(0)
        file.write(table.to_bytes(_ALIGNMENT, "little"))
        file.flush()
        return os.dup(file.fileno())


class _TensorPickler(pickle.Pickler):
    """Writes the contents of tensors to out-of-band buffers, as pickle does for numpy arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            text = f"a tensor on {obj.device}, which all trainers would copy to this device"
            raise TypeError(text)
        if type(obj) is not Tensor or obj.requires_grad or obj.numel() < 2:
            return NotImplemented
        is_plain = obj.device.type == "cpu" and obj.layout == torch.strided
        if not is_plain or obj.is_quantized or obj.__dict__:
            return NotImplemented
        plain = obj.resolve_conj().resolve_neg()
        # This keeps formats such as channels-last.
        order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
        dense = plain.permute(order).contiguous().view(-1)
        if dense.stride(0) != 1:
            return NotImplemented
        dtype = str(obj.dtype).removeprefix("torch.")
        return _build_tensor, (
            pickle.PickleBuffer(dense.view(torch.uint8).numpy()),
            dtype,
            tuple(obj.shape),
            order,
        )


def _build_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], order: Sequence[int]) -> Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.uint8).view(getattr(torch, dtype))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return flat.reshape([shape[index] for index in order]).permute(inverse)
