"""The watch over a rank: a thread that handles signals, deadlines and messages of other ranks.

The main thread mostly waits for its trainer or for other ranks. It also proposes individuals, and
writes the summary. To cancel an evaluation, the watch wakes the main thread, which then cancels the
objective in its trainer.
"""

from __future__ import annotations

import math
import os
import queue
import select
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from hpo.errors import CollectiveUsageError, ExitStatus, StopRequest
from hpo.process import clock
from hpo.process.standard_streams import warn
from hpo.ranks.communicator import SleepingComm, allows_threads

RUN_STOPS = "the run stops"

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_POLL_SECONDS = 0.1
_SECONDS_PER_CTRL_C = 1.0  # mpirun and the terminal may both deliver one Ctrl-C.
# Hung trainers are killed after 5 s. With half a core, the rest has taken more than 2 s. Schedulers
# kill a job 30 s after SIGTERM.
_SECONDS_TO_STOP = 20.0
_SECONDS_TO_SUMMARIZE = 2.5
_MIN_SILENCE = 15.0
# Until the options are known: the default of --collective-timeout.
_PATIENCE_AT_START = 600.0
_SECONDS_TO_ABORT = 5.0
_SECONDS_BETWEEN_PINGS = 1.0
_PING_KIND = "alive"


@dataclass(frozen=True)
class Peers:
    """The ranks of a worker, as one of them sees the others."""

    leader: int
    """Index in the job of the worker's leader."""
    others: Sequence[int]
    """Indices in the job of all ranks of the worker except this one."""
    own_name: str
    names: str
    """Names of the other ranks, separated by commas."""
    patience: float
    """Maximum seconds for which a rank waits for its peers."""


@dataclass(eq=False)
class WatchedEvaluation:
    """An evaluation that any thread can cancel.

    The main thread waits for a cancellation, or for news, as for data in a file.
    """

    number: int
    """Number of the evaluation among those of the worker, the same on all its ranks."""
    _event: int
    """File descriptor of an eventfd (a counter of Linux that wakes a waiting thread)."""
    peers: Peers
    _send: Callable[..., None]
    """Queues a control message for the rank with an index in the job."""
    cause: str | None = None
    """Why the evaluation was cancelled; None if it was not."""
    cancelled_at: float = math.inf
    """Time of the cancellation, on the clock of `hpo.process.clock`."""
    _news: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.clear_event()

    def fileno(self) -> int:
        """Return the file descriptor to wait on. It is readable after a cancellation or news."""
        return self._event

    def clear_event(self) -> None:
        """Make the file descriptor unreadable until the next cancellation or news."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def cancel_on_all(self, cause: str) -> None:
        """Cancel the evaluation on all ranks of the worker, including this rank."""
        self.cancel_here(cause)
        for peer in self.peers.others:
            self._send(peer, "cancel", self.number, cause)

    def cancel_here(self, cause: str) -> None:
        """Cancel the evaluation on this rank only. The first cause counts."""
        if self.cause is None:
            self.cancelled_at = clock.now()
            self.cause = cause
            os.eventfd_write(self._event, 1)

    def send_news(self, content: Any) -> None:
        """Send news to the worker's leader, where `take_news` returns them."""
        self._send(self.peers.leader, "news", self.number, content)

    def receive(self, kind: str, content: Any) -> None:
        """Receive a cancellation or news from another rank, and wake the main thread."""
        if kind == "cancel":
            self.cancel_here(content)
        else:
            self._news.append(content)
            os.eventfd_write(self._event, 1)

    def take_news(self) -> list[Any]:
        """Return the news that have arrived from other ranks since the previous call."""
        new = []
        while self._news:  # Another thread may add news in the meantime.
            new.append(self._news.popleft())
        return new


