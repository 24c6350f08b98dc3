"""The watch over a rank: a thread that sees signals, deadlines and messages of other ranks while the rank computes.

The main thread waits for its trainer or for other ranks most of the time; it also breeds, and sums the run up. The
watch calls an evaluation off by waking the main thread, which then cancels the objective in its trainer.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from hpo.errors import AgreedError, Exit, Stop
from hpo.process import clock
from hpo.process.printed import warn
from hpo.process.wakeup import WakeupPipe
from hpo.ranks.communicator import SleepingComm, threads_may_communicate
from hpo.ranks.messages import Post
from hpo.ranks.peers import Peers, peers_of
from hpo.ranks.stopping import Stopping
from hpo.ranks.watched import Watched

STOPPED = "the run stops"

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_POLL_SECONDS = 0.1
_SECONDS_OF_ONE_CTRL_C = 1.0  # mpirun and the terminal may both deliver it
_SECONDS_TO_STOP = 7.0
_SECONDS_FOR_LAST_WORDS = 2.5
_LEAST_SILENCE = 15.0
_SECONDS_TO_DIE = 5.0


class Watch:
    """The thread that watches over a rank, and what the main thread tells it; made and left by all ranks together."""

    def __init__(self, world: SleepingComm) -> None:
        if not threads_may_communicate():
            raise AgreedError(
                "this MPI does not let threads communicate (MPI_THREAD_MULTIPLE), which the watch over each rank "
                "needs; unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use another MPI"
            )
        self.post = Post(world)
        self._peers: Peers | None = None
        self._sign_off: Callable[[], None] = lambda: None
        self._last_words: Callable[[], int] | None = None
        self._parent = os.getppid()
        self._end_at: dict[str, float] = {}
        self._stopping = Stopping()
        self._dying = threading.Lock()
        self._ended = False
        self._begun = 0  # evaluations of the worker
        self._evaluation: Watched | None = None
        self._early: tuple[int, str] = (-1, "")  # a call-off that came before this rank has begun the evaluation
        self._early_reports: list[tuple[int, Any]] = []
        self._beginning = threading.Lock()
        self._wakeup = WakeupPipe(_STOPS)
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._wakeup.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not isinstance(error, AgreedError):
            return  # the job is about to end, and the watch helps to end it
        self._ended = True
        self._wakeup.wake()
        self._thread.join()
        self.post.close()
        self._wakeup.__exit__()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the watch's own thread, which must not wait."""
        return threading.current_thread() is self._thread

    # For the main thread

    def join(self, worker: SleepingComm, index: int, patience: float) -> None:
        """Learn this rank's peers in the worker of this number, or in its team; collective over the ranks of that.

        `patience` is the seconds for which ranks wait for each other.
        """
        self.post.name_in(worker.rank, index)
        self._peers = peers_of(worker, self.post, patience)
        self._begun = worker.allreduce(self._begun, max)

    def speak_for_the_run(self, sign_off: Callable[[], None], last_words: Callable[[], int]) -> None:
        """On the first rank: call `sign_off` when the run begins to stop, and `last_words`, a status, if it is late."""
        self._sign_off, self._last_words = sign_off, last_words

    def end_after(self, seconds: float, reason: str) -> None:
        """Stop the run after so many seconds from now."""
        self._end_at[reason] = time.monotonic() + seconds

    @property
    def stopping(self) -> Stop | None:
        """Why the whole run is to stop, None while it is not."""
        return self._stopping.reason

    @property
    def names_of_peers(self) -> str:
        """The names of the worker's other ranks, for a person."""
        return self._peers.names if self._peers else ""

    @contextmanager
    def evaluation(self) -> Iterator[Watched]:
        """Watch over an evaluation, which all ranks of the worker begin and end together."""
        with self._beginning:
            self._begun += 1
            watched = Watched(self._begun, self._event, self._tell_peers, self._tell_leader)
            self._evaluation = watched
            for number, content in self._early_reports:
                if number == watched.number:
                    watched.add_report(content)
            self._early_reports.clear()
            if self._early[0] == watched.number:
                watched.be_called_off(self._early[1])
        if self.stopping:
            watched.be_called_off(STOPPED)
        try:
            yield watched
        finally:
            self._evaluation = None

    def stop(self, stop: Stop) -> None:
        """Stop the whole run: evaluations are called off, and no others are started."""
        if not self._stopping.begin(stop):
            return
        if stop.status != Exit.BUDGET_SPENT:
            with suppress(Exception):  # running evaluations are suspected then, as if the job had died
                self._sign_off()
        for rank in range(1, self.post.size) if self.post.rank == 0 else [0]:
            self._send(rank, "stop", stop)
        if evaluation := self._evaluation:
            evaluation.be_called_off(STOPPED)

    def forget(self, stop: Stop) -> None:
        """Go on after a stop, once all ranks have stopped; messages of it that still come are ignored."""
        self._stopping.forget(stop)

    def die(self, message: str, status: int = Exit.CRASHED) -> None:
        """End the whole job at once, with one message, the first that reaches the first rank; does not return."""
        if self.post.rank != 0:
            self._send_soon(0, "die", message, status)
            time.sleep(_SECONDS_TO_DIE)
        self._abort(message, status)

    # For the watch's thread

    def _run(self) -> None:
        try:
            while not self._ended:
                for number in self._wakeup.wait(_POLL_SECONDS):
                    self._on_signal(number)
                for message in self.post.exchange():
                    self._on_message(*message)
                self._look_at_the_clock()
        except BaseException:
            self.die(traceback.format_exc())

    def _on_signal(self, number: int) -> None:
        stop = Stop(signal.Signals(number).name)
        if not self._stopping.is_final(stop):
            self.stop(stop)
        elif number == signal.SIGINT and self._stopping.seconds() > _SECONDS_OF_ONE_CTRL_C:
            self.die("stopped at once", Exit.CUT_SHORT)

    def _on_message(self, kind: str, *rest: Any) -> None:
        if kind == "call off":
            self._on_call_off(*rest)
        elif kind == "report":
            self._on_report(*rest)
        elif kind == "stop":
            self.stop(*rest)
        elif kind == "die":
            self._abort(*rest)

    def _on_call_off(self, number: int, cause: str) -> None:
        with self._beginning:
            if self._evaluation and self._evaluation.number == number:
                self._evaluation.be_called_off(cause)
            elif number > max(self._begun, self._early[0]):
                self._early = (number, cause)

    def _on_report(self, number: int, content: Any) -> None:
        with self._beginning:
            if self._evaluation and self._evaluation.number == number:
                self._evaluation.add_report(content)
            elif number > self._begun:
                self._early_reports.append((number, content))

    def _look_at_the_clock(self) -> None:
        clock.now()  # which has to be asked often
        if self.post.size > 1 and os.getppid() != self._parent:
            os._exit(Exit.CRASHED)  # mpirun was killed, and some mpiruns leave their ranks behind
        for reason, end in self._end_at.items():
            if time.monotonic() > end:
                self.stop(Stop(reason))
        if self.stopping and self._stopping.seconds() > _SECONDS_TO_STOP:
            self._stop_late(self.stopping)
        patience = self._peers.patience if self._peers else math.inf
        if (silence := self.post.silence()) > max(patience, _LEAST_SILENCE) + _SECONDS_TO_DIE:
            why = "its host may be gone, or the process is stopped"
            self.die(
                f"error: nothing has come from {self.post.previous} for {silence:.0f} s (--collective-timeout): {why}"
            )

    def _stop_late(self, stopping: Stop) -> None:
        """End the job though a rank has not stopped; the first rank sums the run up, and the others leave it time."""
        if self.post.rank == 0:
            status = stopping.status or Exit.MORE_TO_DO  # it is not known whether there is more to do
            with suppress(Exception):
                status = self._last_words() if self._last_words else status
            self._abort(f"stopped ({stopping.reason}), though some ranks did not come to an end", status)
        if self._stopping.seconds() > _SECONDS_TO_STOP + _SECONDS_FOR_LAST_WORDS:
            self._abort(f"stopped ({stopping.reason})", stopping.status or Exit.MORE_TO_DO)

    # For both

    def _tell_peers(self, number: int, cause: str) -> None:
        for peer in self._peers.others if self._peers else ():
            self._send(peer, "call off", number, cause)
        self._wakeup.wake()

    def _tell_leader(self, number: int, content: Any) -> None:
        if self._peers:
            self._send(self._peers.leader, "report", number, content)

    def _send(self, rank: int, *message: Any) -> None:
        self.post.send(rank, *message)
        self._wakeup.wake()

    def _send_soon(self, rank: int, *message: Any) -> None:
        """Send a message at once where this is the watch's thread, which may never exchange messages again."""
        if self.is_own_thread:
            self.post.send_now(rank, *message)
        else:
            self._send(rank, *message)

    def _abort(self, message: str, status: int) -> None:
        if not self._dying.acquire(blocking=False):
            time.sleep(_SECONDS_TO_DIE)  # another thread of this rank is ending the job
            os._exit(status)
        warn(message)
        time.sleep(0.5)  # mpirun may drop what arrives together with the abort
        self.post.abort(status)
        os._exit(status)  # an abort may return
