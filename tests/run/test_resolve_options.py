"""Test which options a resumed run keeps, and which options each session records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpo.cli.command_line import call_app
from hpo.cli.mpi_commands import make_command_app, make_search
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import RECORDED_OPTIONS, Options, from_json, to_json
from hpo.run.resolve_options import resolve_options
from hpo.trainer.search_file import load_search_file
from tests.support.runs import QUICK, claim_evaluation, start_session

SETTINGS = {"seconds": 0.0, "epochs": 2}


def read_sessions(run_dir: Path) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = json.loads((run_dir / "run.json").read_text())["sessions"]
    return sessions


def test_session_records_its_options_and_settings(tmp_path: Path) -> None:
    start_session(
        tmp_path / "run",
        seed=3,
        pruner="asha",
        confirm_seeds=2,
        target_loss=0.5,
        settings=("epochs=4",),
    )
    start_session(tmp_path / "run", resume=True, seed=5, evaluations=9)
    first, second = read_sessions(tmp_path / "run")
    asked = {"evaluations": 64, "seed": 3, "pruner": "asha", "confirm_seeds": 2, "target_loss": 0.5}
    assert {name: first["options"][name] for name in asked} == asked
    assert first["settings"] == second["settings"] == {**SETTINGS, "epochs": 4}
    assert [
        second["options"][name] for name in ("evaluations", "seed", "pruner", "confirm_seeds")
    ] == [9, 5, "asha", 2]


def test_resume_prints_the_options_that_differ(tmp_path: Path) -> None:
    start_session(tmp_path / "run", migration_probability=0.5)
    now: dict[str, Any] = {
        "migration_probability": 0.5,
        "seed": 7,
        "propagators": ("tpe", "random"),
        "fresh_trainers": True,
    }
    lines = start_session(
        tmp_path / "run", resume=True, evaluations=9, confirm_seeds=1, **now
    ).headline.splitlines()[2:]
    assert lines == [
        "--fresh-trainers was off before, and is on now",
        "--propagators was ga before, and is tpe,random now",
        "--seed was 0 before, and is 7 now: losses may not be comparable",
    ]
    assert start_session(tmp_path / "run", resume=True, **now).headline.splitlines()[2:] == []


@pytest.mark.parametrize(
    "options",
    [
        [],
        {"seed": "3"},
        {"top_n": 0},
        {"checkpoint_every": "on"},
        {"propagators": [3]},
        {"propagators": ["gaa"]},
        {"confirm_seeds": None},
    ],
)
def test_resume_with_edited_options_raises(tmp_path: Path, options: object) -> None:
    start_session(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    content = json.loads(path.read_text())
    content["sessions"][0]["options"] = options
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"run\.json: 'sessions' must be"):
        start_session(tmp_path / "run", resume=True)


def test_from_json_of_to_json_returns_the_same_options() -> None:
    given: list[dict[str, Any]] = [
        {},
        {"checkpoint_every": float("inf"), "propagators": ("tpe",), "evaluation_timeout": 1.5},
    ]
    for others in given:
        options = Options(QUICK, **others)
        values = json.loads(json.dumps(to_json(options), allow_nan=False))
        assert {name: from_json(name, value) for name, value in values.items()} == {
            name: getattr(options, name) for name in RECORDED_OPTIONS
        }


def parse(*arguments: object, ranks: int = 4) -> tuple[Options, Layout]:
    """Return the options that this command line sets, and the layout."""
    given = call_app(
        make_command_app(make_search(QUICK)), "run_islands.py", list(map(str, arguments))
    )
    return resolve_options(given, ranks)


def parse_options(*arguments: object) -> Options:
    return parse(*arguments)[0]


# For each field of Options: the value of the first session, and the arguments that override it,
# with their value.
KEPT_VALUES: dict[str, tuple[Any, str, Any]] = {
    "migration_probability": (0.5, "--migration-probability 0.9", 0.9),
    "pollination": (False, "--pollination", True),
    "top_n": (5, "--top-n 3", 3),
    "collective_timeout": (90.0, "--collective-timeout 10m", 600.0),
    "evaluation_timeout": (30.0, "--evaluation-timeout off", math.inf),
    "fresh_trainers": (True, "--no-fresh-trainers", False),
    "checkpoint_every": (math.inf, "--checkpoint-every 10", 10.0),
    "max_failures": (7, "--max-failures 0", 0),
    "target_loss": (-0.5, "--target-loss off", -math.inf),
}


@pytest.mark.parametrize("name", KEPT_VALUES)
def test_resume_keeps_an_option_unless_it_is_given(tmp_path: Path, name: str) -> None:
    value, words, other = KEPT_VALUES[name]
    path = tmp_path / "run"
    asked: dict[str, Any] = {name: value}
    start_session(path, **asked)
    resume = ("--run-dir", path, "--resume")
    assert getattr(parse_options(*resume), name) == value
    assert getattr(parse_options(*resume, *words.split()), name) == other
    assert getattr(parse_options(), name) == Options.__dataclass_fields__[name].default, (
        "A new run has the default."
    )
    asked = {name: other}
    start_session(path, resume=True, **asked)
    assert getattr(parse_options(*resume), name) == other


def test_resumed_workers_keep_their_ranks_if_possible(tmp_path: Path) -> None:
    start_session(tmp_path / "run")  # with workers of two ranks
    resumed = ("--run-dir", tmp_path / "run", "--resume")
    sizes = {ranks: parse(*resumed, ranks=ranks)[1].ranks_per_worker for ranks in (1, 2, 3, 6, 8)}
    assert sizes == {1: 1, 2: 2, 3: 1, 6: 2, 8: 2}
    path = tmp_path / "run" / "run.json"
    content = json.loads(path.read_text())
    content["layout"].update(ranks_per_worker=1)
    path.write_text(json.dumps(content))
    assert parse(*resumed, ranks=4)[1].ranks_per_worker == 1
    assert parse(*resumed, "--ranks-per-worker", 4, ranks=4)[1].ranks_per_worker == 4
    lines = start_session(tmp_path / "run", resume=True).headline.splitlines()
    changed = "workers had 1 rank before, and have 2 now: losses may not be comparable"
    assert changed in lines
    lines = start_session(tmp_path / "run", resume=True).headline.splitlines()
    assert not any(line.startswith("workers had") for line in lines)


def test_resume_with_fewer_islands_than_propagators(tmp_path: Path) -> None:
    start_session(tmp_path / "run", propagators=("ga", "tpe"))
    resumed = ("--run-dir", tmp_path / "run", "--resume", "--ranks-per-worker", 1)
    for words in (
        ["--islands", 1],
        ["--islands", 1, "--propagators", "ga,tpe"],
        ["--propagators", "ga,tpe"],
    ):
        options, layout = parse(*resumed, *words, ranks=1)
        assert (options.propagators, layout.islands) == (("ga", "tpe"), 1)
    with pytest.raises(
        UsageError, match="each propagator needs its own island, and --islands is 1"
    ):
        parse("--islands", 1, "--propagators", "ga,tpe")


@pytest.mark.parametrize("lost", ["seed", "evaluations", "pbt"])
def test_resume_without_a_recorded_option_raises(tmp_path: Path, lost: str) -> None:
    start_session(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    content = json.loads(path.read_text())
    del content["sessions"][-1]["options"][lost]
    path.write_text(json.dumps(content))
    with pytest.raises(
        UsageError, match=f"run.json: 'options' of the last session must have {lost}"
    ):
        start_session(tmp_path / "run", resume=True)


def test_resume_without_options_drops_job_specific_options(tmp_path: Path) -> None:
    path = tmp_path / "run"
    start_session(
        path, ranks_per_worker=4, time_limit=60.0, trackers=("tensorboard",), log_level="error"
    )
    assert parse_options("--run-dir", path, "--resume") == Options(QUICK, run_dir=path, resume=True)


def test_resume_keeps_islands_if_there_are_workers(tmp_path: Path) -> None:
    def islands(workers: int, *arguments: object) -> int:
        resumed = ("--run-dir", tmp_path / "run", "--resume", "--ranks-per-worker", 1)
        return parse(*resumed, *arguments, ranks=workers)[1].islands

    assert islands(8) == 2, "There is no run yet."
    start_session(tmp_path / "run", islands=4)
    assert [islands(8), islands(3), islands(8, "--islands", 1)] == [4, 3, 1]
    start_session(tmp_path / "run", resume=True, propagators=("ga", "tpe", "random"))
    assert [islands(8), islands(2)] == [4, 2]
    (tmp_path / "run").rename(tmp_path / "other")
    start_session(tmp_path / "run", propagators=("ga", "tpe", "random"))
    assert [islands(8), islands(8, "--propagators", "ga")] == [3, 2]


def test_retried_evaluation_keeps_its_seed(tmp_path: Path) -> None:
    session = start_session(tmp_path / "run")
    record, distributions = (
        session.open_record(),
        load_search_file(QUICK).space.make_distributions(),
    )
    params = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
    record.interrupt(claim_evaluation(record, params, distributions, 9, seed=3))
    retry = claim_evaluation(record, None, distributions, 9, seed=5)
    record.prune(retry, 0.5, 1.0, {}, paused_after=1)
    promoted = record.promote(record.read_evaluations()[retry.number], {"seed": 5})
    assert (retry.number, retry.seed, promoted.number, promoted.seed) == (1, 3, 2, 3)
