"""Read the results of a run from its printed lines, and from its study with Optuna alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

RESULT_LINE = re.compile(
    r"^ *(?P<done>\d+)/(?P<budget>\d+) +(?P<island>\d+) +(?P<worker>\d+) "
    r"+(?:(?P<generation>\d+) +)?(?P<loss>\S+)"
    r" +(?P<best>best|front)? +(?P<seconds>[\d.]+)  (?P<params>.*)\n",
    re.MULTILINE,
)


def parse_lines(output: str) -> list[dict[str, Any]]:
    """Parse the lines of ended evaluations in the output of a run. Incomplete lines are ignored."""
    return [match.groupdict() for match in RESULT_LINE.finditer(output)]


def load_trials(run_dir: Path, study: str = "") -> list[optuna.trial.FrozenTrial]:
    """Return the trials of a run, except tests of suspected workers, which repeat other trials."""
    backend = JournalFileBackend(str((run_dir / "study.log").absolute()))
    storage = optuna.storages.JournalStorage(backend)
    trials = optuna.load_study(study_name=study or run_dir.name, storage=storage).trials
    return [trial for trial in trials if "tests" not in trial.user_attrs]


def find_complete_losses(trials: list[optuna.trial.FrozenTrial]) -> dict[int, float]:
    """Return the losses of the complete trials by trial number."""
    return {
        trial.number: trial.values[0]
        for trial in trials
        if trial.state == optuna.trial.TrialState.COMPLETE
    }


def remove_loading_lines(output: str) -> str:
    """Return the output of a run without the lines about what it loads."""
    return re.sub(r"^(loading .*|preparing data)\n", "", output, flags=re.MULTILINE)
