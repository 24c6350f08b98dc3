"""File descriptors that objectives cannot use up: what they have done is mended with them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_RESERVED = 128  # a process group needs two for each peer, and some


class Reserve:
    """Keeps some descriptors from objectives.

    The system limits the numbers that new descriptors have. While an objective runs, the limit is as it was, or lower
    where it could not be raised; else it is higher by what is kept.
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
        """Keep them from an objective that runs meanwhile."""
        self._set(self._lent)
        try:
            yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Let the program have them; any thread."""
        self._set(self._all)

    def _set(self, limit: int) -> None:
        with suppress(OSError, ValueError):  # the system knows a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self._hard))
