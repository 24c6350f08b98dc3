"""Pack Python objects for collectives (calls by which all ranks exchange data).

A packed object is a block of fixed length, and a rest if the object is longer. Most objects fit into the block, so that
one collective is enough. The block contains the length, so that the length needs no collective of its own.
"""

from __future__ import annotations

import pickle
from typing import Any

BLOCK_BYTES = 1024
_LENGTH_BYTES = 8  # length of the pickle, at the start of the block
_PAYLOAD_BYTES = BLOCK_BYTES - _LENGTH_BYTES


def pack_object(obj: Any) -> tuple[bytearray, bytearray]:
    """Return the block of an object, and the rest of its pickled bytes. The rest is empty if the object fits."""
    payload = pickle.dumps(obj)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_PAYLOAD_BYTES]
    return bytearray(head.ljust(BLOCK_BYTES, b"\0")), bytearray(payload[_PAYLOAD_BYTES:])


def compute_rest_length(block: bytearray) -> int:
    """Return the length in bytes of the rest that belongs to a block; 0 if the object fits into the block."""
    return max(0, _read_length(block) - _PAYLOAD_BYTES)


def unpack_object(block: bytearray, rest: bytearray) -> Any:
    """Return the object that `pack_object` has packed."""
    return pickle.loads((block[_LENGTH_BYTES:] + rest)[: _read_length(block)])


def _read_length(block: bytearray) -> int:
    return int.from_bytes(block[:_LENGTH_BYTES], "little")
