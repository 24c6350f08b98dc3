"""Test the file in which leaders of a host share the changes that they have received."""

from __future__ import annotations

import random
from pathlib import Path

from hpo.store.study_client import ReceivedChanges

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
    other.share_file(first.path)
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


def test_leader_without_access_to_the_file_has_its_own() -> None:
    writer = Writer()
    first = ReceivedChanges()
    first.share_file("/proc/0/fd/0")
    second = ReceivedChanges()
    second.share_file("/nowhere")
    writer.count = 100
    assert first.read(writer.send) == second.read(writer.send) == CHANGES[:100]
    writer.count = 200
    assert second.read(writer.send) == CHANGES[100:200]
    assert writer.sent == [(0, 100), (0, 100), (100, 200)]


def test_full_memory_costs_only_traffic() -> None:
    writer = Writer()
    leader = ReceivedChanges()
    leader.share_file("/dev/full")  # Each write fails with ENOSPC.
    for count in (100, 250, 250, 300):
        start, writer.count = writer.count, count
        assert leader.read(writer.send) == CHANGES[start:count]


def test_file_is_closed_with_its_leader() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    first = ReceivedChanges()
    second = share(first)
    assert len(set(Path("/proc/self/fd").iterdir()) - before) == 2
    del first, second
    assert set(Path("/proc/self/fd").iterdir()) == before
