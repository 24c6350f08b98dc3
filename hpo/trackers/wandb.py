"""Show individuals as Weights & Biases runs in one group, offline if no account is configured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# It would send data to wandb's servers, even offline.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from hpo.store.evaluations import Evaluation
from hpo.trackers.tracker import (
    LOSS_CURVE,
    TrackedRun,
    clean_text,
    collect_context,
    collect_results,
    convert_params,
    make_title,
)

# wandb's own statistics take 0.15 s per run, and would describe this process instead of the
# training processes.
_MINIMAL_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}

_CONTEXT_KEY = "search"  # key in the config of a run, next to its hyperparameters


class WandB:
    """Tracker for Weights & Biases: one run per individual, in a group for the whole search.

    The environment variables of wandb are used, such as WANDB_MODE, WANDB_DIR and WANDB_PROJECT. By
    default, files are in RUN_DIR/wandb.
    """

    def __init__(self, shown: TrackedRun) -> None:
        self._shown = shown
        self._mode = os.environ.get("WANDB_MODE", "")
        if not self._mode and wandb.login(prompt=False):
            self._mode = "online"
        elif not self._mode:
            self._mode = "offline"
            shown.notify(
                f"no account is configured, so runs are stored offline. "
                f"To upload them: wandb sync {shown.folder}/offline-run-*"
            )
        self._dir = None if os.environ.get("WANDB_DIR") else str(shown.folder.parent)
        self.destination = self._mode
        if self._mode in ("offline", "dryrun"):
            self.destination = os.environ.get("WANDB_DIR", "here")
        self._runs: dict[str, wandb.Run] = {}

    def show_individual(
        self, evaluation: Evaluation, losses: Mapping[int, float], from_start: bool
    ) -> None:
        """Show the current state of an individual as a run of Weights & Biases."""
        name = make_title(evaluation)
        if from_start:
            self._remove_run(name)
            self._runs[name] = self._make_run(evaluation)
        run = self._runs[name]
        for epoch, loss in losses.items():
            run.log({LOSS_CURVE: loss}, step=epoch)
        if evaluation.state == "running":
            return
        run.summary.update({**collect_results(evaluation), "state": evaluation.state})
        if evaluation.failure:
            run.summary["failure"] = clean_text(evaluation.failure)
        run.finish(exit_code=0 if evaluation.has_succeeded else 1)
        del self._runs[name]

    def close(self, is_budget_spent: bool) -> None:  # noqa: ARG002
        """End all open runs and wandb's own process."""
        for run in self._runs.values():
            run.finish(exit_code=1)
        wandb.teardown()

    def _make_run_id(self, name: str) -> str:
        return f"{self._shown.id}-{name}"

    def _remove_run(self, name: str) -> None:
        """Delete the offline files of an individual. On a server, a new run replaces it."""
        if name in self._runs:
            self._runs.pop(name).finish(exit_code=1)
        folder = Path(os.environ.get("WANDB_DIR") or self._shown.folder.parent) / "wandb"
        for path in folder.glob(f"offline-run-*-{self._make_run_id(name)}"):
            shutil.rmtree(path, ignore_errors=True)

    def _make_run(self, evaluation: Evaluation) -> wandb.Run:
        name = make_title(evaluation)
        made = collect_context(evaluation)
        return wandb.init(
            id=self._make_run_id(name),
            name=name,
            project=os.environ.get("WANDB_PROJECT") or self._shown.project_name,
            group=os.environ.get("WANDB_RUN_GROUP") or self._shown.name,
            job_type=str(made.pop("kind")),
            config={**convert_params(evaluation, taken=(_CONTEXT_KEY,)), _CONTEXT_KEY: made},
            dir=self._dir,
            mode=self._mode,  # type: ignore[arg-type] # wandb checks the mode itself.
            reinit="create_new",
            settings=wandb.Settings(**_MINIMAL_SETTINGS, x_start_time=evaluation.started),
        )