@dataclass
class RunStop:
    """Whether a run stops, why, and since when.

    The first reason counts. Only the reason that the budget is spent can be replaced by another.
    """

    reason: StopRequest | None = None
    """Why the run stops; None while it does not stop."""
    _began_at: float = math.inf
    _cancelled_stops: set[StopRequest] = field(default_factory=set)

    def begin_stop(self, stop: StopRequest) -> bool:
        """Stop the run, and return true, unless `is_final(stop)` or this stop was cancelled."""
        if self.is_final(stop) or stop in self._cancelled_stops:
            return False
        self._began_at = clock.now()
        self.reason = stop
        return True

    def cancel_stop(self, stop: StopRequest) -> None:
        """End a stop. Late requests for the same stop are ignored."""
        self._cancelled_stops.add(stop)
        if self.reason == stop:
            self.reason = None
            self._began_at = math.inf

    def is_final(self, stop: StopRequest) -> bool:
        """Return whether the run stops already, for a reason that `stop` does not replace."""
        ends_well = self.reason is not None and self.reason.status == ExitStatus.BUDGET_SPENT
        return self.reason is not None and not (
            ends_well and stop.status != ExitStatus.BUDGET_SPENT
        )

    def measure_seconds(self) -> float:
        """Return the seconds since the run began to stop; negative infinity if it does not stop."""
        return clock.now() - self._began_at


