"""Test that all ranks of a worker prune the same evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials


@pytest.mark.parametrize(
    ("workers", "size", "pruner", "evaluations", "reports"),
    [
        (2, 1, "median", 60, False),
        (2, 2, "percentile:25", 120, False),
        (1, 2, "percentile:25", 120, True),
        (1, 3, "asha", 60, True),
        (2, 1, "hyperband", 60, False),
    ],
)
def test_pruned_evaluations_are_equal_on_all_ranks(
    mpi: Mpi, tmp_path: Path, workers: int, size: int, pruner: str, evaluations: int, reports: bool
) -> None:
    options = [
        "--ranks-per-worker",
        size,
        "--evaluations",
        evaluations,
        "--pruner",
        pruner,
        "--propagators",
        "random",
    ]
    settings = ["--set", f"folder={tmp_path}", "--set", "epochs=6", "--set", f"reports={reports}"]
    command = [
        PROGRAM,
        SEARCHES / "prunable.py",
        "--run-dir",
        "run",
        "--islands",
        workers,
        *options,
        *settings,
    ]
    job = mpi.run(workers * size, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = {trial.params["x"]: trial for trial in load_trials(tmp_path / "run")}
    assert len(trials) == evaluations
    pruned = [trial for trial in trials.values() if trial.state.name == "PRUNED"]
    assert evaluations // 4 < len(pruned) < evaluations
    assert min(len(trial.intermediate_values) for trial in pruned) < 6, (
        "some must be pruned before their last epoch"
    )
    for trial in pruned:
        assert trial.values == [min(trial.intermediate_values.values())]
        assert trial.user_attrs["seconds"] > 0
    counts = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluations"]
    assert (counts["pruned"], counts["complete"]) == (len(pruned), evaluations - len(pruned))
    for index in range(workers):
        ranks = [
            [json.loads(line) for line in (tmp_path / f"{index}-{rank}").read_text().splitlines()]
            for rank in range(size)
        ]
        for notes in ranks:
            assert [(n["x"], n["epochs"]) for n in notes] == [
                (n["x"], n["epochs"]) for n in ranks[0]
            ]
            assert all(
                note["epochs"] == len(trials[note["x"]].intermediate_values) for note in notes
            )
            assert len({note["process"] for note in notes}) == 1, "trainers must not be replaced"
            early, late = notes[len(notes) // 4], notes[-1]
            assert late["descriptors"] <= early["descriptors"] + 2
            assert late["tasks"] <= early["tasks"] + 2
            assert late["memory"] <= early["memory"] + 30
