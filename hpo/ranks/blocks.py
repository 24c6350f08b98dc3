"""Pickled objects for collectives: a block of fixed length, and the rest of a longer object.

Most objects fit into one block, so that one collective is enough. The length needs no collective of its own.
"""

from __future__ import annotations

import pickle
from typing import Any

BLOCK_BYTES = 1024
_LENGTH_BYTES = 8  # length of the pickle, at the start of the block
_PAYLOAD_BYTES = BLOCK_BYTES - _LENGTH_BYTES


def pack_object(obj: Any) -> tuple[bytearray, bytearray]:
    """Return the first block of a pickled object, and the rest of its pickle; the rest is empty if all fits."""
    payload = pickle.dumps(obj)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_PAYLOAD_BYTES]
    return bytearray(head.ljust(BLOCK_BYTES, b"\0")), bytearray(payload[_PAYLOAD_BYTES:])


def compute_rest_length(block: bytearray) -> int:
    """Return the number of bytes that follow a block."""
    return max(0, _read_length(block) - _PAYLOAD_BYTES)


def unpack_object(block: bytearray, rest: bytearray) -> Any:
    """Return the object from its block and the rest of its pickle."""
    return pickle.loads((block[_LENGTH_BYTES:] + rest)[: _read_length(block)])


def _read_length(block: bytearray) -> int:
    return int.from_bytes(block[:_LENGTH_BYTES], "little")
