"""Remote procedure calls from all ranks of a job to a thread of its first rank."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from hpo.errors import DuplicateError
from hpo.process import clock
from hpo.ranks.communicator import SleepingComm, sleep_briefly

_CALL_TAG = 0  # tag of calls; the tags of answers are higher
_MAX_TAGS = 32767  # the minimum that MPI guarantees

# Seconds between two checks for calls. Each check takes Python's global interpreter lock from the
# main thread.
_MAX_SLEEP = 1e-2
_MAX_BATCH_CALLS = 64  # number of calls that are answered together


class RpcClient:
    """Calls functions on the first rank of the job, from any thread of any rank.

    Args:
        comm: Communicator that is used for calls alone.
    """

    def __init__(self, comm: SleepingComm) -> None:
        self._comm = comm
        self._send_lock = threading.Lock()
        self._tags = itertools.cycle(range(_CALL_TAG + 1, _MAX_TAGS))

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call a function by its name, without waiting. Calls of a rank are answered in order."""
        self._send_call(_CALL_TAG, name, arguments, options)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a function by its name, and return its result, or raise its DuplicateError."""
        tag = self._send_call(None, name, arguments, options)
        # If the first rank ends, so does the job.
        is_known, answer = self._comm.recv(source=0, tag=tag)
        if is_known:
            raise DuplicateError
        return answer

    def _send_call(self, tag: int | None, name: str, arguments: Any, options: Any) -> int:
        with self._send_lock:
            tag = next(self._tags) if tag is None else tag
            self._comm.send((tag, name, arguments, options), dest=0, tag=_CALL_TAG)
        return tag


class _Call(NamedTuple):
    """A call of a function by a rank."""

    source: int
    tag: int
    """Tag of the answer; `_CALL_TAG` if the caller does not wait for one."""
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class RpcServer:
    """Answers the calls of all ranks inside `with`, in a separate thread of the first rank.

    Args:
        comm: Communicator that is used for calls alone.
        answer: Called as `answer(name, *arguments, **options)` for each call.
        settle: Completes the work of a batch of calls, such as a commit. Called before their
            answers are sent, and repeatedly while no call is pending.
        working: Context manager in which the thread answers calls.
        on_error: Called with the error if calls can no longer be answered.
    """

    def __init__(
        self,
        comm: SleepingComm,
        answer: Callable[..., Any],
        settle: Callable[[], None],
        working: AbstractContextManager[object],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._comm = SleepingComm(comm)  # The calls of this rank use another handle.
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
        """End the thread after it has answered all pending calls.

        After an error, do not wait for the thread, since the job ends soon.
        """
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
        last_call_at = clock.now()
        while True:
            is_last = self._closed.is_set()
            calls = self._receive_calls()
            answers = [(call, self._compute_answer(call)) for call in calls]
            self._settle()
            for call, answer in answers:
                if call.tag != _CALL_TAG:
                    self._comm.send(answer, dest=call.source, tag=call.tag)
            if calls:
                last_call_at = clock.now()
            elif is_last:
                return
            else:
                sleep_briefly(clock.now() - last_call_at, _MAX_SLEEP)

    def _receive_calls(self) -> list[_Call]:
        """Return the pending calls, at most a batch."""
        calls: list[_Call] = []
        while len(calls) < _MAX_BATCH_CALLS:
            received = self._comm.receive_pending(_CALL_TAG)
            if received is None:
                break
            content, source = received
            calls.append(_Call(source, *content))
        return calls

    def _compute_answer(self, call: _Call) -> tuple[bool, Any]:
        """Return whether a call has raised DuplicateError, and its result."""
        try:
            return False, self._answer(call.name, *call.arguments, **call.options)
        except DuplicateError:
            return True, None
