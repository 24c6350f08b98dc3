"""File descriptors that objectives cannot use up: the program needs them to clean up after an objective."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_RESERVED = 128  # a process group needs two for each peer, and some more


class Reserve:
    """Keeps some descriptors from objectives.

    The system limits the number of descriptors. At all times but while an objective runs, this limit is raised by the
    descriptors that are kept. Where it cannot be raised so far, it is lowered while an objective runs.
    """

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        kept = min(_RESERVED, soft // 4)
        top = soft + kept if hard == resource.RLIM_INFINITY else min(soft + kept, hard)
        self._hard = hard
        self._all, self._lent = top, top - kept
        self.take_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Keep the descriptors from an objective that runs inside ``with``."""
        self._set(self._lent)
        try:
            yield
        finally:
            self.take_back()

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Let the program have the descriptors inside ``with``, where an objective to which they are lent calls it."""
        self.take_back()
        try:
            yield
        finally:
            self._set(self._lent)

    def take_back(self) -> None:
        """Let the program have the descriptors; may be called from any thread."""
        self._set(self._all)

    def _set(self, limit: int) -> None:
        with suppress(OSError, ValueError):  # the system has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self._hard))
