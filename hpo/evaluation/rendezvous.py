"""Where the ranks of a process group find each other: torch's store, in which a rank that waits can be interrupted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hpo.process import clock
from hpo.ranks.communicator import GAVE_UP, sleep_until

_ALWAYS = timedelta(days=365)


class Rendezvous(Store):
    """Another store's contents, for which a rank waits in Python, where signals can interrupt it.

    A rank that makes a process group with ``torch.distributed.new_group``, or a device mesh, waits for its peers here;
    in torch's own store it waits in native code, which nothing interrupts. A rank that has waited for a key for
    ``patience`` seconds raises TimeoutError, even if it asks again and again, as torch's barrier behind each new group
    does.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.patience = math.inf
        self._store = store
        self._waits_since: dict[str, float] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Set what a key holds."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key, and return what it holds."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds, and return the sum."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these keys hold something."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set what a key holds if it holds what is expected."""
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._store.delete_key(key)

    def wait(self, keys: Sequence[str], timeout: timedelta = _ALWAYS) -> None:
        """Wait until all of these keys hold something; raises RuntimeError after `timeout`, as torch's stores do."""
        about = " ".join(keys)
        since = self._waits_since.setdefault(about, clock.now())
        left = since + self.patience - clock.now()
        if not sleep_until(self._holds(keys), min(left, timeout.total_seconds())):
            if timeout.total_seconds() < left:
                raise RuntimeError(f"wait timeout after {timeout}, keys: {about}")  # as torch's own
            raise TimeoutError(f"{GAVE_UP} {self.patience:g} s for ranks that make the same process group")
        del self._waits_since[about]

    def _holds(self, keys: Sequence[str]) -> Callable[[], bool]:
        return lambda: self._store.check(list(keys))
