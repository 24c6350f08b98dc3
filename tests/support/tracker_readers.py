"""Read the evaluations that trackers have stored, with the trackers' own packages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking.client import MlflowClient

_OWN_METRICS = ("loss", "lowest_loss", "seconds")


@dataclass
class TrackedEvaluation:
    """An evaluation as a tracker shows it.

    `ending` is "well" or "badly", and empty while the evaluation runs.
    """

    params: dict[str, Any]
    curve: dict[int, float] = field(default_factory=dict)
    loss: float = math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    ending: str = ""
    failure: str = ""


def read_tensorboard(run_dir: Path) -> dict[str, TrackedEvaluation]:
    """Read the evaluations in the event files of a run with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    shown = {}
    for folder in (path for path in (run_dir / "tensorboard").iterdir() if path.is_dir()):
        assert len(list(folder.iterdir())) == 1
        read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        read.Reload()
        start = metadata.parse_session_start_info_plugin_data(
            read.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
        )
        assert start.group_name == folder.name
        values = {
            name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()
        }
        last = {tag: read.Scalars(tag)[-1].value for tag in read.Tags()["scalars"]}
        ending, failure = "", ""
        if metadata.SESSION_END_INFO_TAG in read.Tags()["tensors"]:
            end = metadata.parse_session_end_info_plugin_data(
                read.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
            )
            ending = {api_pb2.STATUS_SUCCESS: "well", api_pb2.STATUS_FAILURE: "badly"}[end.status]
        if "failure" in read.Tags()["tensors"]:
            failure = read.Tensors("failure")[0].tensor_proto.string_val[0].decode()
        curve = (
            {event.step: event.value for event in read.Scalars("loss")} if "loss" in last else {}
        )
        metrics = {tag: value for tag, value in last.items() if tag not in _OWN_METRICS}
        shown[folder.name] = TrackedEvaluation(
            values, curve, last.get("lowest_loss", math.inf), metrics, ending, failure
        )
    return shown


def read_mlflow(run_dir: Path) -> dict[str, TrackedEvaluation]:
    """Read the evaluations in the local MLflow store of a run with MLflow's client."""
    client, runs, parent = _open_mlflow(run_dir)
    assert parent.info.run_name == run_dir.name
    assert parent.data.params["epochs"] == "2"
    shown = {}
    for run in runs:
        data, info = run.data, run.info
        if info.run_id == parent.info.run_id:
            continue
        assert data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert {"island", "worker", "generation", "propagator", "trial"} <= data.tags.keys()
        curve = {
            metric.step: metric.value for metric in client.get_metric_history(info.run_id, "loss")
        }
        metrics = {name: value for name, value in data.metrics.items() if name not in _OWN_METRICS}
        state = data.tags.get("state", "left")
        assert info.status == {"complete": "FINISHED", "failed": "FAILED"}.get(state, "KILLED")
        ending = "well" if state in ("complete", "pruned") else "badly"
        failure = data.tags.get("failure", "")
        assert info.run_name is not None
        assert info.run_name not in shown
        loss = data.metrics.get("lowest_loss", math.inf)
        shown[info.run_name] = TrackedEvaluation(
            {name: _parse_value(text) for name, text in data.params.items()},
            curve,
            loss,
            metrics,
            ending,
            failure,
        )
    return shown


def read_mlflow_status(run_dir: Path) -> str:
    """Return the status of the MLflow run that is the parent of all evaluations."""
    return str(_open_mlflow(run_dir)[2].info.status)


def _open_mlflow(run_dir: Path) -> tuple[MlflowClient, list[Run], Run]:
    from mlflow.tracking.client import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.absolute()}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("quick")
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id]))
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return client, runs, parent


def _parse_value(text: str) -> Any:
    """Convert the text of a parameter to a value, because MLflow stores parameters as text."""
    with suppress(ValueError):
        return float(text)
    return {"True": True, "False": False}.get(text, text)


def read_wandb(run_dir: Path) -> dict[str, TrackedEvaluation]:
    """Read the evaluations in wandb's offline files, as `wandb sync` does."""
    shown = {}
    for path in (run_dir / "wandb").glob("offline-run-*/run-*.wandb"):
        name, group = "", ""
        config: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        curve, ending = {}, ""
        for record in _parse_wandb_records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name, group = record.run.display_name, record.run.run_group
                config |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            elif kind == "history":
                row = {
                    (item.key or item.nested_key[0]): json.loads(item.value_json)
                    for item in record.history.item
                }
                curve[row["_step"]] = row["loss"]
            elif kind == "summary":
                items = record.summary.update
                summary |= {
                    (item.key or item.nested_key[0]): json.loads(item.value_json) for item in items
                }
            elif kind == "exit":
                ending = "badly" if record.exit.exit_code else "well"
        assert name not in shown
        assert group == run_dir.name
        assert {"island", "worker", "generation", "propagator", "trial"} <= config["search"].keys()
        values = {key: value for key, value in config.items() if key not in ("search", "_wandb")}
        metrics = {
            key: value
            for key, value in summary.items()
            if key not in (*_OWN_METRICS, "state", "failure")
        }
        metrics = {key: value for key, value in metrics.items() if not key.startswith("_")}
        loss = summary.get("lowest_loss", math.inf)
        shown[name] = TrackedEvaluation(
            values, curve, loss, metrics, ending, summary.get("failure", "")
        )
    return shown


def _parse_wandb_records(content: bytes) -> Iterator[Any]:
    """Parse a file in LevelDB's log format: blocks of 32 KiB with parts of records."""
    # The stubs of the module lack its messages.
    record: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    position, content_so_far = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", content, position)
        content_so_far += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # Kind 1 is a whole record, and kind 4 its last part.
            yield record.FromString(content_so_far)
            content_so_far = b""


READERS: dict[str, Callable[[Path], dict[str, TrackedEvaluation]]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}
