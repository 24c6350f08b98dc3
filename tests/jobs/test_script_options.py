"""Test options of a search over a training script: pruners, confirmations, and timeouts."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.checks import join_points
from tests.support.launch import HPO, SCRIPTS, SEARCH, Mpi, run_hpo
from tests.support.run_output import find_complete_losses, load_trials

LOSS = ["--loss", r"val_loss=(\S+)", "--run-dir", "run"]

# The first report is made before training. All reports are worse than the reports of the earlier
# evaluations.
WARMING_UP = """
import sys
for epoch in range(12):
    print(f"val_loss={100 + int(sys.argv[2]) if epoch == 0 else int(sys.argv[2]) + 1 / epoch}")
"""


@pytest.mark.parametrize(("first", "reports"), [(1, 1), (2, 3)])
def test_asha_without_resume_args_prunes(
    mpi: Mpi, tmp_path: Path, first: int, reports: int
) -> None:
    (tmp_path / "train.py").write_text(WARMING_UP)
    options = [
        "--space",
        "x=Float(0.0, 1.0)",
        *LOSS,
        "--pruner",
        "asha",
        "--first-report",
        first,
        "--evaluations",
        3,
    ]
    job = mpi.run(2, *SEARCH, *options, "--", "train.py", "--trial", "{trial}", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in trials] == [12, reports, reports]
    assert not any("paused_after" in trial.user_attrs for trial in trials)


def test_confirmations_of_program_have_other_seeds(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nx, seed = sys.argv[2], sys.argv[4]\nprint(f'val_loss={float(x) + "
        "int(seed)}')\n"
    )
    options = [
        "--space",
        "x=Float(0.0, 0.5)",
        *LOSS,
        "--evaluations",
        2,
        "--confirm-seeds",
        3,
        "--top-n",
        1,
        "--seed",
        7,
    ]
    job = mpi.run(
        2, *SEARCH, *options, "--", "train.py", "--x", "{x}", "--seed", "{seed}", cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [trial.values for trial in trials] == [[trial.params["x"] + 7] for trial in trials]
    confirmations = load_trials(tmp_path / "run", "run-confirm")
    seeds = [trial.user_attrs["seed"] for trial in confirmations]
    assert len({7, *seeds}) == 4
    assert [trial.values for trial in confirmations] == [
        [trial.params["x"] + seed] for trial, seed in zip(confirmations, seeds, strict=True)
    ]


def test_silent_program_fails_after_evaluation_timeout(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "if sys.argv[2] == 'silent' and os.environ['RANK'] == '1':\n    time.sleep(600)\n"
        "if sys.argv[2] == 'swallowing':\n    print('val_loss=0.1')\n"
        "    try:\n        time.sleep(600)\n    except:\n        pass\n"
        "if sys.argv[2] == 'loud':\n    print('val_loss=0.5')\n"
    )
    (tmp_path / "given.json").write_text(
        '[{"way": "silent"}, {"way": "swallowing"}, {"way": "loud"}]'
    )
    options: list[object] = ["--space", "way=Categorical('silent', 'swallowing', 'loud')", *LOSS]
    options += ["--enqueue", "given.json", "--evaluations", 3, "--evaluation-timeout", "2s"]
    job = mpi.run(2, *SEARCH, *options, "--", "train.py", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    silent, swallowing, loud = load_trials(tmp_path / "run")
    assert "--evaluation-timeout" in silent.user_attrs["failure"]
    assert "--evaluation-timeout" in swallowing.user_attrs["failure"]
    assert loud.values == [0.5]


def test_printed_advice_confirms_script_with_other_seeds(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--x', "
        "type=float)\nparser.add_argument('--seed', type=int, default=0)\nargs = "
        "parser.parse_args()\nprint(f'val_loss={args.x + args.seed % 97 / 10000}')\n"
    )
    options = ["--space", "x=Float(1.0, 1.01)", *LOSS, "--evaluations", 6]
    job = mpi.run(2, *SEARCH, *options, "--", "train.py", cwd=tmp_path)
    assert "The script must take the seed, as --seed or by another option." in job.stdout
    (command,) = [line for line in job.stdout.splitlines() if "--confirm-seeds 3" in line]
    words = shlex.split(command)
    assert words[:4] == ["mpirun", "-n", "2", "hpo"]
    job = mpi.run(2, *HPO, *words[4:], cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 6, (
        "only the confirmations are new"
    )
    confirmations = find_complete_losses(load_trials(tmp_path / "run", "run-confirm"))
    assert len(confirmations) == 9
    assert len(set(confirmations.values())) > 3


SCORING = ["--space", "lr=Float(0.1, 1.0)", "--run-dir", "run"]
SCORE = r"Acc@1 (\S+)"


def test_maximized_score_of_a_script_has_the_highest_as_the_best(mpi: Mpi, tmp_path: Path) -> None:
    options = [*SCORING, "--maximize", SCORE, "--evaluations", 8]
    job = mpi.run(1, *SEARCH, *options, "--", SCRIPTS / "scoring.py", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    for trial in trials:
        score = trial.user_attrs["metrics"]["score"]
        assert trial.values == [-score]
        assert score == pytest.approx(100 * (1 - (trial.params["lr"] - 0.7) ** 2), abs=1e-3)
    best = min(trials, key=lambda trial: abs(trial.params["lr"] - 0.7))
    (line,) = [line for line in job.stdout.splitlines() if line.startswith(" 1 ")][-1:]
    assert f" {best.params['lr']:.4g} " in line, job.stdout


def test_score_that_is_read_as_a_loss_is_warned_about(mpi: Mpi, tmp_path: Path) -> None:
    options = [*SCORING, "--loss", SCORE, "--evaluations", 2]
    job = mpi.run(1, *SEARCH, *options, "--", SCRIPTS / "scoring.py", cwd=tmp_path)
    assert job.returncode == 0
    assert "--loss has matched 'Acc@1 " in job.stderr
    assert "If more is better, give --maximize instead" in job.stderr


@pytest.mark.mpi
def test_check_of_a_script_without_mpirun_reads_its_lines(tmp_path: Path) -> None:
    options = [*SCORING[:2], "--loss", SCORE]
    ended = run_hpo("check", *options, "--", SCRIPTS / "scoring.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 report by --loss 'Acc@1 (\\S+)' in the first evaluation" in ended.stdout
    printed = join_points(ended.stdout)
    assert "--loss has matched 'Acc@1 97.750', and the lowest is the best." in printed
    assert ended.stderr == ""
