"""Test searches over unchanged scripts that use a training framework.

Losses must equal those under torchrun.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs import commands_with, example
from tests.support.launch import HPO, LR, ROOT, SCRIPTS, SEARCH, Mpi, run_torchrun
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

VAL_LOSS = r"val_loss=(\d+\.\d{6})"  # under torchrun, a line of another rank may begin behind it
TRAINER_LOSS = r"eval_loss.: .([\w.+-]+)"
TRAINER = "--use_cpu --eval_strategy epoch --save_strategy no --report_to none --num_train_epochs 2"
PRECISION = ["--space", "mixed_precision=Categorical('no', 'bf16')"]
LEARNING_RATE = ["--space", "learning_rate=Float(1e-3, 1e-1, log=True)"]


def search(
    mpi: Mpi, folder: Path, options: list[str], pattern: str, *command: object, workers: int = 1
) -> list[Any]:
    """Run 2 evaluations of a script on each worker of 2 ranks.

    Assert that all complete, and return their trials.
    """
    evaluations = 2 * workers
    options = [*options, "--loss", pattern, "--evaluations", str(evaluations), "--run-dir", "run"]
    job = mpi.run(2 * workers, *SEARCH, *options, "--", *command, cwd=folder)
    assert job.returncode == 0, job.stderr
    trials = load_trials(folder / "run")
    assert len(find_complete_losses(trials)) == evaluations
    return trials


def check_with_torchrun(folder: Path, trial: Any, pattern: str, *command: object) -> None:
    """Assert that a trial has the losses that torchrun prints for the same hyperparameters."""
    printed = run_torchrun(folder, *command, params=trial.params)
    expected = [float(loss) for loss in re.findall(pattern, printed)]
    assert len(expected) > 1
    assert list(trial.intermediate_values.values()) == expected


def read_lines(folder: Path, trial: Any, pattern: str) -> list[str]:
    """Return the sorted matches of a pattern in the output of an evaluation."""
    return sorted(
        re.findall(pattern, (folder / "run" / "logs" / f"{trial.number}.txt").read_text())
    )


def test_trainer_of_transformers_has_the_losses_of_torchrun(mpi: Mpi, tmp_path: Path) -> None:
    command = [SCRIPTS / "transformers_trainer.py", *TRAINER.split()]
    trials = search(
        mpi, tmp_path, LEARNING_RATE, TRAINER_LOSS, *command, "--output_dir", "{folder}"
    )
    check_with_torchrun(tmp_path, trials[1], TRAINER_LOSS, *command, "--output_dir", "out")


def test_callback_of_transformers_reports_to_a_pruner(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(example("docs/training/frameworks.md", "train.py"), "utf-8")
    (command,) = commands_with("docs/training/frameworks.md", "mpirun -n 4 hpo search --space")
    job = mpi.run(int(command[2]), *HPO, *command[4:], cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    trials = load_trials(tmp_path / "runs" / "trainer")
    states = [trial.state.name for trial in trials]
    assert (len(states), set(states)) == (8, {"COMPLETE", "PRUNED"})
    assert all(
        len(trial.intermediate_values) == 3 for trial in trials if trial.state.name == "COMPLETE"
    )
    for trial in trials:
        assert trial.user_attrs["metrics"].keys() == {"eval_accuracy"}
    best = min(find_complete_losses(trials).values())
    assert 0 < best < 2.2, "it learns: chance is 2.3"
    assert best != round(best, 4), "all digits"


@pytest.mark.slow
def test_callback_reports_numbers_in_a_search_on_one_process(tmp_path: Path) -> None:
    program = (
        "import os\nfrom transformers import TrainerState\nfrom hpo.training.transformers import "
        "ReportCallback\nmetrics = {'eval_loss': 1.0, 'eval_wer': 0.5, 'eval_nan': float('nan'), "
        "'eval_text': 'x', 'eval_is': True,\n           'eval_runtime': 2.0, "
        "'eval_samples_per_second': 3.0, 'epoch': 1.0}\nReportCallback().on_evaluate(None, "
        "TrainerState(), None, metrics=metrics)\nos.environ['HPO_METRICS'] = 'metrics'\nfor "
        "callback in (ReportCallback(), ReportCallback('eval_wer'), "
        "ReportCallback('eval_other_loss')):\n    for is_main in (True, False):\n        "
        "callback.on_evaluate(None, TrainerState(is_world_process_zero=is_main), None, "
        "metrics=metrics)\n"
    )
    (tmp_path / "metrics").touch()
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=scale(60),
    )
    lines = ['{"eval_wer": 0.5, "loss": 1.0}\n', '{"eval_loss": 1.0, "loss": 0.5}\n']
    assert (tmp_path / "metrics").read_text() == "".join(lines)


@pytest.mark.slow
def test_callback_without_transformers_names_the_extra() -> None:
    program = "import sys\nsys.modules['transformers'] = None\nimport hpo.training.transformers\n"
    job = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=scale(60),
    )
    assert job.returncode == 1
    last = job.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: hpo.training.transformers needs transformers (")
    assert last.endswith("pip install 'hpo-islands[transformers]'")


def test_accelerate_finds_the_ranks_and_the_precision(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    command = [SCRIPTS / "accelerated.py", "--epochs", 2]
    trials = search(mpi, tmp_path, [*LR, *PRECISION], VAL_LOSS, *command, workers=2)
    precisions = {"no": "no computes torch.float32", "bf16": "bf16 computes torch.bfloat16"}
    assert {trial.params["mixed_precision"] for trial in trials} == precisions.keys()
    for trial in trials:
        expected = precisions[trial.params["mixed_precision"]]
        assert read_lines(tmp_path, trial, r"process .* batches") == [
            f"process 0 of 2, local 0, main True, local main True, {expected}, 8 batches",
            f"process 1 of 2, local 1, main False, local main False, {expected}, 8 batches",
        ]
        assert read_lines(tmp_path, trial, "OMP_NUM_THREADS.*unset") == [], (
            "Accelerate does not choose the threads"
        )
    check_with_torchrun(
        tmp_path,
        next(t for t in trials if t.params["mixed_precision"] == "bf16"),
        VAL_LOSS,
        *command,
    )


def test_plain_trainer_of_lightning_has_the_losses_of_torchrun(mpi: Mpi, tmp_path: Path) -> None:
    command = [SCRIPTS / "lightning_trainer.py"]
    trials = search(mpi, tmp_path, LR, VAL_LOSS, *command)
    assert all(len(trial.intermediate_values) == 3 for trial in trials)
    check_with_torchrun(tmp_path, trials[1], VAL_LOSS, *command)
