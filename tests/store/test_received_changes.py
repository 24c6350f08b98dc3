"""Test the file in which leaders of a host share the changes that they have received."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from hpo.store.study_client import ReceivedChanges
from tests.support.chaos import list_open_files

CHANGES = bytes(random.Random(0).randbytes(5000))


class Writer:
    """Has changes, and notes which of them it has sent."""

    def __init__(self) -> None:
        self.count = 0
        self.sent: list[tuple[int, int]] = []

    def send(self, start: int) -> bytes:
        """Return the changes from the byte `start` on."""
        self.sent.append((start, self.count))
        return CHANGES[start : self.count]


def share(first: ReceivedChanges) -> ReceivedChanges:
    """Return another leader of the host of `first`."""
    other = ReceivedChanges()
    other.share_file(first.path, first.name)
    return other


def test_changes_are_sent_once_to_a_host() -> None:
    writer = Writer()
    first = ReceivedChanges()
    second, third = share(first), share(first)
    writer.count = 100
    assert first.read(writer.send) == CHANGES[:100]
    assert second.read(writer.send) == CHANGES[:100]
    writer.count = 150
    assert second.read(writer.send) == CHANGES[100:150]
    assert first.read(writer.send) == CHANGES[100:150]
    assert third.read(writer.send) == CHANGES[:150]
    assert third.read(writer.send) == b""
    assert writer.sent == [(0, 100), (100, 100), (100, 150), (150, 150), (150, 150), (150, 150)]


def test_leaders_that_receive_the_same_changes_at_once_lose_none() -> None:
    writer = Writer()
    writer.count = 100
    first = ReceivedChanges()
    second = share(first)
    by_second = b""

    def send_late(start: int) -> bytes:
        """Answer the first leader with older changes than the second one, which asks later."""
        nonlocal by_second
        content = writer.send(start)
        writer.count = 300
        by_second = second.read(writer.send)
        return content

    by_first = first.read(send_late)
    assert (by_first, by_second) == (CHANGES[:100], CHANGES[:300])
    assert first.read(writer.send) == CHANGES[100:300]
    assert writer.sent == [(0, 100), (0, 300), (300, 300)]


def test_leaders_read_all_changes_in_any_order() -> None:
    writer = Writer()
    rng = random.Random(1)
    leaders = [ReceivedChanges()]
    leaders += [share(leaders[0]) for _ in range(3)]
    read = dict.fromkeys(leaders, b"")

    def send(start: int) -> bytes:
        writer.count = min(len(CHANGES), writer.count + rng.randrange(40))
        content = writer.send(start)
        if rng.random() < 0.4:
            advance()
        return content

    def advance() -> None:
        busy.append(leader := rng.choice([one for one in leaders if one not in busy] or [None]))
        if leader is not None:
            read[leader] += leader.read(send)
        busy.pop()

    busy: list[ReceivedChanges | None] = []
    while writer.count < len(CHANGES):
        advance()
    for leader in leaders:
        assert read[leader] + leader.read(writer.send) == CHANGES


def test_leader_without_access_to_the_file_has_its_own(tmp_path: Path) -> None:
    writer = Writer()
    other = tmp_path / "file"
    other.write_text("of the user")
    first, second, third = ReceivedChanges(), ReceivedChanges(), ReceivedChanges()
    second.share_file("/proc/0/fd/0", first.name)
    with other.open("r+") as file:
        third.share_file(f"/proc/self/fd/{file.fileno()}", first.name)
        writer.count = 100
        for leader in (first, second, third):
            assert leader.read(writer.send) == CHANGES[:100]
    writer.count = 200
    assert second.read(writer.send) == CHANGES[100:200]
    assert writer.sent == [(0, 100), (0, 100), (0, 100), (100, 200)]
    assert other.read_text() == "of the user"


def test_leaders_lose_nothing_if_memory_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    first = ReceivedChanges()
    second, third = share(first), share(first)

    def write_part(file: int, content: bytes, start: int) -> int:
        return write(file, content[:30], start)

    def write_nothing(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    write = os.pwrite
    for writes in (write_part, write_nothing, write):
        writer.count += 100
        monkeypatch.setattr(os, "pwrite", writes)
        assert first.read(writer.send) == CHANGES[writer.count - 100 : writer.count]
    # After the first leader, the file has 30 of 300 bytes.
    assert writer.sent == [(0, 100), (100, 200), (200, 300)]
    assert second.read(writer.send) == CHANGES[:300]
    assert third.read(writer.send) == CHANGES[:300]
    assert writer.sent[3:] == [(30, 300), (300, 300)]


def test_leaders_lose_nothing_if_a_part_of_the_file_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux reads at most 2 GiB at a time."""
    writer = Writer()
    writer.count = 300
    first = ReceivedChanges()
    second = share(first)
    assert first.read(writer.send) == CHANGES[:300]
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, start: read(file, min(count, 70), start))
    assert second.read(writer.send) == CHANGES[:300]
    assert writer.sent == [(0, 300), (70, 300)]


def count_open_files(name: str) -> int:
    return sum(name in file for file in list_open_files(os.getpid()))


def test_file_is_closed_with_its_leader() -> None:
    first, second = ReceivedChanges(), ReceivedChanges()
    names = (first.name, second.name)
    assert [count_open_files(name) for name in names] == [1, 1]
    second.share_file(first.path, first.name)
    assert [count_open_files(name) for name in names] == [2, 0]
    del second
    assert [count_open_files(name) for name in names] == [1, 0]
    del first
    assert [count_open_files(name) for name in names] == [0, 0]
