"""Run one evaluation in a trainer: agree with the other trainers on each loss, and obey the leader's answer.

The trainers of a worker agree among themselves. Only the trainer of rank 0 asks the leader, which is its supervisor,
and forwards the answer. Each trainer sends its own supervisor how its objective has ended.
"""

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

from hpo.evaluation_api import set_worker
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.failure import format_stack, format_traceback, format_with_hint
from hpo.process.user_frames import extract_current_frames, extract_error_frames
from hpo.text_format import format_error
from hpo.trainer.forks import end_if_forked, is_forked
from hpo.trainer.interrupts import Cancelled, InterruptHandler
from hpo.trainer.objective_call import ObjectiveCall, has_diverged, parse_report
from hpo.trainer.offers import Offers
from hpo.trainer.process_group import default_group
from hpo.trainer.process_state import ProcessState
from hpo.trainer.report_exchange import ReportAnswer, ReportPart, find_difference
from hpo.trainer.trainer_group import TrainerGroup
from hpo.trainer.worker import Worker, WorkerCallbacks

# Messages of gloo and NCCL if a peer has closed the connection, or has crashed.
CONNECTION_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exited or there was a network error", "ncclRemoteError", "NCCL communicator was aborted"),
)
# gloo's messages if a rank has waited too long, in a collective or in torch's check before it.
_TIMEOUT_CLOSURE = "Application timeout caused pair closure"  # It also follows an earlier timeout.
TIMEOUT_ERRORS = (
    *("Timed out waiting", _TIMEOUT_CLOSURE, "failed to pass monitoredBarrier"),
    "NCCL operation timed out",
)

_MAX_MESSAGES = 10
_SECONDS_BETWEEN_NOTES = 0.2

T = TypeVar("T")
Frames = Sequence[traceback.FrameSummary]


