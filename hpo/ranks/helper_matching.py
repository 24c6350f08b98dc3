"""How workers without work find others to help: messages between the leaders of a job's workers.

A worker that has nothing to do offers itself to others, and waits. One of them that can use it reserves it, which takes
no time: the worker is waiting then, or has withdrawn its offer. What it is reserved for may begin later, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hpo.process import clock
from hpo.ranks.communicator import SleepingComm, sleep_until


class HelperMatching:
    """A worker's part in this; made by all leaders together, whose ranks in `comm` are the numbers of their workers.

    A worker waits no longer for help to be wanted once `is_stopping()` is true. ``is_retired`` says whether this worker
    has no work of its own any more; it must not take any then, since others may leave.
    """

    def __init__(self, comm: SleepingComm, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.worker: int = comm.rank
        self._comm = comm
        self._is_stopping = is_stopping
        self._open_offers: dict[int, int] = {}  # offers of others that stand: their numbers, by worker
        self._offer_number = 0  # of this worker's last offer
        self._offered_to: set[int] = set()
        self._reserved_by: int | None = None
        self._task: Any = None
        self._answers: dict[int, bool] = {}  # of those that this worker is about to reserve
        self._have_all_retired: Callable[[], bool] = lambda: False
        self.is_retired = False

    # For a worker without work

    def retire(self) -> None:
        """Say that this worker will have no work of its own any more."""
        if not self.is_retired:
            self.is_retired = True
            self._have_all_retired = self._comm.enter_barrier()

    def wait_for_task(self, others: Iterable[int] | None = None, limit: float = math.inf) -> Any:
        """Offer this worker to others, or to all, and return what one of them wants it for.

        Returns None where none does within `limit` seconds, or if all workers have retired.
        """
        targets = set(range(self._comm.size) if others is None else others) - {self.worker}
        until = clock.now() + limit
        self._task = None
        self._send_offers(targets)

        def is_settled() -> bool:
            self._receive_messages()
            if self._reserved_by is not None:
                return False
            if not self._offered_to and self._task is None:  # it was reserved in vain
                self._send_offers(targets)
            is_late = clock.now() > until or (self._is_stopping() and not self.is_retired)
            return self._task is not None or is_late or self._have_all_retired()

        sleep_until(is_settled)
        self._withdraw_offers()
        return self._task

    def _send_offers(self, targets: Iterable[int]) -> None:
        self._offer_number += 1
        for worker in targets:
            self._send_message(worker, "offer", self._offer_number)
            self._offered_to.add(worker)

    def _withdraw_offers(self) -> None:
        for worker in self._offered_to:
            self._send_message(worker, "withdraw", self._offer_number)
        self._offered_to.clear()

    # For a worker with work

    def find_helpers(self) -> list[int]:
        """Return the workers that offer themselves, the nearest first."""
        self._receive_messages()
        return sorted(self._open_offers, key=lambda worker: (abs(worker - self.worker), worker))

    def reserve_helper(self, worker: int) -> bool:
        """Reserve a worker that has offered itself, and tell whether it still could be."""
        number = self._open_offers.pop(worker, None)
        if number is None:
            return False
        self._answers.pop(worker, None)
        self._send_message(worker, "reserve", number)

        def is_answered() -> bool:
            self._receive_messages()
            return worker in self._answers

        sleep_until(is_answered)  # it waits, or has withdrawn: its answer is on its way
        return self._answers.pop(worker)

    def send_task(self, workers: Iterable[int], what: Any) -> None:
        """Tell workers that are reserved what they are wanted for; None is that they are not."""
        for worker in workers:
            self._send_message(worker, "begin", what)

    def close(self) -> None:
        """Drop messages that are on their way; by all leaders together, once all have retired."""
        self._comm.drop_messages()

    def _receive_messages(self) -> None:
        while self._comm.iprobe():
            self._handle_message(*self._comm.recv())

    def _send_message(self, worker: int, kind: str, what: Any) -> None:
        self._comm.send((self.worker, kind, what), dest=worker)

    def _handle_message(self, worker: int, kind: str, what: Any) -> None:
        if kind == "offer":
            self._open_offers[worker] = what
        elif kind == "withdraw":
            self._answers[worker] = False
            if self._open_offers.get(worker) == what:
                del self._open_offers[worker]
        elif kind == "reserve" and what == self._offer_number and worker in self._offered_to:
            self._reserved_by = worker
            self._offered_to.discard(worker)
            self._withdraw_offers()
            self._send_message(worker, "accept", what)
        elif kind == "accept":
            self._answers[worker] = True
        elif kind == "begin":
            self._reserved_by, self._task = None, what
