"""One evaluation on a trainer: it reports each loss of the objective to its supervisor, which says what follows."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hpo.inside import set_worker
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.failure import stack_of, traceback_of, with_hint
from hpo.process.place import frames_here, frames_of
from hpo.text import message as message_of
from hpo.trainer.forks import end_if_forked, is_forked
from hpo.trainer.group import Group
from hpo.trainer.interrupts import Cancelled, Interrupts
from hpo.trainer.keeper import Keeper
from hpo.trainer.objective import Objective, has_diverged, reported
from hpo.trainer.process_group import own_group
from hpo.trainer.surroundings import as_before
from hpo.trainer.worker import Calls, Worker

# What gloo says if a peer has ended the connection, or has crashed.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# What it says if a rank has waited in vain, in a collective or in the check of torch's own before it.
_CLOSED_BY_TIMEOUT = "Application timeout caused pair closure"  # also if an earlier collective has timed out
TIMEOUTS = ("Timed out waiting", _CLOSED_BY_TIMEOUT, "failed to pass monitoredBarrier")

_MOST_MESSAGES = 10

T = TypeVar("T")
Frames = Sequence[traceback.FrameSummary]


class Evaluation:
    """Runs an objective on one rank, as the other trainers of the worker do at the same time.

    ``on_loss`` is called after each loss that all ranks have agreed on. ``failures`` are the messages of the exception
    that has ended the objective, if one has, and ``place`` is the line of the objective where it was raised.
    """

    def __init__(
        self, channel: Channel, objective: Objective, group: Group, interrupts: Interrupts, keeper: Keeper
    ) -> None:
        self._channel = channel
        self._objective = objective
        self._group = group
        self._interrupts = interrupts
        self._keeper = keeper
        self._is_over = self._has_ended = False
        self._last: dict[str, Any] | None = None
        self._settling = False
        self._began = time.monotonic()
        self.on_loss: Callable[[], object] = lambda: None
        self.failures: list[str] = []
        self.place = ""
        self.trial, self.folder = 0, Path()

    def run(
        self, seed: int, data: Callable[[], Any], ticket: Mapping[str, Any] | None, is_compared: bool = False
    ) -> dict[str, Any] | None:
        """Take the objective to its end, in the process group of a ticket if there is one.

        If `is_compared`, the ranks compare their collectives before these begin. Returns the last step if the objective
        has returned with it, and nothing of it is to be gathered: it is not sent yet. Returns None otherwise.
        """
        self._interrupts.begin()
        joined = self._run(lambda: self._enter_group(ticket, is_compared))
        if isinstance(joined, dict):
            self._send("step", **joined)
            return None
        if ticket is not None:
            self._send("joined")
        calls = Calls(data, self._keeper.offer, self._report, self._keeper.save, self._restored, self._inherited)
        worker = self._group.worker(seed, calls)
        worker.trial, worker._folder = self.trial, self.folder
        with as_before():
            set_worker(worker)
            while not self._is_over:
                self._advance(worker)
            self._close()
            set_worker(None)
        self._has_ended = True
        return self._last

    def _enter_group(self, ticket: Mapping[str, Any] | None, is_compared: bool) -> None:
        if ticket is not None:
            self._group.join(ticket)
        self._group.compare_collectives(is_compared)

    # Steps

    def _advance(self, worker: Worker) -> None:
        """Let the objective go on to its next yield, or to its end, and settle what comes of it."""
        said = self._run(lambda: self._objective.advance(worker))
        if not self._is_over:
            frames = self._objective.frames()
            self._settle(said if isinstance(said, dict) else self._step(said, frames), frames)

    def _report(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Settle a loss that the objective reports.

        Raises Cancelled if the evaluation is over, and RuntimeError if it is not the objective that calls this.
        """
        if is_forked():
            raise RuntimeError("worker.report is called by the worker's ranks, not by processes that they have forked")
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RuntimeError(f"worker.report is called in the main thread, in which the objective is, not in {name}")
        if self._settling:
            raise RuntimeError("worker.report is called in a function that was given to worker.offer_weights")
        if self._has_ended or not self._interrupts.is_inside:
            raise RuntimeError("worker.report is called after the evaluation of this worker has ended")
        with self._interrupts.outside():
            if not self._is_over:
                self._settle(self._reported(loss, metrics, frames_here()), frames_here())
        if self._is_over:
            raise Cancelled
        self._began = time.monotonic()

    def _reported(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> dict[str, Any]:
        try:
            if self._interrupts.was_requested:  # the objective has caught Cancelled
                raise Cancelled
            said = reported(loss, metrics)
        except (Cancelled, TypeError, ValueError) as error:
            return self._failed(error, frames)
        self._objective.has_loss = True
        return self._step(said, frames)

    def _settle(self, step: dict[str, Any], frames: Frames) -> None:
        """Send a step, and do what the supervisor says: keep what belongs to the loss, go on, or end."""
        self._settling = True
        try:
            if step.get("failure") is not None:
                self._send("step", **step)
                self._is_over = True
                return
            if step["ended"] and not (step["gathers"] or step["saves"]):
                self._is_over, self._last = True, step
                return
            verdict = self._ask("step", **step)
            if verdict["gathers"]:
                failed = self._run(lambda: self._keeper.gather(self._objective, verdict), frames)
                if failed is not None:
                    self._send("gathered", **failed)
                    self._is_over = True
                    return
                verdict = self._ask("gathered", place=step["place"])
            if (kept := self._keeper.settle(verdict)) is not None:
                self._send("kept", **kept)
            self._is_over = not verdict["goes_on"]
            if verdict["has_loss"]:
                self.on_loss()
        finally:
            self._settling = False
            if self._last is None:
                self._keeper.let_go()

    def _step(self, said: tuple[float, dict[str, float]] | None, frames: Frames) -> dict[str, Any]:
        _flush_streams()
        loss, metrics = said if said is not None else (None, {})
        place, ended = self._objective.place(frames), self._objective.has_ended
        return {"loss": loss, "metrics": metrics, "place": place, "ended": ended, **self._keeper.flags()}

    def _failed(self, error: BaseException, frames: Frames) -> dict[str, Any]:
        """Return what the objective has raised as a step that has failed."""
        _flush_streams()
        seconds = time.monotonic() - self._began
        reason = f"{type(error).__name__}: {with_hint(error)}"
        is_cancelled = isinstance(error, Cancelled) or self._interrupts.was_requested
        frames = [*frames, *frames_of(error)] or self._objective.frames() or self._objective.definition()
        self.failures, self.place = _messages(error), self._objective.place(frames)
        return {
            "failure": reason,
            "is_cancelled": is_cancelled,
            "diverged": has_diverged(error),
            "echo": any(text in reason for text in ECHOES)
            or (_CLOSED_BY_TIMEOUT in reason and seconds < own_group.timeout.total_seconds()),
            "gave_up": isinstance(error, RuntimeError) and any(text in reason for text in TIMEOUTS),
            "seconds": seconds,
            "at": time.time(),
            "place": self.place,
            "traceback": stack_of(frames) if isinstance(error, Cancelled) else traceback_of(error, frames),
            **self._keeper.flags(),
        }

    def _run(self, act: Callable[[], T], frames: Frames = ()) -> T | dict[str, Any]:
        """Let the objective act; whatever it raises is caught, and becomes a step that has failed.

        `frames` is where the objective is, if it is not `act` that takes it there.
        """
        self._began = time.monotonic()
        try:
            with self._interrupts.inside():
                done = act()
        except BaseException as error:
            end_if_forked(error)
            if not self._is_over:
                return self._failed(error, frames)
            _log(error)  # it was raised because the evaluation was over
            return {}
        end_if_forked()
        return done

    def _close(self) -> None:
        """End an objective that has not ended by itself."""
        try:
            self._objective.close()
        except BaseException as error:
            _log(error)

    # What the objective asks for

    def _restored(self) -> Any:
        state, losses = self._keeper.restore(self._objective.has_loss)
        self._objective.has_loss |= losses > 0
        return state

    def _inherited(self) -> Any:
        return self._keeper.inherit(self._objective.has_loss)

    # Messages

    def _send(self, kind: str, **content: Any) -> None:
        try:
            self._channel.send(kind, **content)
        except ChannelClosed:
            os._exit(1)  # not an exception, which the objective may catch

    def _ask(self, kind: str, **content: Any) -> Message:
        """Send a message, and return the verdict on it."""
        self._send(kind, **content)
        try:
            message = self._channel.receive()
        except ChannelClosed:
            message = None
        if message is None:
            os._exit(1)
        return message


def _messages(error: BaseException | None) -> list[str]:
    """Return the messages of an exception, and of those during the handling of which it was raised."""
    messages: list[str] = []
    while error is not None and len(messages) < _MOST_MESSAGES:
        messages.append(message_of(error))
        error = error.__cause__ or error.__context__
    return messages


def _flush_streams() -> None:
    """Let the supervisor have what the objective has printed, lines without an end too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the objective may have closed it
            stream.flush()


def _log(error: BaseException) -> None:
    """Log what an objective has raised while it was closed, unless it was only told to end."""
    if not isinstance(error, Cancelled):
        text = "".join(traceback.format_exception(error))
        logging.getLogger(__name__).info("while an objective was closed:\n%s", text)
