"""Match idle workers to workers that can use their help, by messages between the leaders (first ranks) of the workers.

An idle worker offers its help to other workers, and waits. A worker that wants the help reserves it, and receives an
answer at once: the idle worker accepts, or has withdrawn its offer before. The task of a reserved worker may begin
later, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from hpo.process import clock
from hpo.ranks.communicator import SleepingComm, sleep_until


class HelperMatching:
    """Exchanges offers of help between one leader (first rank of a worker) and the others.

    Collective: create it on all leaders.

    Args:
        comm: Communicator of the leaders; ranks in it are the numbers of their workers.
        is_stopping: Returns whether the run stops. Then a worker no longer waits for a task.

    Attributes:
        worker: Number of this worker.
        is_retired: Whether this worker has announced that it has no more work of its own. Then it must not claim new
            work, since other leaders may exit.
    """

    def __init__(self, comm: SleepingComm, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.worker: int = comm.rank
        self._comm = comm
        self._is_stopping = is_stopping
        self._open_offers: dict[int, int] = {}  # numbers of the open offers of other workers, by worker
        self._offer_number = 0  # number of this worker's last offer
        self._offered_to: set[int] = set()
        self._reserved_by: int | None = None
        self._task: Any = None
        self._answers: dict[int, bool] = {}  # answers of workers that this one wants to reserve
        self._have_all_retired: Callable[[], bool] = lambda: False
        self.is_retired = False

    # For a worker without work

    def retire(self) -> None:
        """Announce to all leaders that this worker has no more work of its own."""
        if not self.is_retired:
            self.is_retired = True
            self._have_all_retired = self._comm.enter_barrier()

    def wait_for_task(self, others: Iterable[int] | None = None, limit: float = math.inf) -> Any:
        """Offer the help of this worker to other workers, and return the task that one of them sends.

        Args:
            others: Numbers of the workers that receive the offer; all if None.
            limit: Maximum seconds to wait.

        Returns:
            The task. None if no task comes in time, or all workers have retired.
        """
        targets = set(range(self._comm.size) if others is None else others) - {self.worker}
        until = clock.now() + limit
        self._task = None
        self._send_offers(targets)

        def is_settled() -> bool:
            self._receive_messages()
            if self._reserved_by is not None:
                return False
            if not self._offered_to and self._task is None:  # The reserving worker has released it.
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
        """Return the numbers of the workers that offer their help, the nearest to this worker's number first."""
        self._receive_messages()
        return sorted(self._open_offers, key=lambda worker: (abs(worker - self.worker), worker))

    def reserve_helper(self, worker: int) -> bool:
        """Reserve a worker that has offered its help; return false if it has withdrawn its offer."""
        number = self._open_offers.pop(worker, None)
        if number is None:
            return False
        self._answers.pop(worker, None)
        self._send_message(worker, "reserve", number)

        def is_answered() -> bool:
            self._receive_messages()
            return worker in self._answers

        sleep_until(is_answered)  # It answers soon: it waits, or has withdrawn its offer.
        return self._answers.pop(worker)

    def send_task(self, workers: Iterable[int], task: Any) -> None:
        """Send a task to reserved workers. The task None releases them."""
        for worker in workers:
            self._send_message(worker, "begin", task)

    def close(self) -> None:
        """Drop pending messages. Collective: call on all leaders after all have retired."""
        self._comm.drop_messages()

    def _receive_messages(self) -> None:
        while self._comm.iprobe():
            self._handle_message(*self._comm.recv())

    def _send_message(self, worker: int, kind: str, content: Any) -> None:
        self._comm.send((self.worker, kind, content), dest=worker)

    def _handle_message(self, worker: int, kind: str, content: Any) -> None:
        if kind == "offer":
            self._open_offers[worker] = content
        elif kind == "withdraw":
            self._answers[worker] = False
            if self._open_offers.get(worker) == content:
                del self._open_offers[worker]
        elif kind == "reserve" and content == self._offer_number and worker in self._offered_to:
            self._reserved_by = worker
            self._offered_to.discard(worker)
            self._withdraw_offers()
            self._send_message(worker, "accept", content)
        elif kind == "accept":
            self._answers[worker] = True
        elif kind == "begin":
            self._reserved_by, self._task = None, content
