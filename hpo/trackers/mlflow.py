"""Show individuals as MLflow runs under one parent run, in the run directory or on a server."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Telemetry would send data to MLflow's own servers.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking.client import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from hpo.errors import UsageError
from hpo.store.evaluations import Evaluation
from hpo.store.storage_url import mask_password
from hpo.trackers.tracker import (
    LOSS_CURVE,
    TrackedRun,
    clean_name,
    clean_text,
    collect_context,
    collect_results,
    convert_params,
    find_timestamp,
    make_title,
)

_STATUSES = {"complete": "FINISHED", "failed": "FAILED"}


class MLflow:
    """Tracker for MLflow: one run per individual, under a parent run for the whole search.

    The environment variable MLFLOW_TRACKING_URI selects the server; the default is
    RUN_DIR/mlflow/mlflow.db. MLFLOW_EXPERIMENT_NAME selects the experiment; the default is the name
    of the search space.
    """

    def __init__(self, shown: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        self.destination = mask_password(uri) if uri else "here"
        self._folder = None if uri else shown.folder.absolute()
        self._client = MlflowClient(uri or _find_local_store(shown.folder.absolute()))
        self._run_ids: dict[str, str] = {}  # by name, paused and interrupted runs included
        self._is_resumed = False
        self._experiment = self._find_experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME") or shown.project_name
        )
        self._parent = self._find_parent(shown) or self._make_parent(shown)
        self._open_names: set[str] = set()

    def show_individual(
        self, evaluation: Evaluation, losses: Mapping[int, float], from_start: bool
    ) -> None:
        """Show the current state of an individual as an MLflow run."""
        name = make_title(evaluation)
        now = _to_milliseconds(find_timestamp(evaluation))
        metrics = [Metric(LOSS_CURVE, loss, now, epoch) for epoch, loss in losses.items()]
        given: list[Param] = []
        if from_start:
            self._remove_run(name)
            context = {key: str(value) for key, value in collect_context(evaluation).items()}
            context["mlflow.parentRunId"] = self._parent
            started = _to_milliseconds(evaluation.started)
            made = self._client.create_run(self._experiment, started, context, name)
            self._run_ids[name] = str(made.info.run_id)
            self._open_names.add(name)
            given = _make_params(convert_params(evaluation))
        run = self._run_ids[name]
        if evaluation.state == "running":
            self._log_batches(run, metrics, given, [])
            return
        last = max(evaluation.curve, default=0)
        results = collect_results(evaluation)
        metrics += [Metric(result, value, now, last) for result, value in results.items()]
        tags = [RunTag("state", evaluation.state)]
        if evaluation.failure:
            tags.append(RunTag("failure", clean_text(evaluation.failure)))
        status = _STATUSES.get(evaluation.state, "KILLED")
        self._log_batches(run, metrics, given, tags)
        self._client.set_terminated(run, status, now)
        self._open_names.remove(name)
        if status != "KILLED":
            del self._run_ids[name]

    def close(self, is_budget_spent: bool) -> None:
        """End the parent run and all runs that are still open."""
        for name in self._open_names:
            self._client.set_terminated(self._run_ids[name], "KILLED")
        self._client.set_terminated(self._parent, "FINISHED" if is_budget_spent else "KILLED")

    def _find_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = (self._folder / "artifacts").as_uri() if self._folder else None
        try:
            return str(self._client.create_experiment(name, artifacts))
        except MlflowException:  # Another run has created the experiment in the meantime.
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _find_parent(self, shown: TrackedRun) -> str | None:
        """Return the parent run of an earlier session, and end the child runs left open.

        Return None if no parent run exists yet.
        """
        found = self._client.search_runs(
            [self._experiment], f"tags.hpo_run = '{shown.id}'", max_results=1
        )
        if not found:
            return None
        parent = str(found[0].info.run_id)
        self._client.update_run(parent, "RUNNING")
        left = f"tags.\"mlflow.parentRunId\" = '{parent}' and attributes.status = 'RUNNING'"
        for run in self._client.search_runs(
            [self._experiment], left, ViewType.ALL, max_results=10_000
        ):
            self._client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))
        self._is_resumed = True
        return parent

    def _make_parent(self, shown: TrackedRun) -> str:
        run = shown.manifest
        tags = {
            "hpo_run": shown.id,
            "kind": "search",
            "mlflow.source.name": clean_text(run.command),
        }
        made = self._client.create_run(self._experiment, tags=tags, run_name=shown.name)
        values = {clean_name(name): value for name, value in run.settings.items()}
        for name in ("budget", "seed", "pruner", "confirm_seeds"):
            values[f"search.{name}"] = getattr(run, name)
        values["search.propagators"] = ",".join(run.propagators)
        self._log_batches(made.info.run_id, [], _make_params(values), [])
        return str(made.info.run_id)

    def _remove_run(self, name: str) -> None:
        """Delete all runs of an individual. A new run then replaces them."""
        earlier = {self._run_ids.pop(name)} if name in self._run_ids else set()
        if self._is_resumed:
            of_name = f"tags.\"mlflow.parentRunId\" = '{self._parent}'"
            of_name += f" and attributes.run_name = '{name}'"
            found = self._client.search_runs([self._experiment], of_name)
            earlier |= {run.info.run_id for run in found}
        for run in earlier:
            self._client.delete_run(run)

    def _log_batches(
        self, run: str, metrics: list[Metric], given: list[Param], tags: list[RunTag]
    ) -> None:
        """Log in batches that a server accepts: 1,000 items, with 100 parameters and 100 tags."""
        while metrics or given or tags:
            self._client.log_batch(run, metrics[:800], given[:100], tags[:100])
            metrics = metrics[800:]
            given = given[100:]
            tags = tags[100:]


def _make_params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(name, clean_text(str(value))) for name, value in values.items()]


def _find_local_store(folder: Path) -> str:
    # Their meaning in a URL depends on the version of SQLAlchemy.
    if {"?", "%"} & set(str(folder)):
        raise UsageError(
            f"MLflow's local store must have a path without ? and %, got {folder}. Set "
            "MLFLOW_TRACKING_URI."
        )
    event.listen(Engine, "connect", _disable_sync)
    if not (folder / "mlflow.db").exists():
        # MLflow cannot open a database that is incomplete because the process was killed.
        for path in folder.glob("new.db*"):
            path.unlink()
        MlflowClient(f"sqlite:///{folder}/new.db")
        (folder / "new.db").rename(folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


def _disable_sync(connection: object, _: object) -> None:
    """Let SQLite write without waiting for the disk, because it would wait 7 times per evaluation.

    The waits would slow down the ranks that write to the study on the same disk. The database is
    only a copy of the study. If a crash of the host damages it, `hpo track` can write it again.
    """
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


def _to_milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
