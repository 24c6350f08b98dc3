"""What reaches a rank while it computes: signals, deadlines and messages of other ranks, seen by a thread of its own.

The main thread is in an objective most of the time, often in native code. The watch calls an evaluation off by a signal
to the main thread, which wakes whoever sleeps and raises CalledOff in the objective, and by cutting its process group,
which wakes whoever waits in a collective.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from hpo.errors import AgreedError, Exit, Stop
from hpo.process import clock
from hpo.process.crash import Crash, Death
from hpo.process.failure import stack_of
from hpo.process.leaving import end_now, refusing
from hpo.process.place import Places, frames_of_thread
from hpo.process.printed import own_words, warn
from hpo.process.wakeup import WakeupPipe
from hpo.ranks.communicator import SleepingComm, threads_may_communicate
from hpo.ranks.messages import Post

STOPPED = "the run stops"

# Go's runtime interrupts its threads with it for the same reasons: it does nothing to who does not expect it, and
# neither libraries nor debuggers care (golang.org/design/24543-non-cooperative-preemption).
_INTERRUPT = signal.SIGURG
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_INTERRUPTS = 3.0  # for objectives that catch even what is no Exception
_SECONDS_OF_ONE_CTRL_C = 1.0  # mpirun and the terminal may both deliver it
_SECONDS_TO_STOP = 7.0
_SECONDS_FOR_LAST_WORDS = 2.5
_LEAST_SILENCE = 15.0
_SECONDS_TO_DIE = 5.0
_SECONDS_FOR_THE_LEADER = 3.0  # to record what a peer dies of, which lives for 4 s at least


# Records, on the leader, that the current evaluation has failed: the failure in a line, and the stack.
GiveUp = Callable[[str, str], None]


class CalledOff(BaseException):
    """Raised in an objective that is to end; not an Exception, so that what an objective catches lets it pass."""


class Watch:
    """The thread that watches over a rank, and what the main thread tells it; made and left by all ranks together.

    ``stopping`` is why the whole run is to stop, None while it is not; ``cause`` why the current evaluation was called
    off.
    """

    def __init__(self, world: SleepingComm) -> None:
        if not threads_may_communicate():
            raise AgreedError(
                "this MPI does not let threads communicate (MPI_THREAD_MULTIPLE), which the watch over each rank "
                "needs; unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use another MPI"
            )
        self.stopping: Stop | None = None
        self.patience = math.inf  # seconds in which an evaluation that is called off has to end
        self.last_words: Callable[[], int] | None = None  # of the first rank, where a run does not stop in time
        self.post = Post(world)
        self.signs_off: Callable[[], None] | None = None  # on the first rank, where the run begins to stop
        self.names_of_peers = ""
        self._peers: list[int] = []
        self._leader = self.post.rank
        self._rank_in_worker = 0
        self._places: Places | None = None
        self._main = threading.main_thread()
        self._parent = os.getppid()
        self._end_at: dict[str, float] = {}
        self._stopped_at = math.inf
        self._forgotten: Stop | None = None
        self._dying = threading.Lock()
        self._ended = False
        # The evaluation that the main thread is in, by its number on this worker, and the one called off last.
        self._begun = 0
        self._number: int | None = None
        self._cut: Callable[[], None] = lambda: None
        self._about = ""
        self._give_up: GiveUp | None = None
        self._overdue_at = math.inf
        self._called_off: tuple[int, str] = (-1, "")
        self._called_off_at = self._interrupted_at = -math.inf
        self._inside = False
        self._pressing = threading.Lock()
        self._wakeup = WakeupPipe(_STOPS)
        self._crash = Crash()
        self._refusing = refusing(self._on_exit)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._wakeup.__enter__()
        self._crash.__enter__()
        self._refusing.__enter__()
        signal.signal(_INTERRUPT, self._on_interrupt)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not isinstance(error, AgreedError):
            return  # the job is about to end, and the watch helps to end it
        self._ended = True
        self._wakeup.wake()
        self._thread.join()
        self.post.close()
        self._refusing.__exit__(None, None, None)
        self._crash.__exit__(None, None, None)
        self._wakeup.__exit__()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the watch's own thread, which is not to wait."""
        return threading.current_thread() is self._thread

    # What the main thread says

    def join(self, worker: SleepingComm, index: int, places: Places) -> None:
        """Learn who this rank's peers are, in the worker of this number; collective over the worker."""
        self._places = places
        self.post.name_in(worker.rank, index)
        names = dict(worker.allgather((self.post.rank, self.post.name)))
        self._peers = [rank for rank in names if rank != self.post.rank]
        self._leader = next(iter(names))
        self._rank_in_worker = worker.rank
        self.names_of_peers = ", ".join(names[rank] for rank in self._peers)

    def end_after(self, seconds: float, reason: str) -> None:
        """Stop the run after so many seconds from now."""
        self._end_at[reason] = time.monotonic() + seconds

    def begin(self, cut: Callable[[], None], overdue_after: float, about: str, give_up: GiveUp | None) -> None:
        """Say that an evaluation begins, as all ranks of the worker do: `cut` ends its connections from any thread.

        It is called off when it is still going on after `overdue_after` seconds. Where a process dies in it, `about`
        says to a person what it was, and on the leader, `give_up` records that it has failed.
        """
        self._cut, self._about, self._give_up = cut, about, give_up
        self._overdue_at = clock.now() + overdue_after
        self._begun += 1
        self._number = self._begun
        if self.stopping:
            self._call_off(self._begun, STOPPED)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no time from the current evaluation."""
        left, self._overdue_at = self._overdue_at - clock.now(), math.inf
        try:
            yield
        finally:
            self._overdue_at = clock.now() + left

    def end(self) -> None:
        """Say that the evaluation has ended on all ranks; its connections are not cut any more when this returns."""
        with self._pressing:
            self._number, self._inside = None, False

    @property
    def cause(self) -> str | None:
        """Why the current evaluation was called off; None if it was not."""
        number, cause = self._called_off
        return cause if number == self._number else None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let CalledOff be raised in the main thread: around an objective, and nothing else."""
        try:
            self._inside = True
            if self.cause is not None:
                raise CalledOff
            yield
        finally:
            self._inside = False

    @contextmanager
    def closing(self, patient: bool) -> Iterator[None]:
        """Let an objective clean up, for a while undisturbed and for no longer than it may take."""
        with self._pressing:
            if self.cause is None:
                self._called_off = (self._number or 0, "it is being closed")
            self._called_off_at = clock.now()
            self._interrupted_at = self._called_off_at + (self.patience / 2 if patient else 0.0)
        try:
            self._inside = True
            yield
        finally:
            self._inside = False

    def call_off(self, cause: str) -> None:
        """Call the current evaluation off on all ranks of the worker."""
        number = self._number
        if number is not None:
            self._call_off(number, cause)
            for peer in self._peers:
                self._send(peer, "call off", number, cause)

    def stop(self, stop: Stop) -> None:
        """Stop the whole run: evaluations are called off, and no others are started."""
        if self._is_final(stop) or stop == self._forgotten:
            return
        self._stopped_at = clock.now()
        self.stopping = stop
        if self.signs_off is not None and stop.status != Exit.BUDGET_SPENT:
            with suppress(Exception):  # what runs is suspected then, as if the job had died
                self.signs_off()
        for rank in range(1, self.post.size) if self.post.rank == 0 else [0]:
            self._send(rank, "stop", stop)
        number = self._number
        if number is not None:
            self._call_off(number, STOPPED)

    def forget(self, stop: Stop) -> None:
        """Go on after a stop, when all ranks have stopped, and though its news may still be under way."""
        self._forgotten = stop
        if self.stopping == stop:
            self.stopping, self._stopped_at = None, math.inf

    def _is_final(self, stop: Stop) -> bool:
        """Tell whether the run is stopping already, and for a reason that this one does not overrule."""
        ends_well = self.stopping is not None and self.stopping.status == Exit.BUDGET_SPENT
        return self.stopping is not None and not (ends_well and stop.status != Exit.BUDGET_SPENT)

    def die(self, message: str, status: int = Exit.CRASHED) -> None:
        """End the whole job at once and with one message, the first that the first rank hears of; does not return."""
        if self.post.rank != 0:
            self._send_soon(0, "die", message, status)
            time.sleep(_SECONDS_TO_DIE)
        self._abort(message, status)

    # What the thread does

    def _run(self) -> None:
        try:
            while not self._ended:
                for number in self._wakeup.wait(_POLL_SECONDS):
                    self._on_signal(number)
                for message in self.post.exchange():
                    self._on_message(*message)
                if death := self._crash.read():
                    self._on_crash(death)
                self._look_at_the_clock()
        except BaseException:
            self.die(traceback.format_exc())

    def _on_signal(self, number: int) -> None:
        stop = Stop(signal.Signals(number).name)
        if not self._is_final(stop):
            self.stop(stop)
        elif number == signal.SIGINT and clock.now() - self._stopped_at > _SECONDS_OF_ONE_CTRL_C:
            self.die("stopped at once", Exit.CUT_SHORT)

    def _on_message(self, kind: str, *rest: Any) -> None:
        if kind == "call off":
            self._call_off(*rest)
        elif kind == "stop":
            self.stop(*rest)
        elif kind == "died":
            self._on_death(*rest)
        elif kind == "die":
            self._abort(*rest)

    def _on_crash(self, death: Death) -> None:
        """Say what this process, which has some seconds to live, dies of."""
        self._die_in(self._number, str(death), death.frames)

    def _die_in(self, number: int | None, what: str, frames: Sequence[traceback.FrameSummary]) -> None:
        """End the job, and let the leader give up the evaluation that this rank was in, if it was in one."""
        stack, place = stack_of(frames), self._places.of(frames) if self._places else ""
        failure = f"rank {self._rank_in_worker}{f', {place}' if place else ''}: {what}"
        message = f"error: {self.post.name}: {what}"
        message += f"; it was evaluating {self._about}" if number is not None else ""
        message += f"; it was at\n{stack}" if stack else ""
        if self.post.rank != self._leader:
            self._send_soon(self._leader, "died", number, failure, stack, message)
            time.sleep(_SECONDS_FOR_THE_LEADER)
            self.die(message)
        self._on_death(number, failure, stack, message)

    def _on_death(self, number: int | None, failure: str, stack: str, message: str) -> None:
        with suppress(Exception):  # it has ended, or cannot be recorded: it is repeated then
            if number is not None and number == self._number and self._give_up:
                self._give_up(failure, stack)
        self.die(message)

    def _look_at_the_clock(self) -> None:
        now = clock.now()
        if self.post.size > 1 and os.getppid() != self._parent:
            end_now(Exit.CRASHED)  # mpirun was killed, and some leave their ranks behind
        for reason, end in self._end_at.items():
            if time.monotonic() > end:
                self.stop(Stop(reason))
        if self.stopping and now > self._stopped_at + _SECONDS_TO_STOP:
            self._stop_late(self.stopping)
        if (silence := self.post.silence()) > max(self.patience, _LEAST_SILENCE) + _SECONDS_TO_DIE:
            self.die(
                f"error: nothing has come from {self.post.previous} for {silence:.0f} s (--collective-timeout): its "
                "host may be gone, or it is in native code that lets no other thread run"
            )
        if self._number is None:
            return
        if now > self._overdue_at and self.cause is None:
            self.call_off("timeout: no loss came at which to stop it (--evaluation-timeout)")
        with self._pressing:
            if self.cause is not None and self._inside:
                self._press(now)

    def _press(self, now: float) -> None:
        """Get the main thread out of an objective that was called off, or give up on it."""
        if now > self._called_off_at + self.patience:
            self._die_in(
                self._number if self.cause != STOPPED else None,
                f"it is stuck: its evaluation was called off {self.patience:g} s ago (--collective-timeout), because "
                f"{self.cause}",
                frames_of_thread(self._main),
            )
        if now > self._interrupted_at + _SECONDS_BETWEEN_INTERRUPTS:
            self._interrupted_at = now
            signal.pthread_kill(self._main.ident or 0, _INTERRUPT)
            self._cut()

    def _stop_late(self, stopping: Stop) -> None:
        """End the job though a rank has not stopped; the first rank waits for it and has the last words."""
        if self.post.rank == 0:
            status = stopping.status or Exit.MORE_TO_DO  # nobody has looked whether there is
            with suppress(Exception), own_words():
                status = self.last_words() if self.last_words else status
            self._abort(f"stopped ({stopping.reason}), though some ranks did not come to an end", status)
        if clock.now() > self._stopped_at + _SECONDS_TO_STOP + _SECONDS_FOR_LAST_WORDS:
            self._abort(f"stopped ({stopping.reason})", stopping.status or Exit.MORE_TO_DO)

    # What both do

    def _call_off(self, number: int, cause: str) -> None:
        if number > self._called_off[0]:
            self._called_off_at, self._interrupted_at = clock.now(), -math.inf
            self._called_off = (number, cause)
            self._wakeup.wake()

    def _send(self, rank: int, *message: Any) -> None:
        self.post.send(rank, *message)
        self._wakeup.wake()

    def _send_soon(self, rank: int, *message: Any) -> None:
        """Send at once, though this thread may never come back to send what waits."""
        if self.is_own_thread:
            self.post.send_now(rank, *message)
        else:
            self._send(rank, *message)

    def _abort(self, message: str, status: int) -> None:
        if not self._dying.acquire(blocking=False):
            time.sleep(_SECONDS_TO_DIE)  # another thread of this rank is at it
            end_now(status)
        warn(message)
        time.sleep(0.5)  # mpirun may drop what arrives together with the abort
        self.post.abort(status)
        end_now(status)  # an abort may return

    def _on_exit(self, status: int) -> None:
        """End the job with a message, in the place of an objective that has called os._exit in any thread."""
        what = f"os._exit({status}) was called: return, or raise an exception"
        self._die_in(self._number, what, frames_of_thread(threading.current_thread()))

    def _on_interrupt(self, *_: object) -> None:
        if self._inside and self.cause is not None:
            raise CalledOff
