"""Run one evaluation in a trainer: call the objective, agree on each loss, and obey the answer.

The trainers of a worker agree among themselves. Only the trainer of rank 0 asks the leader, which
is its supervisor, and forwards the answer. Each trainer sends its own supervisor how its objective
has ended.
"""

from __future__ import annotations

import logging
import os
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import GeneratorType
from typing import Any, TypeVar

from hpo.evaluation_api import set_worker
from hpo.objectives import NOT_FINITE_PREFIX, parse_report, unwrap_scalar
from hpo.process.channel import Channel, ChannelClosed
from hpo.process.failure import format_stack, format_traceback, format_with_hint
from hpo.process.messages import EvaluationRequest, ObjectiveEnd, Report, ReportAnswer
from hpo.process.user_frames import (
    UserFrames,
    are_in_collective,
    extract_current_frames,
    extract_error_frames,
    extract_generator_frames,
)
from hpo.text_format import format_error
from hpo.trainer.offers import Offers
from hpo.trainer.probe import Probe
from hpo.trainer.process_state import ProcessState
from hpo.trainer.report_exchange import ReportPart, find_difference
from hpo.trainer.search_file import BoundSearch
from hpo.trainer.signals import Cancelled, InterruptHandler, end_if_forked, is_forked
from hpo.trainer.state_files import read_checkpoint_file
from hpo.trainer.trainer_group import TrainerGroup
from hpo.trainer.worker import Worker

# Messages of gloo and NCCL if a peer has closed the connection, or has crashed.
_CONNECTION_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    *("remote process exited or there was a network error", "ncclRemoteError"),
    "NCCL communicator was aborted",
)
# gloo's messages if a rank has waited too long, in a collective or in torch's check before it.
_TIMEOUT_CLOSURE = "Application timeout caused pair closure"  # It also follows an earlier timeout.
_TIMEOUT_ERRORS = (
    "Timed out waiting",
    _TIMEOUT_CLOSURE,
    "failed to pass monitoredBarrier",
    "NCCL operation timed out",
)

_MAX_MESSAGES = 10
_SECONDS_BETWEEN_NOTES = 0.2

T = TypeVar("T")
Frames = Sequence[traceback.FrameSummary]
Loss = tuple[float, dict[str, float]]  # a loss and its metrics


