"""What the usual mistakes in an objective cost, and what is said of them, on real jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import PROGRAM, ROOT, SEARCHES, Mpi, hpo_line
from tests.support.outcome import trials_of

CARELESS = SEARCHES / "careless.py"


def line_of(code: str) -> int:
    """Return the number of the one line of the search space that holds this code."""
    (number,) = [n for n, line in enumerate(CARELESS.read_text().splitlines(), 1) if code in line]
    return number


def at(code: str) -> str:
    return rf"careless\.py:{line_of(code)}"


def careless(folder: Path, ways: str, *options: object) -> list[object]:
    """Name the search space by a relative path, as people do."""
    return [PROGRAM, os.path.relpath(CARELESS, folder), "--run-dir", "run", "--set", f"ways={ways}", *options]


def failures(mpi: Mpi, folder: Path, reasons: dict[str, str], seconds: int = 60) -> list[str]:
    """Let evaluations fail in these ways, for these reasons, and give their tracebacks."""
    options = ["--collective-timeout", seconds, "--evaluations", len(reasons)]
    job = mpi.run(2, *careless(folder, ",".join(reasons), *options), cwd=folder)
    assert (job.returncode, job.stderr) == (3, "")
    trials = [trial.user_attrs for trial in trials_of(folder / "run")]
    for (way, reason), trial in zip(reasons.items(), trials, strict=True):
        assert re.fullmatch(reason, trial["failure"]), f"{way}: {trial['failure']}"
        assert trial["failure"][:100] in job.stdout
    return [trial["traceback"] for trial in trials]


def test_what_an_objective_does_to_what_it_is_given_ends_with_it(mpi: Mpi, tmp_path: Path) -> None:
    for ranks, size in ((4, 2), (1, 1)):
        options = ["--run-dir", f"of-{size}", "--ranks-per-worker", size, "--islands", 1, "--evaluations", 6]
        job = mpi.run(ranks, *careless(tmp_path, "none", *options), cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, "")
        trials = trials_of(tmp_path / f"of-{size}")
        assert len(trials) == 6
        for trial in trials:
            assert trial.values == [trial.params["lr"]], "the loss is lr, which the objective took out"
            assert trial.user_attrs["metrics"]["parameters"] == 5 * (trial.params["width"] // 8)


def test_a_mistake_is_told_with_its_line_and_what_would_work(mpi: Mpi, tmp_path: Path) -> None:
    computes = r"\w+Error: .* \(worker\.device is where this rank computes: .*\)"
    reasons = {
        "tuple": f"{at('yield wrong')}: TypeError: metrics are a dict of numbers by name, not 0\\.9: .*",
        "text": f"{at('yield wrong')}: TypeError: metric 'note' must be a number, not 'good'",
        "model": rf"{at('offer(model)')}: TypeError: .* worker\.offer\(model\.state_dict\(\)\)",
        "sharded": f"{at('offer(model.state_dict())')}: TypeError: .* is sharded: offer, on all ranks, get_model_.*",
        "torchrun": rf"{at('int(os.environ')}: KeyError: 'RANK' \(.* use worker\.rank, .*\)",
        "init": rf"{at('init_process_group')}: ValueError: .* \(leave init_process_group out: .*\)",
        "path": rf"{at('missing.bin')}: FileNotFoundError: .* \(a relative path, looked for in /.*\)",
        "cuda": rf"{at('model.cuda()')}: {computes}",
        "returned": f"{at('def objective(')}: ValueError: .* no loss, but returned 0.5: it has a yield somewhere",
    }
    if Path("/dev/nvidiactl").exists():
        del reasons["cuda"]
    tracebacks = failures(mpi, tmp_path, {way: f"rank [01], {reason}" for way, reason in reasons.items()})
    for traceback in tracebacks:
        first, second, *_ = traceback.splitlines()
        assert first == "Traceback (most recent call last):"
        assert re.match(r'  File ".*careless\.py"', second), "it begins in the objective"


def test_collectives_that_do_not_fit_together_cost_one_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    reasons = {
        "size": rf"rank 0 allreduce of float \[3\] at {at('3 + worker')}, rank 1 allreduce of float \[4\] at .*",
        "type": r"rank 0 allreduce of float \[3\] at .*, rank 1 allreduce of double \[3\] at .*",
        "number": rf"rank 0 allreduce of float \[2\] .*, rank 1 allreduce of float \[100\] at {at('(torch.ones(100)')}",
        "barrier": rf"rank 0 barrier at {at('dist.barrier()')}, rank 1 \w+ of \w+ \[.*\] at {at('= DistributedData')}",
    }
    reasons = {way: f"the ranks are in different collectives: {reason}" for way, reason in reasons.items()}
    stack = r'Traceback .*\n  File ".*careless\.py", .*\n(  .*\n)+RuntimeError: Detected mismatch .*'
    for traceback in failures(mpi, tmp_path, reasons):
        assert re.fullmatch(rf"Rank 0:\n{stack}\n\nRank 1:\n{stack}", traceback), traceback


def test_what_only_torch_takes_for_a_mistake_is_evaluated(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--ranks-per-worker", 3, "--evaluations", 2]
    job = mpi.run(3, *careless(tmp_path, "stages", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    job = mpi.run(2, *careless(tmp_path, "shapes", "--run-dir", "shapes", "--evaluations", 2), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert [trial.state.name for trial in trials_of(tmp_path / "run")] == ["COMPLETE", "COMPLETE"]


def test_who_waits_for_whom_is_told_with_both_places(mpi: Mpi, tmp_path: Path) -> None:
    waited = r"timeout: rank \d waited 3 s \(--collective-timeout\) at"
    trains, alone, late = at("= DistributedData"), at('"alone"'), at("torch.ones(9)")
    reasons = {
        "sleep": rf"{waited} {trains} for rank 0, which was at {at('sleep(3600)')}",
        "yield": rf"{waited} ({alone} for rank 1, which was at {trains}|{trains} for rank 0, which .* at {alone})",
        "late": rf"{waited} (its end for rank 1, which was at {late}|{late} for rank 0, which had ended)",
        "return": f"rank 1, {at('def objective(')}: ValueError: the objective yielded no loss",
    }
    failures(mpi, tmp_path, reasons, seconds=3)


def test_a_timeout_that_an_objective_swallows_costs_no_other_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 4, "--collective-timeout", 3]
    job = mpi.run(2, *careless(tmp_path, "none,swallow,none,none", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert [trial.state.name for trial in trials_of(tmp_path / "run")] == ["COMPLETE"] * 4


def test_what_torch_is_asked_to_check_is_checked_throughout(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    options = ["--evaluations", 4, "--collective-timeout", 30]
    job = mpi.run(2, *careless(tmp_path, "none,none,size,size", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert [trial.state.name for trial in trials_of(tmp_path / "run")] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert "the ranks are in different collectives" in trials_of(tmp_path / "run")[3].user_attrs["failure"]


@pytest.mark.mpi
def test_an_evaluation_that_ends_the_process_is_told_given_up_and_not_repeated(tmp_path: Path) -> None:
    search = tmp_path / "Übung 20€" / CARELESS.name  # which is named by the process that dies
    search.parent.mkdir()
    search.write_bytes(CARELESS.read_bytes())
    arguments = ["--evaluations", "5", "--collective-timeout", "30", "--set", "ways=none,none,number,none,none"]
    command = ["mpirun", "-n", "2", sys.executable, str(PROGRAM), str(search), "--run-dir", "run", *arguments]
    supervisor = hpo_line("run", "--restarts", 1, *command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.run(supervisor, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert job.returncode == 0, job.stderr
    trials = trials_of(tmp_path / "run")
    assert [trial.state.name for trial in trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    failure = trials[2].user_attrs["failure"]
    where = f"rank [01], ({at('(torch.ones(100)')}|{at('all_reduce(torch.ones(2))')})"
    assert re.match(rf"{where}: the process died of SIGABRT, most likely because the ranks of its worker", failure)
    assert "in disagree" in trials[2].user_attrs["traceback"]
    told = r"error: rank [01] of worker 0 on \S+: the process died of SIGABRT, .*; it was evaluating trial 2 \(lr=.*\)"
    assert len(re.findall(told + r"; it was at\n  File .*careless\.py", job.stderr)) == 1, job.stderr
    assert "starting it again" in job.stdout


def test_each_line_that_an_objective_prints_says_whose_it_is_and_is_kept(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(4, *careless(tmp_path, "say", "--evaluations", 3, "--ranks-per-worker", 2), cwd=tmp_path)
    assert job.returncode == 0
    marked = [line.split(" | ", 1) for line in job.stdout.splitlines() if " | " in line]
    for label in ("worker 0 rank 0", "worker 0 rank 1", "worker 1 rank 0", "worker 1 rank 1"):
        mine = [text for whose, text in marked if whose == label]
        said = [f"{label[9:]} says hello", "100%", "without an end"]
        assert mine == said * (len(mine) // 3), "whole lines, in their order"
    assert len(marked) == 3 * 2 * 3
    complaints = sorted(line.partition(" | ")[2] for line in job.stderr.splitlines())
    assert complaints == ["WARNING mine: be warned"] * 6 + ["and complains"] * 6
    for trial in trials_of(tmp_path / "run"):
        kept = (tmp_path / "run" / "printed" / f"{trial.number}.txt").read_text().splitlines()
        of_rank_1 = [line for line in kept if line.startswith("rank 1 | ")]
        assert sorted(line.removeprefix("rank 1 | ") for line in of_rank_1) == sorted(
            ["rank 1 says hello", "and complains", "100%", "WARNING mine: be warned", "without an end"]
        )
        assert len(kept) == 10


NUMBERS = """
import numpy as np, torch
from hpo import Int, SearchSpace

values = [
    torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True), np.float32(0.5), np.array(0.5), 0.5,
    (torch.tensor(0.5), {"count": torch.tensor(3), "share": np.float64(0.5), "whole": 7}), torch.ones(2), np.ones(2),
]
space = SearchSpace(k=Int(0, len(values) - 1))


def objective(params, worker):
    yield values[params["k"]]
"""


def test_a_loss_is_any_kind_of_number(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(NUMBERS)
    job = mpi.run(1, PROGRAM, "numbers.py", "--run-dir", "run", "--evaluations", 9, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = {trial.params["k"]: trial for trial in trials_of(tmp_path / "run")}
    assert [trials[k].values for k in range(7)] == [[0.5]] * 7
    assert trials[6].user_attrs["metrics"] == {"count": 3.0, "share": 0.5, "whole": 7.0}
    for k in (7, 8):
        assert "a number, not " in trials[k].user_attrs["failure"]
