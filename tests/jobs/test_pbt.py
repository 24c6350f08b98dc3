"""Test population based training: parents, and evaluations that begin from their checkpoints."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpo import Categorical, Float, Int, SearchSpace
from hpo.errors import UsageError
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import (
    PARENTS_PER_ISLAND,
    can_be_inherited,
    find_parent,
    find_superseded,
    rank_heritable,
    trace_lineage,
)
from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import load_trials
from tests.support.runs import start_session

SPACE = SearchSpace(
    layers=Int(1, 5),
    kind=Categorical("a", "b", "c", mutable=True),
    lr=Float(0.001, 1.0, log=True, mutable=True),
    rate=Float(0.0, 10.0, mutable=True),
)


def make_heritable(
    trial: int, loss: float, state: str = "complete", island: int = 0, **others: Any
) -> Evaluation:
    params = {"layers": 2, "kind": "a", "lr": 0.1, "rate": 5.0, **others.pop("params", {})}
    curve = {1: loss + 1, 2: loss}
    return Evaluation(
        trial, state, loss, params, island, 0, 0, curve=curve, **{"checkpoint_step": 2, **others}
    )


def test_can_be_inherited_needs_a_checkpoint_at_the_end() -> None:
    assert can_be_inherited(make_heritable(0, 0.5))
    assert not can_be_inherited(make_heritable(0, 0.5, checkpoint_step=1))
    assert not can_be_inherited(make_heritable(0, 0.5, checkpoint_step=0))
    assert not can_be_inherited(make_heritable(0, 0.5, state="paused"))
    assert not can_be_inherited(make_heritable(0, 0.5, imported_from="trial 3 of runs/before"))


def test_find_parent_returns_best_with_same_immutables() -> None:
    best = [
        make_heritable(0, 0.1, params={"layers": 3, "lr": 0.2}),
        make_heritable(1, 0.2, params={"lr": 0.01, "kind": "b"}),
        make_heritable(2, 0.3, params={"lr": 0.2}),
    ]
    params = {"layers": 2, "kind": "a", "lr": 0.2, "rate": 5.0}
    parent = find_parent(params, best, SPACE)
    assert parent is not None
    assert parent.trial == 1
    assert find_parent({**params, "layers": 5}, best, SPACE) is None
    assert find_parent(params, [], SPACE) is None


def test_rank_heritable_keeps_the_best_of_each_island() -> None:
    evaluations = [make_heritable(trial, 1 - trial / 100, island=trial % 3) for trial in range(60)]
    mine = rank_heritable(evaluations, 1, 2)
    assert [e.trial for e in mine[:3]] == [58, 55, 52]
    assert {e.island for e in mine} == {1}
    assert {e.island for e in rank_heritable(evaluations, 0, 2)} == {0, 2}, (
        "individuals of a removed island must go to the others"
    )
    behind = find_superseded(evaluations, 1, 2)
    assert behind == mine[PARENTS_PER_ISLAND:]
    evaluations.append(make_heritable(60, 0.5, state="running", inherits=behind[0].trial))
    assert find_superseded(evaluations, 1, 2) == behind[1:]


def test_trace_lineage_ends_at_the_founder() -> None:
    evaluations = [
        make_heritable(0, 0.9),
        make_heritable(1, 0.8),
        make_heritable(2, 0.7, inherits=0),
        make_heritable(3, 0.6, inherits=2),
        make_heritable(4, 0.5, inherits=9),
    ]
    known = {e.trial: e for e in evaluations}
    assert [e.trial for e in trace_lineage(known[3], known)] == [0, 2, 3]
    assert [e.trial for e in trace_lineage(known[4], known)] == [4], (
        "a missing parent must end the lineage"
    )
    assert trace_lineage(known[1], known) == [known[1]]


def make_command(run_dir: str, *options: object, **settings: object) -> list[object]:
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    return [PROGRAM, SEARCHES / "heirs.py", "--run-dir", run_dir, "--pbt", *options, *chosen]


def assert_inherited(trials: Sequence[optuna.trial.FrozenTrial], epochs: int) -> dict[int, int]:
    """Assert that each trial continues from the final state of its parent.

    Return the parent of each trial.
    """
    ends: dict[int, float] = {}
    parents: dict[int, int] = {}
    for trial in trials:
        x, parent = 10.0, trial.user_attrs.get("inherits", "nothing")
        if parent != "nothing":
            other = trials[parent]
            assert other.state.name == "COMPLETE"
            assert other.params["kind"] == trial.params["kind"]
            assert other.datetime_complete <= trial.datetime_start
            x, parents[trial.number] = ends[parent], parent
        losses = []
        for _ in range(epochs):
            x *= trial.params.get("decay", 1.0) * (1 - 0.1 * trial.params["lr"])
            losses.append(x + trial.params["kind"])
        ends[trial.number] = x
        assert list(trial.intermediate_values.values()) == losses[: len(trial.intermediate_values)]
    return parents


def test_heirs_begin_from_checkpoints_of_their_parents(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(4, *make_command("run", "--evaluations", 30), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    parents = assert_inherited(trials, epochs=3)
    assert len(parents) > 10
    assert all(
        trials[parent].user_attrs["island"] == trials[t].user_attrs["island"]
        for t, parent in parents.items()
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    line = [entry["trial"] for entry in summary["lineage"]]
    assert line[-1] == summary["best"]["trial"]
    assert all(parents[child] == parent for parent, child in pairwise(line))
    assert re.search(r"Lineage of the best.*\n +trial +epochs +loss .*(lr|decay)", job.stdout)
    kept = {int(path.stem) for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors")}
    by_island = [[t for t in trials if t.user_attrs["island"] == island] for island in (0, 1)]
    best = [
        {t.number for t in sorted(own, key=lambda t: t.values[0])[:PARENTS_PER_ISLAND]}
        for own in by_island
    ]
    assert kept == best[0] | best[1]


def test_resume_after_a_kill_keeps_inheriting(mpi: Mpi, tmp_path: Path) -> None:
    """All processes are killed during evaluations.

    The run is resumed with more evaluations, on fewer ranks.
    """
    options = ["--resume", "--islands", 1, "--checkpoint-every", "1s"]
    command = make_command("run", *options, "--evaluations", 16, seconds=0.2)
    victim = Victim(mpi, 4, command, tmp_path, tmp_path / "log")
    victim.wait_for(" 6/16")
    victim.kill("all", random.Random(0))
    victim.wait(30)
    job = mpi.run(2, *command, "--set", "seconds=0", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    before = len(load_trials(tmp_path / "run"))
    more = make_command("run", *options, "--evaluations", 24)
    job = mpi.run(2, *more, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    parents = assert_inherited(trials, epochs=3)
    assert any(child >= before > parent for child, parent in parents.items()), (
        "checkpoints of parents must survive the end of a session"
    )
    repeats = [trial for trial in trials if "retry_of" in trial.user_attrs]
    assert all(
        t.user_attrs.get("inherits") == trials[t.user_attrs["retry_of"]].user_attrs.get("inherits")
        for t in repeats
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"asks": "ignore"},
            "starts without the checkpoint of trial .*: the objective has not read "
            "worker.parent_checkpoint",
        ),
        (
            {"asks": "fail"},
            r"starts without the checkpoint of trial .*: rank [01], .*heirs.py:\d+: KeyError: "
            r"'injected'",
        ),
        (
            {"saves": False},
            "trial .* cannot be a parent: it has not called worker.save_checkpoint before its "
            "last loss",
        ),
    ],
)
def test_heirs_without_a_checkpoint_warn_once(
    mpi: Mpi, tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    job = mpi.run(2, *make_command("run", "--evaluations", 10, **settings), cwd=tmp_path)
    assert job.returncode == 0
    (warning,) = job.stderr.splitlines()
    assert re.search(said, warning), warning
    assert assert_inherited(load_trials(tmp_path / "run"), epochs=3) == {}


def test_evaluation_ended_by_the_target_loss_does_not_warn(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(2, *make_command("run", "--target-loss", 1e9), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert any("cut_after" in trial.user_attrs for trial in load_trials(tmp_path / "run"))


def test_rank_that_fails_before_parent_checkpoint_fails_trial(mpi: Mpi, tmp_path: Path) -> None:
    command = make_command("run", "--evaluations", 12, "--collective-timeout", 60, asks="uneven")
    job = mpi.run(2, *command, cwd=tmp_path, timeout=100)
    assert job.returncode == 0, job.stderr
    failed = [trial for trial in load_trials(tmp_path / "run") if trial.state.name == "FAIL"]
    assert len(failed) == 6
    assert all("rank 1" in trial.user_attrs["failure"] for trial in failed)


def test_long_run_keeps_only_checkpoints_of_the_best(mpi: Mpi, tmp_path: Path) -> None:
    command = make_command("run", "--evaluations", 60, "--islands", 1, "--propagators", "random")
    job = mpi.run(1, *command, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    best = sorted(load_trials(tmp_path / "run"), key=lambda trial: trial.values[0])[
        :PARENTS_PER_ISLAND
    ]
    kept = {int(path.stem) for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors")}
    assert kept == {trial.number for trial in best}


def test_heir_that_diverges_fails(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(2, *make_command("run", "--evaluations", 10, asks="diverge"), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    heirs_of_others = [
        trial for trial in trials if trial.user_attrs.get("inherits", "nothing") != "nothing"
    ]
    assert heirs_of_others
    assert all(
        "the validation loss is nan" in trial.user_attrs["failure"] for trial in heirs_of_others
    )
    assert all(trial.state.name == "COMPLETE" for trial in trials if trial not in heirs_of_others)


@pytest.mark.parametrize("way", ["replicate", "pipeline"])
def test_heir_of_a_network_continues_its_training(mpi: Mpi, tmp_path: Path, way: str) -> None:
    start = [
        PROGRAM,
        SEARCHES / "inheriting.py",
        "--set",
        f"parallel={way}",
        "--set",
        "microbatches=2",
    ]
    start = start if way == "pipeline" else start[:-2]
    whole = mpi.run(
        2, *start, "--run-dir", "whole", "--evaluations", 1, "--set", "epochs=4", cwd=tmp_path
    )
    assert (whole.returncode, whole.stderr) == (0, "")
    job = mpi.run(2, *start, "--run-dir", "run", "--evaluations", 2, "--pbt", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    first, second = (
        list(trial.intermediate_values.values()) for trial in load_trials(tmp_path / "run")
    )
    (expected,) = (
        list(trial.intermediate_values.values()) for trial in load_trials(tmp_path / "whole")
    )
    assert [*first, *second] == pytest.approx(expected, rel=1e-4)
    assert second[0] < min(first), "the second network must continue from the first"


def test_pbt_with_a_pausing_pruner_is_rejected(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(2, *make_command("run", "--pruner", "asha"), cwd=tmp_path)
    assert job.returncode == 2
    (line,) = job.stderr.splitlines()
    assert re.search("--pbt and --pruner asha exclude each other: .*Give one of them", line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        (
            "heirs",
            {"confirm_seeds": 2},
            "--pbt and --confirm-seeds 2 exclude each other: inherited weights are not trained "
            "again",
        ),
        (
            "heirs",
            {"checkpoint_every": math.inf},
            "--pbt and --checkpoint-every off exclude each other: only checkpoints can be "
            "inherited",
        ),
        (
            "heirs",
            {"propagators": ("ga", "propulate")},
            "among ga, tpe, random with --pbt, got propulate",
        ),
        (
            "tiny",
            {},
            r"--pbt must be used with at least one mutable parameter.*depth=Int\(1, 3, "
            r"mutable=True\)",
        ),
    ],
)
def test_pbt_with_conflicting_options_is_rejected(
    tmp_path: Path, file: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.compile(said, re.DOTALL)):
        start_session(tmp_path / "run", SEARCHES / f"{file}.py", pbt=True, **options)
    assert not (tmp_path / "run").exists()
