"""MLflow: one run per evaluation under a parent run, in a local store beside the run or on a tracking server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it asks its makers' servers, from compute nodes too

from mlflow.entities import Metric, Param, RunStatus, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.tracking.client import MlflowClient

from hpo.storage import without_password
from hpo.trackers.tracker import CURVE, Shown, circumstances, moment, name_of, params, results, text, title
from hpo.trials import Evaluation

_MOST_PARAMS = 100  # that a server takes at once
_STATUS = {"complete": "FINISHED", "failed": "FAILED"}


class MLflow:
    """Runs in MLFLOW_TRACKING_URI, and without it in RUN_DIR/mlflow/mlflow.db.

    The experiment is MLFLOW_EXPERIMENT_NAME, and without it has the name of the search space.
    """

    def __init__(self, shown: Shown) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        self.place = without_password(uri) if uri else "here"
        self._folder = None if uri else shown.folder.absolute()
        self._client = MlflowClient(uri or f"sqlite:///{self._folder}/mlflow.db")
        self._experiment = self._find_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or shown.search)
        self._parent = self._find_parent(shown) or self._make_parent(shown)
        self._runs: dict[str, str] = {}

    def start(self, evaluation: Evaluation) -> None:
        """Make a run under the parent, with the hyperparameters."""
        tags = {
            "mlflow.parentRunId": self._parent,
            **{name: str(value) for name, value in circumstances(evaluation).items()},
        }
        run = self._client.create_run(self._experiment, _ms(evaluation.started), tags, run_name=title(evaluation))
        self._runs[title(evaluation)] = run.info.run_id
        self._log_params(run.info.run_id, params(evaluation))

    def report(self, evaluation: Evaluation, losses: Mapping[int, float]) -> None:
        """Add to the metric `loss`, whose step is the epoch."""
        now = _ms(moment(evaluation))
        metrics = [Metric(CURVE, loss, now, epoch) for epoch, loss in losses.items()]
        self._client.log_batch(self._runs[title(evaluation)], metrics=metrics)

    def end(self, evaluation: Evaluation) -> None:
        """Write what came out and how the evaluation ended."""
        run, now, last = self._runs.pop(title(evaluation)), _ms(moment(evaluation)), max(evaluation.curve, default=0)
        tags = [RunTag("state", evaluation.state)]
        if evaluation.failure:
            tags.append(RunTag("failure", text(evaluation.failure)))
        metrics = [Metric(name, value, now, last) for name, value in results(evaluation).items()]
        self._client.log_batch(run, metrics=metrics, tags=tags)
        self._client.set_terminated(run, _STATUS.get(evaluation.state, "KILLED"), now)

    def close(self, spent: bool) -> None:
        """End the parent run, and what is still open."""
        for run in self._runs.values():
            self._client.set_terminated(run, "KILLED")
        self._client.set_terminated(self._parent, "FINISHED" if spent else "KILLED")

    def _find_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = (self._folder / "artifacts").as_uri() if self._folder else None
        try:
            return str(self._client.create_experiment(name, artifacts))
        except MlflowException:  # another run has made it in between
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return str(experiment.experiment_id)

    def _find_parent(self, shown: Shown) -> str | None:
        """Take up the run of an earlier session; what was going on when that died is over."""
        found = self._client.search_runs([self._experiment], f"tags.hpo_run = '{shown.id}'", max_results=1)
        if not found:
            return None
        parent = str(found[0].info.run_id)
        self._client.update_run(parent, "RUNNING")
        left = f"tags.\"mlflow.parentRunId\" = '{parent}' and attributes.status = 'RUNNING'"
        for run in self._client.search_runs([self._experiment], left, ViewType.ALL, max_results=10_000):
            self._client.set_terminated(run.info.run_id, RunStatus.to_string(RunStatus.KILLED))
        return parent

    def _make_parent(self, shown: Shown) -> str:
        about = shown.about
        tags = {"hpo_run": shown.id, "kind": "search", "mlflow.source.name": text(str(about.get("command", "")))}
        run = self._client.create_run(self._experiment, tags=tags, run_name=shown.name)
        settings = {name_of(name): value for name, value in about["settings"].items()}
        searched = {name: about[name] for name in ("budget", "seed", "pruner", "confirm")}
        searched["propagators"] = ",".join(about["propagators"])
        self._log_params(run.info.run_id, {**settings, **{f"search.{name}": v for name, v in searched.items()}})
        return str(run.info.run_id)

    def _log_params(self, run: str, values: Mapping[str, object]) -> None:
        for some in _batches([Param(name, text(str(value))) for name, value in values.items()]):
            self._client.log_batch(run, params=some)


def _batches(given: list[Param]) -> Iterator[list[Param]]:
    left = iter(given)
    while some := list(islice(left, _MOST_PARAMS)):
        yield some


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
