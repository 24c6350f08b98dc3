"""Test channels between processes whose other end is closed, slow, or used by user code."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpo.process import channel as channels
from hpo.process.channel import Channel, ChannelClosed, Message, make_channel_pair
from tests.support.limits import scale


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Yield both ends of a channel."""
    own, other = make_channel_pair()
    theirs = Channel(other)
    yield own, theirs
    own.close()
    theirs.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """Yield one end of a channel, and the socket of the other end, for any bytes."""
    own, other = make_channel_pair()
    yield own, other
    own.close()
    other.close()


def frame(payload: bytes, descriptors: int = 0) -> bytes:
    return struct.pack("=IB", len(payload), descriptors) + payload


def test_channel_delivers_messages_in_order(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    contents: list[dict[str, Any]] = [
        {},
        {"a": [1, 2.5, None, True], "text": "\N{PILE OF POO}\0\n"},
        {"loss": float("inf")},
    ]
    for number, content in enumerate(contents):
        own.send(f"kind {number}", **content)
    own.send("step", kind="a field may have this name")
    received = [theirs.receive(5) for _ in range(4)]
    assert received[:3] == [
        Message(f"kind {number}", content) for number, content in enumerate(contents)
    ]
    assert received[3] is not None
    assert (received[3].kind, received[3]["kind"]) == ("step", "a field may have this name")
    assert received[3].get("none") is None
    assert theirs.receive(0) is None
    theirs.send("answer")
    assert own.receive(5) == Message("answer", {})


def test_channel_delivers_descriptors_with_their_message(
    pair: tuple[Channel, Channel], tmp_path: Path
) -> None:
    own, theirs = pair
    files = [(tmp_path / str(number)).open("w+") for number in range(5)]
    for number, file in enumerate(files):
        file.write(f"file {number}")
        file.flush()
    own.send("none")
    own.send("two", [file.fileno() for file in files[:2]])
    own.send("none again")
    own.send("three", [file.fileno() for file in files[2:]])
    found: list[int] = []
    for kind, count in {"none": 0, "two": 2, "none again": 0, "three": 3}.items():
        message = theirs.receive(5)
        assert message is not None
        assert (message.kind, len(message.descriptors)) == (kind, count)
        found += message.descriptors
    assert [os.pread(number, 100, 0).decode() for number in found] == [
        f"file {number}" for number in range(5)
    ]
    assert not any(map(os.get_inheritable, found)), "child programs do not inherit them"
    for number in found:
        os.close(number)
    for file in files:
        file.close()


def test_channel_closes_unused_descriptors(raw: tuple[Channel, socket.socket]) -> None:
    own, other = raw
    read, write = os.pipe()
    socket.send_fds(other, [frame(b'["kind", {}]', 1)[:6]], [write])
    assert own.receive(0.1) is None, "the message is incomplete"
    os.close(write)
    own.close()
    assert os.read(read, 1) == b"", "no process has the other end"
    os.close(read)


def test_channel_joins_partial_frames(raw: tuple[Channel, socket.socket]) -> None:
    own, other = raw
    content = {"text": "x" * 100}
    for byte in frame(json.dumps(["slow", content]).encode()) + frame(b'["next", {}]'):
        assert own.receive(0) in (None, Message("slow", content))
        other.send(bytes([byte]))
    assert own.receive(5) == Message("next", {})


def test_channel_delivers_more_than_socket_buffer(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    content = {"much": "x" * 20_000_000}
    sending = threading.Thread(target=own.send, args=("kind",), kwargs=content)
    sending.start()
    assert theirs.receive(30) == Message("kind", content)
    sending.join(10)


def test_channel_closed_at_other_end_raises(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    theirs.send("last words")
    theirs.close()
    assert own.receive(None) == Message("last words", {})
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="the other end is closed"):
            own.receive(None)
    with pytest.raises(ChannelClosed):
        own.send("kind")
    own.close()
    with pytest.raises(ChannelClosed):
        own.receive(0)
    with pytest.raises(ChannelClosed):
        own.send("kind")


def test_channel_closed_inside_frame_raises(raw: tuple[Channel, socket.socket]) -> None:
    own, other = raw
    other.send(frame(b'["kind", {}]')[:-1])
    assert own.receive(0.05) is None
    other.close()
    with pytest.raises(ChannelClosed, match="the other end is closed"):
        own.receive(None)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"hello world",
        b"\x80\x04\x95",
        b'"text"',
        b"[]",
        b'["kind"]',
        b'["kind", 5]',
        b'["kind", {}, 1]',
        b'["kind", [1, 2]]',
        b"\xff\xfe",
        b"[" * 100_000,
        b'["kind", {"a": ' + b"9" * 5000 + b"}]",
    ],
)
def test_channel_with_invalid_data_raises(
    raw: tuple[Channel, socket.socket], payload: bytes
) -> None:
    own, other = raw
    other.sendall(frame(payload))
    with pytest.raises(ChannelClosed, match="the other end has sent invalid data"):
        own.receive(5)


@pytest.mark.parametrize(
    "header", [b"\xff" * 5, struct.pack("=IB", (1 << 28) + 1, 0), struct.pack("=IB", 2, 9)]
)
def test_channel_with_huge_length_raises_at_once(
    raw: tuple[Channel, socket.socket], header: bytes
) -> None:
    own, other = raw
    other.send(header)
    with pytest.raises(ChannelClosed, match="the other end has sent invalid data"):
        own.receive(None)


def test_channel_without_a_reader_gives_up(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = pair
    monkeypatch.setattr(channels, "_SECONDS_TO_SEND", 0.3)
    started = time.monotonic()
    with pytest.raises(ChannelClosed, match=r"nothing was read for 0\.3 s"):
        own.send("kind", much="x" * 20_000_000)
    assert 0.3 <= time.monotonic() - started < scale(5)
    assert theirs.receive(0) is None, "an incomplete message is not delivered"


def test_channel_whose_descriptor_was_reused_raises(tmp_path: Path) -> None:
    """User code closes the connection. Then it opens a file, which gets the same descriptor."""
    own, other = make_channel_pair()
    theirs = Channel(other)
    theirs.send("kind")
    os.close(own.fileno())
    with (tmp_path / "file").open("w+") as file:
        reused = os.dup2(file.fileno(), own.fileno())
        with pytest.raises(ChannelClosed, match="was closed"):
            own.receive(1)
        with pytest.raises(ChannelClosed, match="was closed"):
            own.send("kind")
        assert (tmp_path / "file").read_text() == ""
        os.fstat(reused)
    own.close()
    theirs.close()


def test_channel_waits_until_timeout(pair: tuple[Channel, Channel]) -> None:
    own, theirs = pair
    started = time.monotonic()
    assert own.receive(0.2) is None
    assert 0.2 <= time.monotonic() - started < scale(2)
    later = threading.Timer(0.2, theirs.send, ["late"])
    later.start()
    assert own.receive(None) == Message("late", {})
    later.join()


def test_channel_that_loses_descriptors_raises(
    raw: tuple[Channel, socket.socket], tmp_path: Path
) -> None:
    """The operating system drops sent descriptors if the receiver has no free descriptor number."""
    own, other = raw
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with (tmp_path / "file").open("w") as file:
        socket.send_fds(other, [frame(b'["kind", {}]', 1)], [file.fileno()])
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(file.fileno()))
            with pytest.raises(ChannelClosed, match="too many open files"):
                own.receive(5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in taken:
                os.close(number)
