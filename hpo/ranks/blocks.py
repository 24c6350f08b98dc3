"""Objects as ranks send them to all: in a block of one length, and the rest behind it.

Most objects fit into a block, and take one collective, without another one before it for the length.
"""

from __future__ import annotations

import pickle
from typing import Any

BLOCK = 1024  # bytes
_LENGTH = 8  # of these, at the beginning of a block
_ROOM = BLOCK - _LENGTH


def packed(obj: Any) -> tuple[bytearray, bytearray]:
    """Return an object as a block, and the rest of its pickle, empty if all fits."""
    payload = pickle.dumps(obj)
    head = len(payload).to_bytes(_LENGTH, "little") + payload[:_ROOM]
    return bytearray(head.ljust(BLOCK, b"\0")), bytearray(payload[_ROOM:])


def left(block: bytearray) -> int:
    """Return the length of what is behind a block."""
    return max(0, _length(block) - _ROOM)


def unpacked(block: bytearray, rest: bytearray) -> Any:
    """Return the object in a block, and in what is behind it."""
    return pickle.loads((block[_LENGTH:] + rest)[: _length(block)])


def _length(block: bytearray) -> int:
    return int.from_bytes(block[:_LENGTH], "little")
