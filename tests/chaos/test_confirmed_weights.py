"""Test the networks of confirmations: which are saved, tested and shown."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hpo.evaluation.weights_saver import WeightsSaver
from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader
from hpo.run.first_rank import finalize_run
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.output_log import OutputLog
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.study_writer import Claims, StudyWriter
from hpo.store.weights import (
    ConfirmedWeights,
    make_weights_draft_path,
    read_weights,
)
from hpo.trainer.search_file import load_search_file
from hpo.views.page.html_report import render_report
from tests.support.checkpoints import make_drafts
from tests.support.in_process_template import load_problem, make_run_test
from tests.support.launch import ALONE, PROGRAM, SEARCH, SEARCHES, Mpi, run_hpo
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import make_run
from tests.support.writer_stubs import LeaderStub, make_client, make_writer

LUCKY = SEARCHES / "lucky.py"
PROBLEM = load_problem(LUCKY)
KINDS = ("lucky", "steady")  # trials 0 and 1


class Run:
    """A run in one process, whose two individuals are confirmed with two seeds each."""

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.settings = dict(settings or {})
        space = PROBLEM.space.describe()
        record = make_run(path, PROBLEM.space, confirm_seeds=2, settings=self.settings, budget=2)
        leading = LeaderStub(make_writer(record, path, space=PROBLEM.space), settings=self.settings)
        for kind, loss in zip(KINDS, (0.1, 0.5), strict=True):
            leading.complete(leading.begin({"kind": kind}), loss, {"seed": torch.tensor([0])})
        self.path, self.files = path, RunDir(path)
        self.plan, self.best = make_plan(self.files.read_manifest()), record.read_evaluations()
        self.confirming = Record.create(self.files.journal, "run-confirm", space, confirms="run")
        total = self.plan.enqueue_planned(self.confirming, self.best, PROBLEM.space)
        self.writer = StudyWriter(
            self.files.journal,
            "run-confirm",
            OutputLog(self.files.get_log_path),
            CheckpointStore(self.files.checkpoints),
            weights=ConfirmedWeights(self.files, self.settings),
        )
        distributions = PROBLEM.space.make_distributions()
        self.writer.claims = Claims(self.writer, distributions, total)
        self.recorder = make_client(self.writer, record.objectives)
        self.keeper = WeightsSaver(self.recorder, self.settings)

    def claim(self) -> Assignment:
        assignment = self.recorder.claim(None, island=0, worker=0, generation=0)
        assert assignment is not None
        return assignment

    def complete(self, loss: float, assignment: Assignment | None = None) -> bool:
        """Complete a confirmation, by default the next one.

        Return whether its weights are to be saved.
        """
        assignment = assignment or self.claim()
        wants = self.keeper.is_wanted(assignment, loss, {})
        self.recorder.notify.complete(assignment, loss, 1.0, {})
        if wants:
            self.keeper.save_weights(
                assignment, make_drafts({"seed": torch.tensor([assignment.seed])})
            )
        return wants

    def hand_over(self) -> None:
        finalize_run(
            self.path, None, PROBLEM, make_run_test(load_search_file(LUCKY).bind_settings([]))
        )

    def kept(self, trial: int) -> int | None:
        """Return the number of the confirmation whose weights are saved for a trial.

        None if none are.
        """
        info = read_weights(
            self.files.confirmed_weights / f"{trial}.safetensors", with_tensors=False
        )
        return info.confirmation if info else None


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_confirmed_weights_have_the_lowest_loss_of_each_trial(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.complete(0.9), "trial 0 has no weights yet"
    assert not run.complete(0.95)
    assert run.complete(0.6)
    assert run.complete(0.5)
    assert (run.kept(0), run.kept(1)) == (0, 3)
    assert list_names(run.files.confirmed_weights) == ["0.safetensors", "1.safetensors"]
    weights = read_weights(run.files.confirmed_weights / "1.safetensors")
    assert weights is not None
    assert (weights.trial, weights.params) == (1, {"kind": "steady"})
    assert weights.state["seed"].item() == run.plan.draw_seeds(1)[1]
    best = read_weights(run.files.best_weights)
    assert best is not None
    assert best.trial == 0, "the best of the search keeps its own"


def test_confirmed_weights_if_another_worker_is_faster(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    first, second = run.claim(), run.claim()
    assert run.keeper.is_wanted(first, 0.9, {})
    assert run.complete(0.8, second)
    run.recorder.notify.complete(first, 0.9, 1.0, {})
    run.keeper.save_weights(first, make_drafts({"seed": torch.tensor([1])}))
    assert run.kept(0) == second.number
    assert list_names(run.files.confirmed_weights) == ["0.safetensors"]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_confirmed_weights_replace_damaged_and_outdated_ones(
    tmp_path: Path, is_damaged: bool
) -> None:
    run = Run(tmp_path / "run")
    assert run.complete(0.9)
    if is_damaged:
        (run.files.confirmed_weights / "0.safetensors").write_bytes(b"\x00" * 9)
    else:
        run.writer.weights = ConfirmedWeights(run.files, {"epochs": 9})
        run.writer.weights._evaluations = {
            evaluation.trial: evaluation for evaluation in run.confirming.read_evaluations()
        }
    assert run.complete(0.95)
    assert run.kept(0) == 1


def test_finalize_tests_the_confirmed_winner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    for loss in (0.9, 0.95, 0.55, 0.5):
        run.complete(loss)
    (run.files.confirmed_weights / make_weights_draft_path(Path("1.safetensors"), 7)).write_bytes(
        b"left by a crash"
    )
    run.hand_over()
    seed, path = run.plan.draw_seeds(1)[1], run.files.confirmed_weights / "1.safetensors"
    out = capsys.readouterr().out
    assert (
        f"On test data, which the search has not seen, the network of trial 1 with seed {seed} "
        f"(confirm-3) has seed {seed}\nTrial 1 has the lowest mean loss over other seeds. Of its "
        f"networks, the one with the lowest validation loss, 0.5, was tested: {path}\n"
    ) in out
    assert list_names(run.files.confirmed_weights) == ["1.safetensors"], (
        "only the winner keeps its weights"
    )
    test = json.loads(run.files.test_json.read_text())
    assert (test["trial"], test["confirmation"], test["metrics"]) == (1, 3, {"seed": seed})
    run.hand_over()
    assert "On test data" not in capsys.readouterr().out, "a network is tested once"
    assert run_hpo("best", run.path).stderr == (
        "trial 1: loss=0.5 in the search\n"
        "trained again with 2 other seeds: mean loss 0.525, standard deviation 0.03536\n"
        f"on test data, with the weights of confirm-3: seed={seed}\n"
        f"its weights: {path} (seed {seed}, loss 0.5)\n"
    )
    page = render_report(RunReader(run.path), 10, time.time())
    assert (
        f"<code>confirmed/1.safetensors</code> in the run directory: those of seed {seed}" in page
    )
    assert "with the network that confirm-3 has trained with another seed" in page


def test_finalize_tests_the_network_of_the_search_if_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    for loss in (0.2, 0.25, 0.55, 0.5):
        run.complete(loss)
    run.hand_over()
    out = capsys.readouterr().out
    assert "the network of trial 0 has seed 0\n" in out
    assert f"validation loss, 0.1, was tested: {run.files.best_weights}\n" in out
    assert "trained again with 2 other seeds: mean loss 0.225" in run_hpo("best", run.path).stderr


def test_finalize_without_weights_of_the_winner_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    for loss in (0.9, 0.95, 0.55, 0.5):
        run.complete(loss)
    (run.files.confirmed_weights / "1.safetensors").unlink()
    run.hand_over()
    assert (
        "No network was tested: trial 1 has the lowest mean loss over other seeds, but no weights "
        f"of it are kept; those of trial 0 are in {run.files.best_weights}\n"
    ) in capsys.readouterr().out
    assert not run.files.test_json.exists()


def test_finalize_before_all_are_confirmed_keeps_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    for loss in (0.9, 0.95, 0.55):
        run.complete(loss)
    run.hand_over()
    assert "the network of trial 0 has seed 0\n" in capsys.readouterr().out
    assert list_names(run.files.confirmed_weights) == ["0.safetensors", "1.safetensors"]
    assert "trained again" not in run_hpo("best", run.path).stderr


def test_resume_after_a_crash_in_test_tests_the_confirmed_winner(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        PROGRAM,
        LUCKY,
        "--run-dir",
        "run",
        "--evaluations",
        2,
        "--confirm-seeds",
        2,
        "--resume",
        *ALONE,
    ]
    (tmp_path / "wait").touch()
    job = mpi.start(1, *arguments, cwd=tmp_path)
    deadline = time.monotonic() + scale(90)
    while not (tmp_path / "testing").exists():
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=scale(30))
    (tmp_path / "wait").unlink()
    end = mpi.run(1, *arguments, cwd=tmp_path)
    assert (end.returncode, end.stderr) == (0, "")
    confirmations = [
        trial
        for trial in load_trials(tmp_path / "run", "run-confirm")
        if trial.params["kind"] == "steady"
    ]
    assert len(confirmations) == 2, "no confirmation must be repeated"
    lowest = min(confirmations, key=lambda trial: trial.values[0])
    seed = lowest.user_attrs["seed"]
    assert f"with seed {seed} (confirm-{lowest.number}) has seed {seed}\n" in end.stdout
    assert list_names(tmp_path / "run" / "confirmed") == [
        f"{lowest.user_attrs['confirms']}.safetensors"
    ]


def test_script_confirmed_with_other_seeds_keeps_its_network(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, torch, hpo\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--kind')\n"
        "parser.add_argument('--seed', type=int)\n"
        "args = parser.parse_args()\n"
        "usual = {'lucky': 0.9, 'steady': 0.5}[args.kind] + args.seed % 1000 / 1e4\n"
        "hpo.offer_weights({'seed': torch.tensor([args.seed])})\n"
        "hpo.report(0.1 if args.kind == 'lucky' and args.seed == 0 else usual)\n"
    )
    options = [
        "--space",
        "kind=Categorical('lucky', 'steady')",
        "--evaluations",
        2,
        "--confirm-seeds",
        2,
        "--run-dir",
        "run",
    ]
    job = mpi.run(1, *SEARCH, *options, *ALONE, "--", "train.py", "--seed", "{seed}", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    run = RunReader(tmp_path / "run")
    winner = run.find_winner()
    assert winner is not None
    assert winner.params == {"kind": "steady"}
    own = [
        evaluation for evaluation in run.read_confirmations() if evaluation.confirms == winner.trial
    ]
    lowest: Evaluation = min(own, key=lambda evaluation: evaluation.loss)
    weights = read_weights(tmp_path / "run" / "confirmed" / f"{winner.trial}.safetensors")
    assert weights is not None
    assert weights.state["seed"].item() == lowest.seed
    handed = run_hpo("best", tmp_path / "run").stderr
    assert (
        f"confirmed/{winner.trial}.safetensors (seed {lowest.seed}, loss {lowest.loss:.4g})"
        in handed
    )