class ObjectiveRunner:
    """Runs an objective on one rank, while the other trainers of the worker do the same."""

    def __init__(
        self,
        channel: Channel,
        group: TrainerGroup,
        interrupts: InterruptHandler,
        search: BoundSearch,
        request: EvaluationRequest,
    ) -> None:
        self._channel = channel
        self._group = group
        self._interrupts = interrupts
        self._request = request
        rank = request.ticket.rank if request.ticket is not None else group.rank
        self._offers = Offers(rank == 0)
        self._objective_call = ObjectiveCall(search, request.params, self._offers)
        self._score = search.file.score
        self._is_over = False  # The objective must not continue.
        self._has_failed = False
        self._has_ended = False
        self._is_reporting = False
        self._is_waiting = False  # For the reports of other ranks, or for the leader's answer.
        self._start_time = time.monotonic()
        self._noted_at = self._start_time
        self._probe: Probe | None = None

    def run(self, load_data: Callable[[], Any], probe: Probe | None) -> bool:
        """Run the objective to its end, and send the supervisor how it has ended.

        `load_data` returns the data that `prepare` has made. `probe` observes the objective.

        Returns:
            Whether the state of this process was restored.
        """
        self._probe = probe
        self._interrupts.begin_evaluation()
        joined = self._catch_failure(self._enter_group)
        if isinstance(joined, ObjectiveEnd):
            self._send_message("end", **{**vars(joined), "place": "", "traceback": ""})
            return True
        free, warning = joined
        self._send_message("joined", free_memory=free, warning=warning)
        worker = self._group.make_worker(
            self._request.seed,
            trial=self._request.trial,
            _folder=Path(self._request.folder),
            _offers=self._offers,
            _load_data=load_data,
            _report=self._process_report,
        )
        state = ProcessState()
        self._group.memory.begin_evaluation()
        set_worker(worker)
        while not self._is_over:
            result = self._catch_failure(lambda: self._objective_call.advance_to_loss(worker))
            if isinstance(result, ObjectiveEnd):
                if not self._is_over:
                    self._send_failure(result)
            elif not self._is_over:
                self._report(result, self._objective_call.list_frames())
        if not self._has_failed:
            # The supervisors agree on the end while this process restores its state. They wait for
            # "idle" with a limit, since code of the user runs when a generator is closed.
            self._send_message("end", **vars(ObjectiveEnd(**self._offers.reads)))
        try:
            self._objective_call.close()  # It may not have ended by itself.
        except BaseException as error:
            _log_error(error)
        set_worker(None)
        self._has_ended = True
        return state.restore()

    def _enter_group(self) -> tuple[int, str]:
        """Read the checkpoints, and join the process group.

        Returns:
            The free memory of the device in bytes, and a warning if it is too little.
        """
        request = self._request
        if request.checkpoint:
            self._offers.checkpoint = read_checkpoint_file(Path(request.checkpoint))
        if request.parent_checkpoint:
            self._offers.parent_checkpoint = read_checkpoint_file(Path(request.parent_checkpoint))
        if request.ticket is not None:
            self._group.join(request.ticket)
        self._group.compare_collectives(request.is_compared)
        return self._group.memory.await_free(request.free_memory)

    # Reports

    def _process_report(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        """Report a loss that the objective passes to `worker.report`.

        Raises Cancelled if the evaluation is over, and RuntimeError if the caller is not the
        objective.
        """
        if is_forked():
            raise RuntimeError(
                "worker.report must be called by the worker's ranks, "
                "not by processes that they fork"
            )
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise RuntimeError(
                f"worker.report must be called in the main thread, got a call in {name}"
            )
        if self._is_reporting:
            raise RuntimeError(
                "worker.report must not be called in a function given to worker.offer_weights"
            )
        if self._has_ended or not self._interrupts.allows_cancellation:
            raise RuntimeError(
                "worker.report must not be called after the evaluation of its worker has ended"
            )
        with self._interrupts.block_cancellation():
            if not self._is_over:
                self._report_call(loss, metrics, extract_current_frames())
        if self._is_over or self._interrupts.is_cancel_requested:
            raise Cancelled
        self._start_time = time.monotonic()

    def _report_call(self, loss: Any, metrics: Mapping[str, Any], frames: Frames) -> None:
        try:
            if self._interrupts.is_cancel_requested:  # The objective has caught Cancelled.
                raise Cancelled
            report = parse_report(loss, metrics)
        except (Cancelled, RuntimeError, TypeError, ValueError) as error:
            self._send_failure(self._make_failed_end(error, frames))
            return
        self._offers.has_loss = True
        self._report(report, frames)

    def _report(self, report: Loss | None, frames: Frames) -> None:
        """Agree with the other ranks on a loss, or on the end of the objective (None)."""
        if report is not None and self._score:
            score, metrics = report
            report = -score, {**metrics, self._score: score}
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

    def _agree_on_report(self, report: Loss | None, frames: Frames) -> None:
        """Exchange the report with the other ranks, and obey the leader's answer.

        Cancelled may be raised while this rank waits for its peers, or gathers tensors. It is not
        raised while the leader decides, since the other ranks wait for the answer.
        """
        exchange = self._group.exchange
        answer = None
        part = ReportPart(
            self._group.rank,
            loss=None if report is None else report[0],
            position=self._objective_call.user_frames.find_position(frames),
            has_ended=self._objective_call.has_ended,
            gathers_weights=self._offers.gathers_weights,
            gathers_checkpoint=self._offers.gathers_checkpoint,
        )
        self._is_waiting = True
        with self._interrupts.allow_cancellation():
            parts = exchange.collect(part)
        if parts is not None:
            answer = self._ask_leader(parts, report)
        with self._interrupts.allow_cancellation():
            answer = exchange.broadcast(answer)
            self._is_waiting = False
            self._offers.gather(self._objective_call.call_gather_function, answer)
        if parts is not None and (answer.keeps_weights or answer.saves_checkpoint):
            copies = self._offers.copy(answer)
            self._send_message("kept", copies.descriptors, kinds=copies.kinds, errors=copies.errors)
            copies.close()
        self._is_over = not answer.continues
        # The supervisor is shown that the objective continues.
        if self._group.rank > 0 and time.monotonic() - self._noted_at > _SECONDS_BETWEEN_NOTES:
            self._noted_at = time.monotonic()
            self._send_message("reported")
        if report is not None:
            self._offers.forget_read_checkpoints()
            if self._probe is not None:
                self._probe.record_loss()

    def _ask_leader(self, parts: Sequence[ReportPart], report: Loss | None) -> ReportAnswer:
        """Send a report to the leader, and return its answer, on rank 0.

        The leader is not asked if the objective has ended on all ranks without another loss.
        """
        mistake = find_difference(parts)
        if report is None and not mistake:
            return ReportAnswer(continues=False)
        content = Report(
            loss=next(part.loss for part in parts if part.loss is not None),
            metrics={} if report is None else report[1],
            mistake=mistake,
            is_last=all(part.has_ended for part in parts),
            offers_weights=self._offers.offers_weights,
            has_saved=self._offers.has_saved,
            **self._offers.reads,
        )
        self._send_message("report", **vars(content))
        return self._receive_answer()

    # The end of the objective

    def _send_failure(self, end: ObjectiveEnd) -> None:
        self._send_message("end", **vars(end))
        self._is_over = self._has_failed = True

    def _make_failed_end(self, error: BaseException, frames: Frames = ()) -> ObjectiveEnd:
        """Describe the exception that has ended the objective."""
        _flush_streams()
        seconds = time.monotonic() - self._start_time
        frames = [*frames, *extract_error_frames(error)]
        # A rank that waits without a frame has ended its objective.
        if not frames and not self._is_waiting:
            frames = (
                self._objective_call.list_frames() or self._objective_call.list_definition_frames()
            )
        place = self._objective_call.user_frames.find_position(frames)
        if self._probe is not None:
            self._probe.trace.failures = []
            cause: BaseException | None = error
            while cause is not None and len(self._probe.trace.failures) < _MAX_MESSAGES:
                self._probe.trace.failures.append(format_error(cause))
                cause = cause.__cause__ or cause.__context__
            self._probe.trace.place = place
        end = describe_failure(error, frames, self._interrupts.is_cancel_requested)
        is_early_closure = (
            _TIMEOUT_CLOSURE in (end.failure or "")
            and seconds < self._group.timeout.total_seconds()
        )
        # Not str(error), which is code of the user for a class of theirs, and may fail.
        message = str(error.args[0]) if isinstance(error, ValueError) and error.args else ""
        return replace(
            end,
            diverged=message.startswith(NOT_FINITE_PREFIX),
            echo=end.echo or is_early_closure,
            seconds=seconds,
            place=place,
            has_reported=self._is_waiting,
            is_offer=self._is_reporting and not self._is_waiting,
            **self._offers.reads,
        )

    def _catch_failure(self, act: Callable[[], T]) -> T | ObjectiveEnd:
        """Return the result of `act`, which runs code of the objective, or describe its failure."""
        self._start_time = time.monotonic()
        try:
            with self._interrupts.allow_cancellation():
                result = act()
        except BaseException as error:
            end_if_forked(error)
            if not self._is_over:
                return self._make_failed_end(error)
            _log_error(error)  # It was raised because the evaluation was over.
            return ObjectiveEnd()
        end_if_forked()
        return result

    # Messages

    def _send_message(self, kind: str, descriptors: Sequence[int] = (), /, **content: Any) -> None:
        try:
            self._channel.send(kind, descriptors, **content)
        except ChannelClosed:
            os._exit(1)  # The objective could catch an exception.

    def _receive_answer(self) -> ReportAnswer:
        """Return the leader's answer to a report. End this process if the connection is closed."""
        try:
            message = self._channel.receive()
        except ChannelClosed:
            message = None
        if message is None:
            os._exit(1)
        return ReportAnswer(**message.content)


def describe_failure(
    error: BaseException, frames: Frames, is_cancelled: bool, has_worker: bool = True
) -> ObjectiveEnd:
    """Describe an exception of an objective, or of a program, which does not have a `worker`.

    The `frames` have raised it.
    """
    reason = f"{type(error).__name__}: {format_with_hint(error, has_worker)}"
    was_waiting = isinstance(error, Cancelled) and are_in_collective(frames)
    return ObjectiveEnd(
        failure=reason,
        is_cancelled=isinstance(error, Cancelled) or is_cancelled,
        echo=is_connection_error(reason) or was_waiting,
        gave_up=isinstance(error, RuntimeError) and any(text in reason for text in _TIMEOUT_ERRORS),
        at=time.time(),
        traceback=format_stack(frames)
        if isinstance(error, Cancelled)
        else format_traceback(error, frames),
    )


def is_connection_error(text: str) -> bool:
    """Return whether the text of an error means that a peer has disconnected, or has crashed."""
    return any(part in text for part in _CONNECTION_ERRORS)


class ObjectiveCall:
    """One call of the search file's objective. The first `advance_to_loss` starts it."""

    def __init__(self, search: BoundSearch, params: Mapping[str, Any], offers: Offers) -> None:
        self._search = search
        self._params = dict(params)
        self.user_frames = UserFrames(search.file.location)
        self._losses: GeneratorType[Any, Any, Any] | None = None
        self._offers = offers
        self.has_ended = False

    def advance_to_loss(self, worker: Worker) -> Loss | None:
        """Run the objective to its next loss, and return the loss with its metrics.

        Returns None if the objective has ended without another loss. If the objective has called
        `worker.report`, its return value is ignored.
        """
        if self.has_ended:
            return None
        if self._losses is None:
            assert callable(self._search.file.objective)
            settings = self._search.copy_settings()
            result = self._search.file.objective(self._params, worker, *settings)
            if not isinstance(result, GeneratorType):
                self.has_ended = True
                return None if self._offers.has_loss else parse_loss(result)
            self._losses = result
        try:
            value = next(self._losses)
        except StopIteration as end:
            self.has_ended = True
            if self._offers.has_loss:
                return None
            returned = ""
            if end.value is not None:
                returned = f", but returned {reprlib.repr(end.value)}: it has a yield somewhere"
            raise ValueError(f"the objective yielded no loss{returned}") from None
        self._offers.has_loss = True
        return parse_loss(value)

    def call_gather_function(self, function: Callable[[], Any]) -> Any:
        """Call a function that the objective has passed to `offer_weights` or `save_checkpoint`.

        In a traceback, the frame of this method marks where the user's code begins.
        """
        return function()

    def list_frames(self) -> list[traceback.FrameSummary]:
        """Return the stack frames of the `yield` at which the objective waits, if it does."""
        return extract_generator_frames(self._losses) if self._losses is not None else []

    def list_definition_frames(self) -> list[traceback.FrameSummary]:
        """Return the first line of the objective, for a failure without a frame in it."""
        objective = self._search.file.objective
        code = getattr(self._losses, "gi_code", None) or getattr(objective, "__code__", None)
        if code is None:
            return []
        return [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]

    def close(self) -> None:
        """End the objective if it has not ended by itself."""
        self.has_ended = True
        if self._losses is not None:
            self._losses.close()


def parse_loss(value: Any) -> Loss:
    """Split a value that an objective has yielded, a loss or a tuple (loss, metrics).

    Raises TypeError if the value is neither, and ValueError if the loss is not finite.
    """
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(unwrap_scalar(loss), Real):
        raise TypeError(
            f"an objective must yield its validation loss, a number, got {reprlib.repr(value)}"
        )
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a dict of numbers by name, got {reprlib.repr(metrics)}. "
            "Yield loss, {'accuracy': 0.9}"
        )
    return parse_report(loss, metrics)


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
