"""Test a run with a broken worker, which leaves."""

from __future__ import annotations

from pathlib import Path

from hpo.store.record import Record
from tests.support.launch import PROGRAM, Mpi, run_hpo

SEARCH = """
import time
from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 999))


def objective(params, worker):
    if worker.index == 2:
        raise RuntimeError("it fails here alone")
    time.sleep(0.3)
    yield params["k"] + 1.0
"""


def test_failures_of_a_broken_worker_do_not_count(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(SEARCH)
    arguments = ("broken.py", "--run-dir", "run", "--ranks-per-worker", 1, "--evaluations", 40)
    done = mpi.run(4, PROGRAM, *arguments, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    evaluations = Record(tmp_path / "run" / "study.log", "run").read_evaluations()
    own = [evaluation for evaluation in evaluations if evaluation.worker == 2]
    assert sum(evaluation.state == "complete" for evaluation in evaluations) == 40
    assert {evaluation.state for evaluation in own} == {"interrupted"}
    assert len([evaluation for evaluation in own if evaluation.tests is None]) <= 4
    retried = {evaluation.retry_of for evaluation in evaluations} - {None}
    assert retried == {evaluation.trial for evaluation in own if evaluation.tests is None}
    assert done.stderr.count("warning: worker 2 (rank 2 on ") == 1
    assert "Repair or exclude the hosts or GPUs" in done.stdout
    for evaluation in own:
        shown = run_hpo("show", tmp_path / "run", evaluation.trial).stdout
        state = (
            "failed on a broken worker, and retried as trial"
            if evaluation.tests is None
            else "a test of worker 2"
        )
        assert shown.startswith(f"trial {evaluation.trial} of {tmp_path / 'run'}: {state}")
        assert "its job was killed" not in shown, "tests have a duration, too"