class ObjectiveRunner:
    """Runs an objective on one rank, while the other trainers of the worker do the same.

    ``on_loss`` is called after each loss on which all ranks have agreed. ``failure_messages`` are the messages of the
    exception that has ended the objective, and of its causes. ``failure_line`` is the line of the objective that raised
    it. ``is_restored`` is whether the state of this process was restored after the evaluation.
    """

    def __init__(
        self,
        channel: Channel,
        objective: ObjectiveCall,
        group: TrainerGroup,
        interrupts: InterruptHandler,
        offers: Offers,
    ) -> None:
        self._channel = channel
        self._objective_call = objective
        self._group = group
        self._interrupts = interrupts
        self._offers = offers
        self._is_over = self._has_failed = self._has_ended = False
        self._is_reporting = self._is_waiting = False
        self._start_time = self._noted_at = time.monotonic()
        self.on_loss: Callable[[], object] = lambda: None
        self.failure_messages: list[str] = []
        self.failure_line = ""
        self.is_restored = True
        self.trial, self.folder = 0, Path()
        self.free_memory = 0

    def run(
        self, seed: int, data: Callable[[], Any], ticket: Mapping[str, Any] | None, is_compared: bool = False
    ) -> None:
        """Run the objective to its end, and send the supervisor how it has ended.

        Args:
            seed: The seed of all random generators.
            data: A function that returns the data that `prepare` has made.
            ticket: The description of a process group that this trainer must join first; None to keep its group.
            is_compared: Whether the ranks compare their collectives before each one begins.
        """
        self._interrupts.begin_evaluation()
        joined = self._catch_failure(lambda: self._enter_group(ticket, is_compared))
        if isinstance(joined, dict):
            self._send_message("end", **{**joined, "place": "", "traceback": ""})
            return
        free, warning = joined
        self._send_message("joined", free_memory=free, warning=warning)
        worker = self._make_worker(seed, data)
        state = ProcessState()
        self._group.memory.begin_evaluation()
        set_worker(worker)
        while not self._is_over:
            self._advance(worker)
        if not self._has_failed:
            self._send_message("end", **self._offers.reads)
        self._close_objective()
        set_worker(None)
        self.is_restored = state.restore()
        self._has_ended = True

    def _make_worker(self, seed: int, data: Callable[[], Any]) -> Worker:
        calls = WorkerCallbacks(
            data,
            self._offers.offer_weights,
            self._process_report,
            self._offers.save_checkpoint,
            self._load_checkpoint,
            self._load_parent_checkpoint,
        )
        worker = self._group.make_worker(seed, calls)
        worker.trial, worker._folder = self.trial, self.folder
        return worker

    def _enter_group(self, ticket: Mapping[str, Any] | None, is_compared: bool) -> tuple[int, str]:
        """Join the process group, and return the free memory of the device, and a warning if it is too little."""
        if ticket is not None:
            self._group.join(ticket)
        self._group.compare_collectives(is_compared)
        return self._group.memory.await_free(self.free_memory)

    # Reports

    def _advance(self, worker: Worker) -> None:
        """Run the objective to its next yield, or to its end, and report it."""
        result = self._catch_failure(lambda: self._objective_call.advance_to_loss(worker))
        if self._is_over:
            return
        if isinstance(result, dict):
            self._send_failure(result)
        else:
            self._report(result, self._objective_call.list_frames())

    def _process_report(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Report a loss that the objective passes to `worker.report`.

        Raises Cancelled if the evaluation is over, and RuntimeError if the caller is not the objective.
        """
        if is_forked():
            raise RuntimeError("worker.report must be called by the worker's ranks, not by processes that they fork")
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RuntimeError(f"worker.report must be called in the main thread, got a call in {name}")
        if self._is_reporting:
            raise RuntimeError("worker.report must not be called in a function given to worker.offer_weights")
        if self._has_ended or not self._interrupts.allows_cancellation:
            raise RuntimeError("worker.report must not be called after the evaluation of its worker has ended")
        with self._interrupts.block_cancellation():
            if not self._is_over:
                self._check_and_report(loss, metrics, extract_current_frames())
        if self._is_over or self._interrupts.is_cancel_requested:
            raise Cancelled
        self._start_time = time.monotonic()

    def _check_and_report(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> None:
        try:
            if self._interrupts.is_cancel_requested:  # The objective has caught Cancelled.
                raise Cancelled
            report = parse_report(loss, metrics)
        except (Cancelled, RuntimeError, TypeError, ValueError) as error:
            self._send_failure(self._make_failed_end(error, frames))
            return
        self._objective_call.has_loss = True
        self._report(report, frames)

    def _report(self, report: tuple[float, dict[str, float]] | None, frames: Frames) -> None:
        """Agree with the other ranks on a loss, or on the end of the objective if `report` is None."""
        _flush_streams()
        self._start_time = time.monotonic()
        self._is_reporting = True
        try:
            self._agree_on_report(report, frames)
        except BaseException as error:
            end_if_forked(error)
            self._send_failure(self._make_failed_end(error, frames))
        finally:
            self._is_reporting = self._is_waiting = False
            self._offers.clear()

    def _agree_on_report(self, report: tuple[float, dict[str, float]] | None, frames: Frames) -> None:
        """Exchange the report with the other ranks, and obey the leader's answer."""
        exchange, answer = self._group.exchange, None
        self._is_waiting = True
        with self._interrupts.allow_cancellation():
            parts = exchange.collect(self._make_part(report, frames))
        if parts is not None:
            answer = self._ask_leader(parts, report)
        with self._interrupts.allow_cancellation():
            answer = exchange.broadcast(answer)
            self._is_waiting = False
            self._offers.gather(self._objective_call, answer)
        if parts is not None:
            self._send_copies(answer)
        self._is_over = not answer.continues
        self._note_progress()
        if report is not None:
            self._offers.forget_read_checkpoints()
            self.on_loss()

    def _note_progress(self) -> None:
        """Let the supervisor know, at most five times per second, that the objective does not hang."""
        if self._group.rank > 0 and time.monotonic() - self._noted_at > _SECONDS_BETWEEN_NOTES:
            self._noted_at = time.monotonic()
            self._send_message("reported")

    def _make_part(self, report: tuple[float, dict[str, float]] | None, frames: Frames) -> ReportPart:
        return ReportPart(
            self._group.rank,
            loss=None if report is None else report[0],
            position=self._objective_call.find_line(frames),
            has_ended=self._objective_call.has_ended,
            gathers_weights=self._offers.gathers_weights,
            gathers_checkpoint=self._offers.gathers_checkpoint,
        )

    def _ask_leader(self, parts: Sequence[ReportPart], report: tuple[float, dict[str, float]] | None) -> ReportAnswer:
        """Send a report to the leader, and return its answer. If the objective has ended on all ranks, there is none.

        Only the trainer of rank 0 calls this: its supervisor is the leader.
        """
        mistake = find_difference(parts)
        if report is None and not mistake:
            return ReportAnswer(continues=False)
        self._send_message(
            "report",
            loss=next(part.loss for part in parts if part.loss is not None),
            metrics={} if report is None else report[1],
            mistake=mistake,
            is_last=all(part.has_ended for part in parts),
            offers_weights=self._offers.offers_weights,
            has_saved=self._offers.has_saved,
            **self._offers.reads,
        )
        return ReportAnswer(**self._receive_answer().content)

    def _send_copies(self, answer: ReportAnswer) -> None:
        """Send the leader copies of the weights and the checkpoint that it has requested."""
        if answer.keeps_weights or answer.saves_checkpoint:
            copies = self._offers.copy(answer)
            self._send_message("kept", copies.descriptors, kinds=copies.kinds, errors=copies.errors)
            copies.close()

    # The end of the objective

    def _send_failure(self, end: dict[str, Any]) -> None:
        self._send_message("end", **end)
        self._is_over = self._has_failed = True

    def _make_failed_end(self, error: BaseException, frames: Frames = ()) -> dict[str, Any]:
        """Return the content of a message about the exception that has ended the objective."""
        _flush_streams()
        seconds = time.monotonic() - self._start_time
        reason = f"{type(error).__name__}: {format_with_hint(error)}"
        is_cancelled = isinstance(error, Cancelled) or self._interrupts.is_cancel_requested
        frames = [*frames, *extract_error_frames(error)]
        if not frames and not self._is_waiting:  # A rank that waits without a frame has ended its objective.
            frames = self._objective_call.list_frames() or self._objective_call.list_definition_frames()
        self.failure_messages, self.failure_line = _list_messages(error), self._objective_call.find_line(frames)
        return {
            "failure": reason,
            "is_cancelled": is_cancelled,
            "diverged": has_diverged(error),
            "echo": any(text in reason for text in CONNECTION_ERRORS)
            or (_TIMEOUT_CLOSURE in reason and seconds < default_group.timeout.total_seconds()),
            "gave_up": isinstance(error, RuntimeError) and any(text in reason for text in TIMEOUT_ERRORS),
            "seconds": seconds,
            "at": time.time(),
            "place": self.failure_line,
            "has_reported": self._is_waiting,
            "is_offer": self._is_reporting and not self._is_waiting,
            "traceback": format_stack(frames) if isinstance(error, Cancelled) else format_traceback(error, frames),
            **self._offers.reads,
        }

    def _catch_failure(self, act: Callable[[], T]) -> T | dict[str, Any]:
        """Call `act`, which runs code of the objective. Return its result, or a description of its exception."""
        self._start_time = time.monotonic()
        try:
            with self._interrupts.allow_cancellation():
                result = act()
        except BaseException as error:
            end_if_forked(error)
            if not self._is_over:
                return self._make_failed_end(error)
            _log_error(error)  # It was raised because the evaluation was over.
            return {}
        end_if_forked()
        return result

    def _close_objective(self) -> None:
        """End an objective that has not ended by itself, and log the exception that it may raise."""
        try:
            self._objective_call.close()
        except BaseException as error:
            _log_error(error)

    # Callbacks of the worker

    def _load_checkpoint(self) -> Any:
        state, losses = self._offers.load_checkpoint(self._objective_call.has_loss)
        self._objective_call.has_loss |= losses > 0
        return state

    def _load_parent_checkpoint(self) -> Any:
        return self._offers.load_parent_checkpoint(self._objective_call.has_loss)

    # Messages

    def _send_message(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        try:
            self._channel.send(kind, descriptors, **content)
        except ChannelClosed:
            os._exit(1)  # The objective could catch an exception.

    def _receive_answer(self) -> Message:
        """Return the leader's answer to a report. End this process if the connection is closed."""
        try:
            message = self._channel.receive()
        except ChannelClosed:
            message = None
        if message is None:
            os._exit(1)
        return message


def _list_messages(error: BaseException | None) -> list[str]:
    """Return the messages of an exception and of its causes and contexts."""
    messages: list[str] = []
    while error is not None and len(messages) < _MAX_MESSAGES:
        messages.append(format_error(error))
        error = error.__cause__ or error.__context__
    return messages


def _flush_streams() -> None:
    """Send the printed output of the objective to the supervisor, including incomplete lines."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # The objective may have closed the stream.
            stream.flush()


def _log_error(error: BaseException) -> None:
    """Log an exception that an objective has raised while it was closed, except Cancelled."""
    if not isinstance(error, Cancelled):
        text = "".join(traceback.format_exception(error))
        logging.getLogger(__name__).info("while an objective was closed:\n%s", text)
