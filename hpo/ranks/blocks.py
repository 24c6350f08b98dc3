"""Objects as ranks send them to all: in a block of one length, and the rest behind it.

Most objects fit into a block, and take one collective, without another one before it for the length.
"""

from __future__ import annotations

import pickle
from typing import Any

BLOCK_BYTES = 1024  # bytes
_LENGTH_BYTES = 8  # of these, at the beginning of a block
_PAYLOAD_BYTES = BLOCK_BYTES - _LENGTH_BYTES


def pack_object(obj: Any) -> tuple[bytearray, bytearray]:
    """Return an object as a block, and the rest of its pickle, empty if all fits."""
    payload = pickle.dumps(obj)
    head = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:_PAYLOAD_BYTES]
    return bytearray(head.ljust(BLOCK_BYTES, b"\0")), bytearray(payload[_PAYLOAD_BYTES:])


def compute_rest_length(block: bytearray) -> int:
    """Return the length of what is behind a block."""
    return max(0, _read_length(block) - _PAYLOAD_BYTES)


def unpack_object(block: bytearray, rest: bytearray) -> Any:
    """Return the object in a block, and in what is behind it."""
    return pickle.loads((block[_LENGTH_BYTES:] + rest)[: _read_length(block)])


def _read_length(block: bytearray) -> int:
    return int.from_bytes(block[:_LENGTH_BYTES], "little")
