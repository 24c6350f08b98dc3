"""Run one evaluation in a trainer: send each loss to the supervisor, and continue or end as the supervisor decides.

The trainer is the process that runs the objective for one rank. The supervisor is the MPI process of that rank. The
trainer sends steps (a loss, the end of the objective, or a failure), and the supervisor answers with a verdict.
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
from hpo.trainer.process_group import default_group
from hpo.trainer.process_state import ProcessState
from hpo.trainer.snapshot_buffer import SnapshotBuffer
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
        snapshots: SnapshotBuffer,
    ) -> None:
        self._channel = channel
        self._objective_call = objective
        self._group = group
        self._interrupts = interrupts
        self._snapshots = snapshots
        self._is_over = self._has_ended = False
        self._last_step: dict[str, Any] | None = None
        self._is_processing_step = False
        self._start_time = time.monotonic()
        self.on_loss: Callable[[], object] = lambda: None
        self.failure_messages: list[str] = []
        self.failure_line = ""
        self.is_restored = True
        self.trial, self.folder = 0, Path()
        self.free_memory = 0

    def run(
        self, seed: int, data: Callable[[], Any], ticket: Mapping[str, Any] | None, is_compared: bool = False
    ) -> dict[str, Any] | None:
        """Run the objective to its end. Return its final step if the caller must still send it; None otherwise.

        The caller sends it after checking this process. Failures, and steps that gather data, are sent at once.

        Args:
            seed: The seed of all random generators.
            data: A function that returns the data that `prepare` has made.
            ticket: The description of a process group that this trainer must join first; None to keep its group.
            is_compared: Whether the ranks compare their collectives before each one begins.
        """
        self._interrupts.begin_evaluation()
        joined = self._catch_failure(lambda: self._enter_group(ticket, is_compared))
        if isinstance(joined, dict):
            self._send_message("step", **{**joined, "place": "", "traceback": ""})
            return None
        free, warning = joined
        self._send_message("joined", free_memory=free, warning=warning)
        calls = WorkerCallbacks(
            data,
            self._snapshots.offer_weights,
            self._process_report,
            self._snapshots.save_checkpoint,
            self._load_checkpoint,
            self._load_parent_checkpoint,
        )
        worker = self._group.make_worker(seed, calls)
        worker.trial, worker._folder = self.trial, self.folder
        state = ProcessState()
        self._group.memory.begin_evaluation()
        set_worker(worker)
        while not self._is_over:
            self._advance(worker)
        self._close_objective()
        set_worker(None)
        self.is_restored = state.restore()
        self._has_ended = True
        return self._last_step

    def _enter_group(self, ticket: Mapping[str, Any] | None, is_compared: bool) -> tuple[int, str]:
        """Join the process group, and return the free memory of the device, and a warning if it is too little."""
        if ticket is not None:
            self._group.join(ticket)
        self._group.compare_collectives(is_compared)
        return self._group.memory.await_free(self.free_memory)

    # Steps

    def _advance(self, worker: Worker) -> None:
        """Run the objective to its next yield, or to its end, and process the step."""
        result = self._catch_failure(lambda: self._objective_call.advance_to_loss(worker))
        if not self._is_over:
            frames = self._objective_call.list_frames()
            self._process_step(result if isinstance(result, dict) else self._make_step(result, frames), frames)

    def _process_report(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Process a loss that the objective passes to `worker.report`.

        Raises Cancelled if the evaluation is over, and RuntimeError if the caller is not the objective.
        """
        if is_forked():
            raise RuntimeError("worker.report must be called by the worker's ranks, not by processes that they fork")
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RuntimeError(f"worker.report must be called in the main thread, got a call in {name}")
        if self._is_processing_step:
            raise RuntimeError("worker.report must not be called in a function given to worker.offer_weights")
        if self._has_ended or not self._interrupts.allows_cancellation:
            raise RuntimeError("worker.report must not be called after the evaluation of its worker has ended")
        with self._interrupts.block_cancellation():
            if not self._is_over:
                self._process_step(
                    self._make_report_step(loss, metrics, extract_current_frames()), extract_current_frames()
                )
        if self._is_over:
            raise Cancelled
        self._start_time = time.monotonic()

    def _make_report_step(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> dict[str, Any]:
        try:
            if self._interrupts.is_cancel_requested:  # The objective has caught Cancelled.
                raise Cancelled
            report = parse_report(loss, metrics)
        except (Cancelled, RuntimeError, TypeError, ValueError) as error:
            return self._make_failed_step(error, frames)
        self._objective_call.has_loss = True
        return self._make_step(report, frames)

    def _process_step(self, step: dict[str, Any], frames: Frames) -> None:
        """Send a step to the supervisor, and obey the verdict: copy weights and state, then continue or end."""
        self._is_processing_step = True
        try:
            if step.get("failure") is not None:
                self._send_message("step", **step)
                self._is_over = True
                return
            if step["ended"] and not (step["gathers"] or step["saves"]):
                self._is_over, self._last_step = True, step
                return
            verdict = self._request_verdict("step", **step)
            if verdict["gathers"]:
                failed = self._catch_failure(
                    lambda: self._snapshots.gather_offers(self._objective_call, verdict), frames
                )
                if failed is not None:
                    self._send_message("gathered", **failed)
                    self._is_over = True
                    return
                verdict = self._request_verdict("gathered", place=step["place"])
            if (kept := self._snapshots.copy_requested(verdict)) is not None:
                self._send_message("kept", **kept)
            self._is_over = not verdict["goes_on"]
            if verdict["has_loss"]:
                self.on_loss()
        finally:
            self._is_processing_step = False
            if self._last_step is None:
                self._snapshots.clear_offers()

    def _make_step(self, report: tuple[float, dict[str, float]] | None, frames: Frames) -> dict[str, Any]:
        _flush_streams()
        loss, metrics = report if report is not None else (None, {})
        line, ended = self._objective_call.find_line(frames), self._objective_call.has_ended
        return {"loss": loss, "metrics": metrics, "place": line, "ended": ended, **self._snapshots.make_flags()}

    def _make_failed_step(self, error: BaseException, frames: Frames) -> dict[str, Any]:
        """Return a step that describes an exception of the objective."""
        _flush_streams()
        seconds = time.monotonic() - self._start_time
        reason = f"{type(error).__name__}: {format_with_hint(error)}"
        is_cancelled = isinstance(error, Cancelled) or self._interrupts.is_cancel_requested
        frames = (
            [*frames, *extract_error_frames(error)]
            or self._objective_call.list_frames()
            or self._objective_call.list_definition_frames()
        )
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
            "traceback": format_stack(frames) if isinstance(error, Cancelled) else format_traceback(error, frames),
            **self._snapshots.make_flags(),
        }

    def _catch_failure(self, act: Callable[[], T], frames: Frames = ()) -> T | dict[str, Any]:
        """Call `act`, which runs code of the objective. Return its result, or a failed step if it raises an exception.

        If `act` does not run the objective itself, `frames` are the objective's frames, which begin the traceback.
        """
        self._start_time = time.monotonic()
        try:
            with self._interrupts.allow_cancellation():
                result = act()
        except BaseException as error:
            end_if_forked(error)
            if not self._is_over:
                return self._make_failed_step(error, frames)
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
        state, losses = self._snapshots.load_checkpoint(self._objective_call.has_loss)
        self._objective_call.has_loss |= losses > 0
        return state

    def _load_parent_checkpoint(self) -> Any:
        return self._snapshots.load_parent_checkpoint(self._objective_call.has_loss)

    # Messages

    def _send_message(self, kind: str, **content: Any) -> None:
        try:
            self._channel.send(kind, **content)
        except ChannelClosed:
            os._exit(1)  # The objective could catch an exception.

    def _request_verdict(self, kind: str, **content: Any) -> Message:
        """Send a message, and return the verdict of the supervisor. End this process if the connection is closed."""
        self._send_message(kind, **content)
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
