"""Messages between a rank and its template or trainers, over a Unix socket.

A message is JSON, and its length precedes it. A message is never unpickled, since a trainer runs
code of the user, which may write any bytes to any descriptor.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_HEADER = struct.Struct("=IB")  # length of the JSON in bytes, number of file descriptors
_MAX_BYTES = 1 << 28
_MAX_DESCRIPTORS = 8
_CHUNK_BYTES = 1 << 16
_SECONDS_TO_SEND = 10.0


class ChannelClosed(Exception):  # noqa: N818 - that the other end has ended may be normal
    """The other end of a channel is closed, does not read, or sends invalid data."""


@dataclass(frozen=True)
class Message:
    """A message that has arrived through a channel."""

    kind: str
    content: Mapping[str, Any]
    descriptors: Sequence[int] = field(default=())
    """File descriptors that came with the message."""

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the item `name` of the content, or `default` if the item is missing."""
        return self.content.get(name, default)


class Channel:
    """One end of a channel between two processes.

    File descriptors that are sent stay open in this process. The receiver owns the file descriptors
    that it receives.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._inode = os.fstat(connection.fileno()).st_ino
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """Return the file descriptor to wait on."""
        return self._socket.fileno()

    def send(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        """Send a message of JSON values, with at most 8 file descriptors.

        Raises:
            ChannelClosed: The other end is closed, or has not read for 10 seconds.
        """
        payload = json.dumps([kind, content]).encode()
        data = memoryview(_HEADER.pack(len(payload), len(descriptors)) + payload)
        rights = []
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        give_up_at = time.monotonic() + _SECONDS_TO_SEND
        try:
            self._check_socket()
            while data:
                with suppress(BlockingIOError):
                    data = data[self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL) :]
                    rights = []
                    continue
                left = give_up_at - time.monotonic()
                if left <= 0 or not select.select([], [self._socket], [], left)[1]:
                    raise ChannelClosed(f"nothing was read for {_SECONDS_TO_SEND:g} s")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None if no complete message arrives in `timeout` seconds.

        Raises:
            ChannelClosed: The other end is closed, or has sent invalid data.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._take_message()
            if message is not None:
                return message
            try:
                self._check_socket()
                if self._read_socket():
                    continue
                left = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
                if not select.select([self._socket], [], [], left)[0]:
                    return None
            except (OSError, ValueError) as error:
                raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Close this end, and the descriptors that were received and not used."""
        with suppress(OSError):
            self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _check_socket(self) -> None:
        """Raise OSError if code of the user has closed the socket."""
        # Its descriptor may then belong to another file.
        if os.fstat(self._socket.fileno()).st_ino != self._inode:
            raise OSError("the descriptor of the connection was closed")

    def _read_socket(self) -> bool:
        """Read the available data without waiting; return false if no data are available."""
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, rights, flags, _ = self._socket.recvmsg(
                _CHUNK_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self._descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise ChannelClosed("file descriptors were lost: this process has too many open files")
        if not data:
            raise ChannelClosed("the other end is closed")
        self._buffer += data
        return True

    def _take_message(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, descriptors = _HEADER.unpack_from(self._buffer)
        if length > _MAX_BYTES or descriptors > _MAX_DESCRIPTORS:
            raise ChannelClosed("the other end has sent invalid data")
        if len(self._buffer) < _HEADER.size + length or len(self._descriptors) < descriptors:
            return None
        payload = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
        del self._buffer[: _HEADER.size + length]
        try:
            kind, content = json.loads(payload)
            return Message(
                str(kind),
                dict(content),
                tuple(self._descriptors.popleft() for _ in range(descriptors)),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ChannelClosed(f"the other end has sent invalid data: {error}") from error


def make_channel_pair() -> tuple[Channel, socket.socket]:
    """Return one end of a new channel, and the socket of its other end for another process."""
    own, other = socket.socketpair()
    return Channel(own), other