class RankWatch:
    """The watch over a rank: a thread that handles signals, deadlines and messages.

    Collective: enter and leave it on all ranks.

    Raises:
        CollectiveUsageError: This MPI library does not let several threads communicate.
    """

    def __init__(self, world: SleepingComm) -> None:
        if not allows_threads():
            raise CollectiveUsageError(
                "this MPI does not let threads communicate (MPI_THREAD_MULTIPLE), which the watch "
                "over each rank needs; unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use "
                "another MPI"
            )
        self.control_channel = ControlChannel(world)
        self._peers: Peers | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._summarize_late: Callable[[], int] | None = None
        self._parent_pid = os.getppid()
        self._deadlines: dict[str, float] = {}
        self._run_stop = RunStop()
        self._abort_lock = threading.Lock()
        self._has_ended = False
        self._evaluation_count = 0  # number of evaluations of the worker
        self._evaluation: WatchedEvaluation | None = None
        # Messages about an evaluation that a peer has begun before this rank, with its number.
        self._early_messages: list[tuple[int, str, Any]] = []
        self._evaluation_lock = threading.Lock()
        self._wakeup = _WakeupPipe()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> RankWatch:
        self._wakeup.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, CollectiveUsageError):
            return  # The job is about to end, and the watch helps to end it.
        self._has_ended = True
        self._wakeup.wake()
        self._thread.join()
        self.control_channel.close()
        self._wakeup.__exit__()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the thread of the watch. This thread must not wait."""
        return threading.current_thread() is self._thread

    # Called by the main thread

    def join_worker(self, worker: SleepingComm, index: int, patience: float) -> None:
        """Set the worker of this rank. Collective: call on all ranks of the worker."""
        channel = self.control_channel
        channel.name = f"rank {worker.rank} of worker {index} on {socket.gethostname()}"
        names = dict(worker.allgather((channel.rank, channel.name)))
        leader = next(iter(names))
        others = [rank for rank in names if rank != channel.rank]
        other_names = ", ".join(names[rank] for rank in others)
        self._peers = Peers(leader, others, channel.name, other_names, patience)
        self._evaluation_count = max(worker.allgather(self._evaluation_count))

    def set_stop_callbacks(
        self, on_stop: Callable[[], None], summarize_late: Callable[[], int]
    ) -> None:
        """Set callbacks for a stop of the run, on the first rank.

        If it takes too long, `summarize_late` writes the summary, and returns the exit status.
        """
        self._on_stop = on_stop
        self._summarize_late = summarize_late

    def schedule_stop(self, seconds: float, reason: str) -> None:
        """Schedule a stop of the run `seconds` from now, with `reason` as its reason."""
        self._deadlines[reason] = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """The time until the first stop that is scheduled; infinite without one."""
        return min(self._deadlines.values(), default=math.inf) - time.monotonic()

    @property
    def active_stop(self) -> StopRequest | None:
        """Why the run stops; None while it does not stop."""
        return self._run_stop.reason

    @contextmanager
    def watch_evaluation(self) -> Iterator[WatchedEvaluation]:
        """Yield an evaluation that the watch can cancel inside `with`.

        Collective: enter and leave it on all ranks of the worker.
        """
        assert self._peers is not None
        with self._evaluation_lock:
            self._evaluation_count += 1
            watched = WatchedEvaluation(
                self._evaluation_count, self._event, self._peers, self._queue_message
            )
            self._evaluation = watched
            for number, kind, content in self._early_messages:
                if number == watched.number:
                    watched.receive(kind, content)
            self._early_messages.clear()
        if self.active_stop:
            watched.cancel_here(RUN_STOPS)
        try:
            yield watched
        finally:
            self._evaluation = None

    def stop_run(self, stop: StopRequest) -> None:
        """Stop the whole run: cancel running evaluations, and start no new ones."""
        if not self._run_stop.begin_stop(stop):
            return
        if stop.status != ExitStatus.BUDGET_SPENT:
            # If this fails, running evaluations count as possible causes of a crash.
            with suppress(Exception):
                self._on_stop()
        is_first = self.control_channel.rank == 0
        for rank in range(1, self.control_channel.size) if is_first else [0]:
            self._queue_message(rank, "stop", stop)
        if evaluation := self._evaluation:
            evaluation.cancel_here(RUN_STOPS)

    def cancel_stop(self, stop: StopRequest) -> None:
        """End a stop, so that the run continues. Call it when all ranks have ended the search."""
        self._run_stop.cancel_stop(stop)

    def abort_job(self, message: str, status: int = ExitStatus.CRASHED) -> None:
        """End the whole job at once, and print `message`. This method does not return.

        The first rank ends the job. If several ranks request this, it prints the message that it
        receives first.
        """
        if self.control_channel.rank != 0:
            if self.is_own_thread:  # It may exchange no more messages.
                self.control_channel.send_now(0, "die", message, status)
            else:
                self._queue_message(0, "die", message, status)
            time.sleep(_SECONDS_TO_ABORT)
        self._abort_now(message, status)

    # Called by the watch's thread

    def _run(self) -> None:
        try:
            while not self._has_ended:
                for number in self._wakeup.wait(_POLL_SECONDS):
                    self._on_signal(number)
                for message in self.control_channel.exchange_messages():
                    self._on_message(*message)
                self._check_clock()
        except BaseException:
            self.abort_job(traceback.format_exc())

    def _on_signal(self, number: int) -> None:
        stop = StopRequest(signal.Signals(number).name)
        if not self._run_stop.is_final(stop):
            self.stop_run(stop)
        elif number == signal.SIGINT and self._run_stop.measure_seconds() > _SECONDS_PER_CTRL_C:
            self.abort_job("stopped at once", ExitStatus.INTERRUPTED)

    def _on_message(self, kind: str, *rest: Any) -> None:
        if kind in ("cancel", "news"):
            number, content = rest
            with self._evaluation_lock:
                if self._evaluation and self._evaluation.number == number:
                    self._evaluation.receive(kind, content)
                elif number > self._evaluation_count:
                    self._early_messages.append((number, kind, content))
        elif kind == "stop":
            self.stop_run(*rest)
        elif kind == "die":
            self._abort_now(*rest)

    def _check_clock(self) -> None:
        clock.now()  # The clock must be read often.
        if self.control_channel.size > 1 and os.getppid() != self._parent_pid:
            os._exit(ExitStatus.CRASHED)  # mpirun was killed; some versions do not end their ranks.
        for reason, end in self._deadlines.items():
            if time.monotonic() > end:
                self.stop_run(StopRequest(reason))
        seconds = self._run_stop.measure_seconds()
        if (stop := self.active_stop) and seconds > _SECONDS_TO_STOP:
            # The first rank writes the summary, and then ends the job. Another rank ends the job
            # only if the summary takes too long.
            status = stop.status or ExitStatus.UNFINISHED  # The run may have more to do.
            if self.control_channel.rank == 0:
                with suppress(Exception):
                    status = self._summarize_late() if self._summarize_late else status
                late = f"stopped ({stop.reason}), although some ranks did not stop in time"
                self._abort_now(late, status)
            if seconds > _SECONDS_TO_STOP + _SECONDS_TO_SUMMARIZE:
                self._abort_now(f"stopped ({stop.reason})", status)
        patience = self._peers.patience if self._peers else _PATIENCE_AT_START
        silence = self.control_channel.measure_silence()
        if silence > max(patience, _MIN_SILENCE) + _SECONDS_TO_ABORT:
            option = " (--collective-timeout)" if self._peers else ""
            self.abort_job(
                f"error: nothing has come from {self.control_channel.previous_name} for "
                f"{silence:.0f} s{option}: its host may be down, or the process is stopped"
            )

    # Called by both threads

    def _queue_message(self, rank: int, *message: Any) -> None:
        self.control_channel.send(rank, *message)
        self._wakeup.wake()

    def _abort_now(self, message: str, status: int) -> None:
        if not self._abort_lock.acquire(blocking=False):
            time.sleep(_SECONDS_TO_ABORT)  # Another thread of this rank is ending the job.
            os._exit(status)
        warn(message)
        time.sleep(0.5)  # mpirun may drop output that arrives together with the abort.
        self.control_channel.abort(status)
        os._exit(status)  # The abort may return.


class _WakeupPipe:
    """A pipe by which signals and other threads wake a thread, even while the main thread is busy.

    It receives the signals that stop a run inside `with`, instead of their usual handlers, and
    wakes the thread that calls `wait`. The main thread must enter the `with`.
    """

    def __init__(self) -> None:
        self._previous_handlers: dict[int, Any] = {}
        self._write_end, self._read_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._read_end.setblocking(False)

    def __enter__(self) -> _WakeupPipe:
        self._previous_handlers = {
            number: signal.signal(number, lambda *_: None) for number in _STOP_SIGNALS
        }
        signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def wait(self, seconds: float) -> list[int]:
        """Wait at most `seconds` for a signal or for `wake`; return the numbers of new signals."""
        select.select([self._read_end], [], [], seconds)
        with suppress(BlockingIOError):
            return [number for number in self._read_end.recv(4096) if number in _STOP_SIGNALS]
        return []

    def wake(self) -> None:
        """End the wait of the thread that calls `wait`. Any thread may call this."""
        with suppress(OSError):
            self._write_end.send(b"\0")


class ControlChannel:
    """Sends control messages and heartbeats, on a communicator of its own.

    Collective: create and close it on all ranks. Any thread may send. Only the thread of the watch
    exchanges messages.

    Attributes:
        name: Name of this rank in messages to the user.
        previous_name: Name of the previous rank in the ring of all ranks, which sends heartbeats to
            this rank.
    """

    def __init__(self, world: SleepingComm) -> None:
        self.rank: int = world.rank
        self.size: int = world.size
        self.name = f"rank {world.rank} of the job on {socket.gethostname()}"
        self.previous_name = f"rank {(world.rank - 1) % world.size} of the job"
        self._world = world
        self._comm = world.copy()
        self._outbox: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = queue.SimpleQueue()
        self._pinged_at = clock.now()
        self._exchanged_at = self._pinged_at
        self._received_at = self._pinged_at

    def send(self, rank: int, *message: Any) -> None:
        """Queue a message for the next exchange; any thread may call this."""
        self._outbox.put((rank, message))

    def send_now(self, rank: int, *message: Any) -> None:
        """Send a message at once, since there may be no next exchange.

        Only the thread that exchanges messages may call this.
        """
        with suppress(Exception):
            self._comm.send(message, dest=rank)

    def exchange_messages(self) -> Iterator[tuple[Any, ...]]:
        """Send the queued messages, and yield the messages that have arrived."""
        now = clock.now()
        if now > self._exchanged_at + 3 * _SECONDS_BETWEEN_PINGS:
            # This rank was stopped, perhaps with the whole job, or was connecting, and received no
            # heartbeats.
            self._received_at = now
        self._exchanged_at = now
        if now > self._pinged_at + _SECONDS_BETWEEN_PINGS and self.size > 1:
            self._pinged_at = now
            self._comm.send((_PING_KIND, self.name), dest=(self.rank + 1) % self.size)
        while not self._outbox.empty():
            rank, message = self._outbox.get()
            self._comm.send(message, dest=rank)
        received = []
        while self._comm.iprobe():
            received.append(self._comm.recv())
        for message in received:
            if message[0] == _PING_KIND:
                self._received_at = clock.now()
                self.previous_name = message[1]
            else:
                yield message

    def measure_silence(self) -> float:
        """Return the seconds since the latest heartbeat from the previous rank."""
        return clock.now() - self._received_at if self.size > 1 else 0.0

    def close(self) -> None:
        """Drop pending messages. Collective: call on all ranks after the last exchange."""
        self._comm.drop_messages()

    def abort(self, status: int) -> None:
        """End the job on all hosts.

        This needs MPI's own communicator of all ranks. With a copy of it, MPICH (5.0.2) would end
        only the ranks of this host.
        """
        self._world.Abort(status)
