"""Write event files for TensorBoard, in a folder per individual.

The files are written with TensorBoard's own modules, which need neither TensorFlow nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpo.store.evaluations import Evaluation
from hpo.trackers.tracker import (
    LOSS_CURVE,
    TrackedRun,
    clean_text,
    collect_results,
    convert_params,
    find_timestamp,
    make_title,
)


class TensorBoard:
    """Tracker for TensorBoard: event files in RUN_DIR/tensorboard."""

    destination = "here"

    def __init__(self, shown: TrackedRun) -> None:
        self._folder = shown.folder
        self._writers: dict[str, EventFileWriter] = {}

    def show_individual(
        self, evaluation: Evaluation, losses: Mapping[int, float], from_start: bool
    ) -> None:
        """Write the current state of an individual to its event file."""
        name = make_title(evaluation)
        if from_start:
            self._start_individual(evaluation)
        for epoch, loss in losses.items():
            self._write_summary(evaluation, _make_scalar(LOSS_CURVE, loss), epoch)
        if evaluation.state == "running":
            self._writers[name].flush()
            return
        last = max(evaluation.curve, default=0)
        for result, value in collect_results(evaluation).items():
            self._write_summary(evaluation, _make_scalar(result, value), last)
        if evaluation.failure:
            self._write_summary(evaluation, text_pb("failure", clean_text(evaluation.failure)))
        self._write_summary(evaluation, _make_session_end(evaluation))
        self._writers.pop(name).close()

    def close(self, is_budget_spent: bool) -> None:  # noqa: ARG002
        """Close all open files."""
        for writer in self._writers.values():
            writer.close()

    def _start_individual(self, evaluation: Evaluation) -> None:
        """Open a new event file, and delete earlier files of the individual."""
        name = make_title(evaluation)
        if name in self._writers:
            self._writers.pop(name).close()
        earlier = list((self._folder / name).glob("events.*"))
        for path in earlier:
            path.unlink()
        writer = self._writers[name] = EventFileWriter(str(self._folder / name))
        if earlier:  # This event makes a running TensorBoard discard the steps that it has read.
            log = SessionLog(status=SessionLog.START)
            now = find_timestamp(evaluation)
            writer.add_event(Event(wall_time=now, step=0, session_log=log))
        params = convert_params(evaluation)
        self._write_summary(
            evaluation, hparams_pb(params, trial_id=name, start_time_secs=evaluation.started)
        )

    def _write_summary(self, evaluation: Evaluation, summary: Summary, step: int = 0) -> None:
        self._writers[make_title(evaluation)].add_event(
            Event(wall_time=find_timestamp(evaluation), step=step, summary=summary)
        )


def _make_scalar(name: str, value: float) -> Summary:
    """Return a number in the older format, which torch also writes, and other programs read."""
    return Summary(value=[Summary.Value(tag=name, simple_value=value)])


def _make_session_end(evaluation: Evaluation) -> Summary:
    """Return a record that an evaluation has ended, for TensorBoard's HParams tab.

    TensorBoard's own function for this record is not used, because it needs TensorFlow.
    """
    status = api_pb2.STATUS_SUCCESS if evaluation.has_succeeded else api_pb2.STATUS_FAILURE
    end = HParamsPluginData(
        session_end_info=SessionEndInfo(status=status, end_time_secs=find_timestamp(evaluation))
    )
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(end),
        tensor=metadata.NULL_TENSOR,
    )
    return Summary(value=[value])
