"""Test runs that save the weights of the best, and test its network."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from hpo.results.reader import RunReader
from hpo.store.evaluations import rank_evaluations
from hpo.store.weights import read_weights
from tests.support.launch import ALONE, PROGRAM, SEARCHES, Mpi, run_hpo
from tests.support.run_output import load_trials

LUCKY = SEARCHES / "lucky.py"
WEIGHING = SEARCHES / "weighing.py"


def test_run_saves_weights_of_best_epoch_and_tests_once(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        PROGRAM,
        WEIGHING,
        "--run-dir",
        "run",
        "--evaluations",
        12,
        "--confirm-seeds",
        1,
        "--top-n",
        1,
    ]
    job = mpi.run(4, *arguments, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    run = RunReader(tmp_path / "run")
    (best,) = rank_evaluations(run.read_evaluations(), 1)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.trial == best.trial
    assert {name: tensor.item() for name, tensor in weights.state.items()} == dict.fromkeys(
        ("epoch", "dip"), best.params["dip"]
    ), "the weights must be those of the epoch with the lowest loss"
    said = (
        f"On test data, which the search has not seen, the network of trial {best.trial} has epoch "
        f"{best.params['dip']}"
    )
    assert said in job.stdout
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert page.count('src="data:image/png;base64,') == 2
    assert "predicted: dog" in page
    assert "&lt;cat&gt;" in page
    assert '<pre class="text" tabindex="0"><mark>def &lt;cat&gt;</mark>(dog):\n\tpass</pre>' in page
    alone = ["--ranks-per-worker", 1, "--islands", 1]
    again = mpi.run(1, *arguments, "--resume", *alone, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert "On test data" not in again.stdout, "a network must be tested only once"

    handed = run_hpo("best", tmp_path / "run")
    assert json.loads(handed.stdout) == best.params
    assert f"trial {best.trial}" in handed.stderr
    assert "best.safetensors" in handed.stderr
    assert eval(run_hpo("best", tmp_path / "run", "--python").stdout) == best.params


def test_wrong_weights_fail_a_trial_and_a_failed_test_warns(mpi: Mpi, tmp_path: Path) -> None:
    options = [PROGRAM, WEIGHING, "--islands", 1, "--evaluations", 2]
    wrong = mpi.run(2, *options, "--run-dir", "wrong", "--set", "offers=nonsense", cwd=tmp_path)
    assert wrong.returncode == 3
    assert (
        "TypeError: offered weights must be a dict of tensors by their names, got 'epoch'"
        in wrong.stdout
    )
    badly = mpi.run(
        1,
        *options,
        "--ranks-per-worker",
        1,
        "--run-dir",
        "badly",
        "--set",
        "tests=badly",
        cwd=tmp_path,
    )
    assert badly.returncode == 0
    reason = "weighing.py:35: ValueError: no test data today"
    assert badly.stderr == f"warning: the best network could not be tested ({reason})\n"
    assert "The report is badly/report.html" in badly.stdout


def test_baseline_is_confirmed_and_test_data_stay_unseen(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text('[{"kind": "steady"}, {"kind": "lucky"}]')
    options = [PROGRAM, LUCKY, "--run-dir", "run", "--evaluations", 2, "--confirm-seeds", 2]
    options += ["--top-n", 1, *ALONE]
    first = ["--enqueue", "given.json", "--confirm-trials", "0,99", "--no-test"]
    job = mpi.run(2, *options, *first, cwd=tmp_path)
    assert job.returncode == 0
    assert job.stderr == "warning: --confirm-trials 99: there is no trial 99 with a loss\n"
    confirmations = load_trials(tmp_path / "run", "run-confirm")
    assert Counter(trial.user_attrs["confirms"] for trial in confirmations) == {0: 2, 1: 2}
    assert not (tmp_path / "run" / "test.json").exists()
    known = RunReader(tmp_path / "run").take_snapshot(for_advice=True)
    assert "--confirm-trials" in known.format_resume_command()
    assert "--confirm-trials" not in known.format_new_command(), "it has other trials"
    job = mpi.run(2, *options, "--resume", "--test", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "test.json").read_text())["trial"] == 0
