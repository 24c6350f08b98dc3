"""Calls from all ranks of a job to its first one, where a thread answers them while the rank computes."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mpi4py import MPI

from hpo.errors import DuplicateError
from hpo.process import clock
from hpo.ranks.communicator import SleepingComm, sleep_briefly, sleep_until

_CALL_TAG = 0  # the tag of calls; those of answers are higher
_MAX_TAGS = 32767  # that each MPI has at least

# Between two looks for calls where few come: each takes the lock of Python's threads from the main thread.
_MAX_SLEEP = 1e-2
_MAX_BATCH_CALLS = 64  # calls, before what they have told is settled


class RpcClient:
    """One rank's end of the calls, in a communicator of their own; any thread may call."""

    def __init__(self, comm: SleepingComm) -> None:
        self._comm = comm
        self._send_lock = threading.Lock()
        self._tags = itertools.cycle(range(_CALL_TAG + 1, _MAX_TAGS))

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a function by its name, and do not wait for it; calls of a rank are made in their order."""
        self._send_call(_CALL_TAG, name, arguments, options)

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Call a function by its name, wait for what it returns, and return that, or raise the KnownError it raised.

        Raises TimeoutError after `limit` seconds.
        """
        tag = self._send_call(None, name, arguments, options)
        if not sleep_until(lambda: bool(self._comm.iprobe(source=0, tag=tag)), limit):
            raise TimeoutError(f"no answer from the job's first rank in {limit:g} s")
        is_known, answer = self._comm.recv(source=0, tag=tag)
        if is_known:
            raise DuplicateError
        return answer

    def _send_call(self, tag: int | None, name: str, arguments: Any, options: Any) -> int:
        with self._send_lock:
            tag = next(self._tags) if tag is None else tag
            self._comm.send((tag, name, arguments, options), dest=0, tag=_CALL_TAG)
        return tag


class RpcServer:
    """Answers calls by `answer(name, *arguments)` inside ``with``, on the first rank, in a thread of its own.

    `settle()` is called whenever no more calls wait, and now and then where they always do. All of it is done inside
    `working`. `on_error` is called with the error where no more calls can be answered.
    """

    def __init__(
        self,
        comm: SleepingComm,
        answer: Callable[..., Any],
        settle: Callable[[], None],
        working: AbstractContextManager[object],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._comm = SleepingComm(comm)  # a handle of its own: this rank's own calls have another
        self._answer = answer
        self._settle = settle
        self._working = working
        self._on_error = on_error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="answering", daemon=True)

    def __enter__(self) -> RpcServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread; nobody calls any more. Where this is left by an error, the whole job ends soon."""
        self._closed.set()
        if kind is None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._working:
                self._answer_until_closed()
        except BaseException as error:
            self._on_error(error)

    def _answer_until_closed(self) -> None:
        called = clock.now()
        while True:
            is_last = self._closed.is_set()
            count = sum(itertools.takewhile(bool, (self._answer_next() for _ in range(_MAX_BATCH_CALLS))))
            self._settle()
            if count:
                called = clock.now()
            elif is_last:
                return
            else:
                sleep_briefly(clock.now() - called, _MAX_SLEEP)

    def _answer_next(self) -> bool:
        """Make the next call that has come, and tell whether there was one."""
        status = MPI.Status()
        message = self._comm.improbe(tag=_CALL_TAG, status=status)
        if message is None:
            return False
        request = message.irecv()
        tag, name, arguments, options = self._receive_call(request)
        try:
            answer = False, self._answer(name, *arguments, **options)
        except DuplicateError:
            answer = True, None
        if tag != _CALL_TAG:
            self._comm.send(answer, dest=status.Get_source(), tag=tag)
        return True

    def _receive_call(self, request: MPI.Request) -> Any:
        """Return what is being received; of a long message, the sender may have to go on, and this rank to connect."""
        found: list[Any] = []

        def is_here() -> bool:
            is_done, content = request.test()
            found.extend([content] if is_done else [])
            return bool(is_done)

        sleep_until(is_here)
        return found[0]
