"""Test common mistakes in an objective, in MPI jobs: effects, and texts of failures."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.layout import list_usable_cores
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials

CARELESS = SEARCHES / "careless.py"


def find_line(code: str) -> int:
    """Return the line number of this code in the search file. It must occur once."""
    (number,) = [n for n, line in enumerate(CARELESS.read_text().splitlines(), 1) if code in line]
    return number


def match_line(code: str) -> str:
    return rf"careless\.py:{find_line(code)}"


def make_careless_arguments(folder: Path, ways: str, *options: object) -> list[object]:
    """Return the arguments of a run. The path of the search file is relative, as users type it."""
    return [
        PROGRAM,
        os.path.relpath(CARELESS, folder),
        "--run-dir",
        "run",
        "--set",
        f"ways={ways}",
        *options,
    ]


def run_failures(mpi: Mpi, folder: Path, reasons: dict[str, str], seconds: int = 60) -> list[str]:
    """Run an evaluation for each way to fail.

    Assert the reason of each failure, and return the tracebacks.

    Args:
        mpi: Launches the job.
        folder: Folder of the run.
        reasons: A pattern for the failure, by way. If it is empty, the evaluation must complete.
        seconds: Timeout of collectives.
    """
    options = ["--collective-timeout", seconds, "--evaluations", len(reasons)]
    job = mpi.run(2, *make_careless_arguments(folder, ",".join(reasons), *options), cwd=folder)
    assert (job.returncode, job.stderr) == (3 if all(reasons.values()) else 0, "")
    tracebacks = []
    for (way, reason), trial in zip(reasons.items(), load_trials(folder / "run"), strict=True):
        failure = trial.user_attrs.get("failure", "")
        assert re.fullmatch(reason, failure), f"{way}: {failure}"
        assert trial.state.name == ("FAIL" if reason else "COMPLETE"), way
        assert failure[:100] in job.stdout
        tracebacks += [trial.user_attrs["traceback"]] if reason else []
    return tracebacks


def test_objective_that_changes_its_arguments_is_isolated(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--ranks-per-worker", 2, "--islands", 1, "--evaluations", 6]
    # Torch warns of it with Python 3.13.0.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Guards may run slower")
    mpi = replace(mpi, forks_templates=False)  # so that Python reads the variable
    job = mpi.launch(4, *make_careless_arguments(tmp_path, "none,compile", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert len(trials) == 6
    for trial in trials:
        assert trial.values == [trial.params["lr"]], (
            "the loss is lr, which the objective removed from its params"
        )
        metrics = trial.user_attrs["metrics"]
        assert metrics["parameters"] == 5 * (trial.params["width"] // 8)
        if "graphs" in metrics:
            assert metrics["graphs"] >= 1, (
                "torch's compiler works, also after training with DistributedDataParallel"
            )
            assert metrics["difference"] == pytest.approx(0.0, abs=1e-6)
    assert sum("graphs" in trial.user_attrs["metrics"] for trial in trials) >= 2


def test_mistake_failure_names_line_and_remedy(mpi: Mpi, tmp_path: Path) -> None:
    computes = r"\w+Error: .* \(worker\.device is where this rank computes: .*\)"
    reasons = {
        "tuple": (
            f"{match_line('yield wrong')}: TypeError: metrics must be a dict of numbers by name, "
            f"got 0\\.9\\. .*"
        ),
        "text": (
            f"{match_line('yield wrong')}: TypeError: metric 'note' must be a number, got 'good'"
        ),
        "model": (
            rf"{match_line('offer_weights(model)')}: TypeError: .* offer model\.state_dict\(\)"
        ),
        "sharded": f"{match_line('offer_weights(model.state_dict())')}: TypeError: "
        ".* is sharded: offer, on all ranks, get_model_.*",
        "path": (
            rf"{match_line('missing.bin')}: FileNotFoundError: .* \(a relative path, looked for in "
            rf"/.*\)"
        ),
        "cuda": rf"{match_line('model.cuda()')}: {computes}",
        "returned": f"{match_line('def objective(')}: ValueError: "
        ".* no loss, but returned 0.5: it has a yield somewhere",
    }
    if Path("/dev/nvidiactl").exists():
        del reasons["cuda"]
    tracebacks = run_failures(
        mpi, tmp_path, {way: f"rank [01], {reason}" for way, reason in reasons.items()}
    )
    for traceback in tracebacks:
        first, second, *_ = traceback.splitlines()
        assert first == "Traceback (most recent call last):"
        assert re.match(r'  File ".*careless\.py"', second), "the traceback begins in the objective"


def test_timeout_failure_names_lines_of_both_ranks(mpi: Mpi, tmp_path: Path) -> None:
    waited = r"timeout: rank \d waited 2 s \(--collective-timeout\) at"
    trains, alone, late = (
        match_line("= DistributedData"),
        match_line('"alone"'),
        match_line("torch.ones(9)"),
    )
    bar = match_line("dist.barrier()")
    reasons = {
        "sleep": rf"{waited} {trains} for rank 0, which was at {match_line('sleep(3600)')}",
        "yield": (
            rf"{waited} ({alone} for rank 1, which was at {trains}|{trains} for rank 0, which .* "
            rf"at {alone})"
        ),
        "late": (
            rf"{waited} (its end for rank 1, which was at {late}|{late} for rank 0, which had "
            rf"ended)"
        ),
        "barrier": (
            rf"{waited} ({trains} for rank 0, which was at {bar}|{bar} for rank 1, which was at "
            rf"{trains})"
        ),
        "return": (
            f"rank 1, {match_line('def objective(')}: ValueError: the objective yielded no loss"
        ),
        "none": "",
        "swallow": "",  # It swallows the timeout.
        "none again": "",
    }
    run_failures(mpi, tmp_path, reasons, seconds=2)


def test_torch_distributed_debug_finds_mismatches(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    differs = "RuntimeError: Detected mismatch between collectives on ranks"
    places = {
        "size": match_line("3 + worker"),
        "type": match_line("torch.float64"),
        "barrier": match_line("dist.barrier()"),
    }
    places["number"] = (
        f"({match_line('(torch.ones(100)')}|{match_line('all_reduce(torch.ones(2))')})"
    )
    reasons = {way: rf"rank [01], {place}: {differs}\. .*" for way, place in places.items()}
    reasons["barrier"] = (
        rf"rank [01], ({match_line('= DistributedData')}|{places['barrier']}): {differs}\. .*"
    )
    tracebacks = run_failures(mpi, tmp_path, {"none": "", **reasons})
    assert len(tracebacks) == 4
    for traceback in tracebacks:
        assert re.match(
            r'Traceback .*\n  File ".*careless\.py", .*\n(  .*\n)+RuntimeError: Detected mis',
            traceback,
        )


def test_printed_lines_are_labelled_and_kept(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(
        4,
        *make_careless_arguments(tmp_path, "say", "--evaluations", 3, "--ranks-per-worker", 2),
        cwd=tmp_path,
    )
    assert job.returncode == 0
    marked = [line.split(" | ", 1) for line in job.stdout.splitlines() if " | " in line]
    for label in ("worker 0 rank 0", "worker 0 rank 1", "worker 1 rank 0", "worker 1 rank 1"):
        mine = [text for line_label, text in marked if line_label == label]
        expected = [
            f"{label[9:]} says hello",
            "native code",
            "a child",
            "100%",
            "''",
            "without an end",
        ]
        assert mine == expected * (len(mine) // len(expected)), "lines are complete and in order"
    assert len(marked) == 3 * 2 * 6
    complaints = sorted(line.partition(" | ")[2] for line in job.stderr.splitlines())
    assert complaints == ["WARNING mine: be warned"] * 6 + ["and complains"] * 6
    for trial in load_trials(tmp_path / "run"):
        kept = (tmp_path / "run" / "logs" / f"{trial.number}.txt").read_text().splitlines()
        of_rank_1 = [line for line in kept if line.startswith("rank 1 | ")]
        assert sorted(line.removeprefix("rank 1 | ") for line in of_rank_1) == sorted(
            [f"{label[9:]} says hello", "and complains", "WARNING mine: be warned", *expected[1:]]
        )
        assert len(kept) == 2 * 8


NUMBERS = """
import numpy as np, torch
from hpo import Int, SearchSpace

values = [
    torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True),
    np.float32(0.5), np.array(0.5), 0.5,
    lambda: (torch.tensor(0.5), {
        "count": torch.tensor(3), "share": np.float64(0.5), "whole": torch.get_num_threads()
    }),
    torch.ones(2), np.ones(2),
]
space = SearchSpace(k=Int(0, len(values) - 1))


def objective(params, worker):
    value = values[params["k"]]
    yield value() if callable(value) else value
"""


def test_loss_may_be_any_kind_of_number(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "numbers.py").write_text(NUMBERS)
    job = mpi.run(1, PROGRAM, "numbers.py", "--run-dir", "run", "--evaluations", 9, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = {trial.params["k"]: trial for trial in load_trials(tmp_path / "run")}
    assert [trials[k].values for k in range(7)] == [[0.5]] * 7
    cores = len(list_usable_cores())  # The only rank uses all of them as threads.
    assert trials[6].user_attrs["metrics"] == {"count": 3.0, "share": 0.5, "whole": cores}
    for k in (7, 8):
        assert "a number, got " in trials[k].user_attrs["failure"]
