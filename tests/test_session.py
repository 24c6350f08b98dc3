from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution

from hpo.errors import UsageError
from hpo.options import Options
from hpo.reader import RunReader
from hpo.record import Record
from hpo.search_file import load_search_file
from hpo.session import Session
from hpo.storage import without_password
from tests.recorded import QUICK, start


@pytest.mark.parametrize("url", [None, "sqlite:///{}/study.db"])
def test_a_run_that_was_killed_while_it_began_can_begin(tmp_path: Path, url: str | None) -> None:
    run_dir, storage = tmp_path / "run", url and url.format(tmp_path)
    start(run_dir, storage=storage)
    (run_dir / "run.json").unlink()
    session = start(run_dir, resume=True, storage=storage)
    record = session.open_record()
    space = load_search_file(QUICK).space
    params = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
    assert record.start(params, space.distributions(), session.budget) is not None
    (run_dir / "run.json").unlink()
    with pytest.raises(UsageError, match="already holds a study named 'run'"):
        start(run_dir, resume=True, storage=storage)


def test_settings_are_those_that_were_set_last(tmp_path: Path) -> None:
    for settings, epochs in ((("epochs=3", "seconds=0.5"), 3), (("epochs=4",), 4), ((), 4)):
        session = start(tmp_path / "run", resume=True, settings=settings)
        content = json.loads((tmp_path / "run" / "run.json").read_text())
        assert content["set"] == {"epochs": str(epochs), "seconds": "0.5"}
        assert content["settings"] == {"epochs": epochs, "seconds": 0.5}
    assert "was" not in session.headline


def test_no_password_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (
        f"sqlite://me:secret@/{tmp_path}/study.db"  # not one that SQLite takes, but the message is written all the same
    )
    monkeypatch.setattr("sys.argv", ["run_islands.py", "--storage", url])
    with pytest.raises(UsageError, match=r"the storage sqlite://me:\*\*\*@/") as raised:
        start(tmp_path / "run", storage=url)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    start(tmp_path / "other")
    run_json = tmp_path / "other" / "run.json"
    content = json.loads(run_json.read_text())
    run_json.write_text(json.dumps({**content, "storage": "postgresql://me:***@host/db"}))
    with pytest.raises(UsageError, match="give --storage URL again, with the password"):
        start(tmp_path / "other", resume=True)


def test_looking_at_a_run_needs_its_study(tmp_path: Path) -> None:
    session = start(tmp_path / "run")
    assert RunReader(tmp_path / "run").summary(3)["evaluations"]["budget"] == session.budget
    (tmp_path / "run" / "study.log").unlink()
    with pytest.raises(UsageError, match=r"study.log, the study of this run, is missing: restore it"):
        RunReader(tmp_path / "run").summary(3)
    with pytest.raises(UsageError, match="holds no run"):
        RunReader(tmp_path / "nowhere")


PARAMS = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}


def a_run(path: Path, evaluations: int = 3) -> Session:
    """Leave a run that was killed: some evaluations complete, and one running."""
    session = start(path)
    record, distributions = session.open_record(), load_search_file(QUICK).space.distributions()
    for number in range(evaluations + 1):
        assignment = record.start({**PARAMS, "depth": number + 1}, distributions, 9, island=0, worker=0, generation=0)
        assert assignment is not None
        if number < evaluations:
            record.complete(assignment, 0.5, 1.0, {})
    return session


def test_a_study_cut_anywhere_goes_on_with_what_it_holds_or_is_refused_and_left_alone(tmp_path: Path) -> None:
    a_run(tmp_path / "whole")
    whole = (tmp_path / "whole" / "study.log").read_bytes()
    outcomes = Counter[int]()
    for place in range(0, len(whole) + 1, 7):
        run_dir = tmp_path / f"cut{place}" / "whole"
        shutil.copytree(tmp_path / "whole", run_dir)
        (run_dir / "study.log").write_bytes(whole[:place])
        complete = sum(b'"state":1' in line for line in whole[:place].splitlines(keepends=True) if line[-1:] == b"\n")
        if place < whole.index(b"}}\n") + 3:  # the lines that make the study and say what its space is
            with pytest.raises(UsageError, match=r"there is no study 'whole' in|is of another search space"):
                start(run_dir, resume=True)
            assert (run_dir / "study.log").read_bytes() == whole[:place]
            continue
        session = start(run_dir, resume=True)
        outcomes[complete] += 1
        states = Counter(evaluation.state for evaluation in session.open_record().evaluations())
        assert states["complete"] == complete
        assert states["running"] == 0
        assert states["interrupted"] == states["waiting"]
    assert set(outcomes) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no study 'run' in"),
        (bytes(range(256)) * 9, "study.log is damaged: line 1 is not JSON"),
        (b"[1, 2]\n" * 3, "study.log is damaged: line 1 is not an entry of a journal"),
        (b"glued", "study.log is damaged: line 9 is not JSON"),
        (None, "study.log, the study of this run, is missing: restore it"),
        ("study", "there is no study 'run' in .*study.log, which holds 'theirs'"),
        ("space", "the study 'run' in .*study.log is of another search space than .*run.json says"),
    ],
    ids=["empty", "binary", "json", "glued", "missing", "another study", "another space"],
)
def test_a_study_that_is_not_the_runs_is_refused_and_left_alone(
    tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    a_run(tmp_path / "run")
    journal = tmp_path / "run" / "study.log"
    if content is None:
        journal.unlink()
    elif content == b"glued":
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join([*lines[:8], lines[8][:-9] + lines[9], *lines[10:]]))
    elif isinstance(content, bytes):
        journal.write_bytes(content)
    else:
        journal.unlink()
        space = load_search_file(QUICK).space.describe()
        name, parameters = ("theirs", space) if content == "study" else ("run", {"x": "Int(low=1, high=2)"})
        Record.create(journal, name, tmp_path / "claims", parameters)
    before = {path: path.read_bytes() for path in sorted((tmp_path / "run").iterdir()) if path.name != "lock"}
    with pytest.raises(UsageError, match=message) as raised:
        start(tmp_path / "run", resume=True)
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in sorted((tmp_path / "run").iterdir()) if path.name != "lock"} == before
    if content != "space":
        with pytest.raises(UsageError, match=message):
            RunReader(tmp_path / "run").summary(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "many"}, "'budget' is 'many', and must be a whole number from 1"),
        ({"budget": True}, "'budget' is True"),
        ({"budget": -3}, "'budget' is -3"),
        ({"seed": None}, "'seed' is missing, and must be a whole number from 0"),
        ({"set": {"epochs": 3}}, "'set' is {'epochs': 3}, and must be an object of texts"),
        ({"set": {"epoch": "3"}}, "has no setting 'epoch'"),
        ({"space": {"lr": "Float(low=0, high=1)"}}, "another search space: parameter 'lr' was Float"),
        ({"study": "other"}, "there is no study 'other' in .* which holds 'run'"),
        ({"storage": "other.log"}, "other.log, the study of this run, is missing"),
        ({"storage": "nosql://me:pass@word"}, r"the storage nosql://me:\*\*\*@word"),
    ],
)
def test_an_edited_run_json_is_one_message(tmp_path: Path, change: dict[str, object], message: str) -> None:
    a_run(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    journal = (tmp_path / "run" / "study.log").read_bytes()
    with pytest.raises(UsageError, match=message):
        start(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "study.log").read_bytes() == journal


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\0\xff"])
def test_a_run_json_that_is_none_is_one_message_and_the_study_stays(tmp_path: Path, content: str | None) -> None:
    a_run(tmp_path / "run")
    path, journal = tmp_path / "run" / "run.json", (tmp_path / "run" / "study.log").read_bytes()
    path.unlink()
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(UsageError, match=r"run\.json"):
        start(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "study.log").read_bytes() == journal


def test_a_place_that_cannot_be_written_to_is_one_message(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    mount = ["mount", "--bind", "-o", "ro", str(tmp_path / "run"), str(tmp_path / "run")]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("a read-only place needs root, and leave to mount it")
    try:
        with pytest.raises(UsageError, match=r"--run-dir .*/run: cannot"):
            start(tmp_path / "run", resume=True)
        assert RunReader(tmp_path / "run").summary(3)["evaluations"]["complete"] == 3, "it can be looked at"
    finally:
        subprocess.run(["umount", str(tmp_path / "run")], check=True, timeout=20)


@pytest.mark.parametrize("place", [0, 3, 13, 60, "line"])
def test_a_session_that_was_killed_while_it_made_the_study_can_begin_again(tmp_path: Path, place: int | str) -> None:
    start(tmp_path / "run")
    journal = tmp_path / "run" / "study.log"
    whole = journal.read_bytes()
    (tmp_path / "run" / "run.json").unlink()
    journal.write_bytes(whole[: place if isinstance(place, int) else whole.index(b"\n") + 1])
    (tmp_path / "run" / "study.log.lock").symlink_to(journal)
    began = time.monotonic()
    session = start(tmp_path / "run", resume=True)
    assert time.monotonic() - began < 20, "it did not wait for the lock"
    assert session.open_record().about()["space"] == load_search_file(QUICK).space.describe()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql://me:secret1@host/db?password=secret2&sslkey=secret3&options=all",
            "password=***&sslkey=***",
        ),
        ("postgresql://me:p@secret:secret@host/db", "postgresql://..."),
        ("postgresql://me:secret@secret@host/db", "postgresql://..."),
        ("postgresql://me:sec/ret:secret@host/db", "postgresql://"),
    ],
)
def test_secrets_in_a_storage_url_are_hidden(tmp_path: Path, url: str, shown: str) -> None:
    assert "secret" not in without_password(url)
    assert shown in without_password(url)
    with pytest.raises(UsageError) as raised:
        start(tmp_path / "run", storage=url)
    assert "secret" not in str(raised.value)
    with pytest.raises(UsageError) as raised:
        Options(QUICK, storage=url.split("://")[1])
    assert "secret" not in str(raised.value)


def test_a_study_of_another_program_is_a_start_whatever_its_attributes(tmp_path: Path) -> None:
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "mine.log"))
    study = optuna.create_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    some: list[dict[str, Any]] = [
        {"seconds": "12.5 s", "metrics": ["accuracy"]},
        {"metrics": {"a": [1], "b": "high", "c": 1}},
        {},
    ]
    for depth, attributes in enumerate(some, start=1):
        study.enqueue_trial({"depth": depth, "act": "relu", "flag": True, "lr": 0.123456789012345 / depth}, attributes)
    study.optimize(objective_of_another_program, n_trials=4)
    session = start(tmp_path / "run", start_from=f"{tmp_path}/mine.log#mine")
    assert f"with 3 evaluations of {tmp_path}/mine.log#mine, the best 1\n" in session.headline
    assert "without 1 that is not of this search space, such as trial 3: parameter" in session.headline
    evaluations = session.open_record().evaluations()
    assert [(e.loss, e.metrics, e.params["lr"]) for e in evaluations] == [
        (1.0, {}, 0.123456789012),
        (2.0, {"c": 1.0}, 0.0617283945062),
        (3.0, {}, 0.0411522630041),
    ]
    assert all(0 < evaluation.seconds < 10 for evaluation in evaluations)
    assert RunReader(tmp_path / "run").summary(3)["taken_over"] == 3


def objective_of_another_program(trial: optuna.Trial) -> float:
    depth = trial.suggest_int("depth", 1, 20)
    trial.suggest_categorical("act", ["relu", "tanh"])
    if trial.number < 3:
        trial.suggest_categorical("flag", [True, False])
    trial.suggest_float("lr", 1e-4, 1, log=True)
    time.sleep(0.001)
    return float(depth)


def test_parameters_of_other_distributions_are_taken_for_what_they_mean(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{tmp_path}/mine.db")
    fitting: list[dict[str, Any]] = [
        {"depth": 2.0, "act": "relu", "flag": 1, "lr": 1},
        {"depth": 3, "act": "tanh", "flag": False, "lr": 0.5},
        {"depth": 4, "act": "tanh", "flag": 0.0, "lr": 0.25},
    ]
    others: list[dict[str, Any]] = [
        {"depth": 2.5, "act": "relu", "flag": True, "lr": 0.1},
        {"depth": 2, "act": None, "flag": True, "lr": 0.1},
        {"depth": 2, "act": "relu", "flag": True, "lr": 0.1, "gamma": 0.5},
        {"depth": 2, "act": "relu", "flag": True, "lr": "0.1"},
    ]
    choices: dict[str, dict[Any, None]] = {}
    for params in fitting + others:
        for name, value in params.items():
            choices.setdefault(name, {})[value] = None

    def add(params: dict[str, Any], **outcome: Any) -> None:
        distributions: dict[str, BaseDistribution] = {n: CategoricalDistribution(list(choices[n])) for n in params}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, **outcome))

    for loss, params in enumerate(fitting + others):
        add(params, value=loss, intermediate_values={0: math.nan, 10: loss})
    add(fitting[0], state=optuna.trial.TrialState.PRUNED)  # before its first loss
    session = start(tmp_path / "run", start_from=f"sqlite:///{tmp_path}/mine.db")
    taken = session.open_record().evaluations()
    assert [evaluation.params for evaluation in taken] == [
        {"depth": 2, "act": "relu", "flag": True, "lr": 1.0},
        {"depth": 3, "act": "tanh", "flag": False, "lr": 0.5},
        {"depth": 4, "act": "tanh", "flag": False, "lr": 0.25},
    ]
    assert all([type(value) for value in e.params.values()] == [int, str, bool, float] for e in taken)
    assert "without 4 that are not of this search space, such as trial" in session.headline
    assert "parameter 'depth': 2.5 is not in Int(low=1, high=9)" in session.headline


def test_what_was_taken_over_in_part_is_said(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{tmp_path}/mine.db")
    study.enqueue_trial({"depth": 2, "act": "relu", "flag": True, "lr": 0.1})
    study.optimize(objective_of_another_program, n_trials=1)
    run_json = tmp_path / "run" / "run.json"
    first = start(tmp_path / "run", start_from=f"sqlite:///{tmp_path}/mine.db")
    assert "with 1 evaluation of sqlite:///" in first.headline
    assert "taken over" not in start(tmp_path / "run", resume=True).headline
    content = json.loads(run_json.read_text())
    run_json.write_text(json.dumps({**content, "start_from": "runs/other"}))  # as a run leaves it that is killed then
    again = start(tmp_path / "run", resume=True)
    assert "only a part of runs/other was taken over: give --start-from again for the rest" in again.headline


def test_a_source_is_left_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / "other.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("x")
    for name in ("other.db", "empty.db", "text.db"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(UsageError, match=rf"--start-from sqlite:///.*{name} cannot be read as an Optuna storage: "):
            start(tmp_path / "run", start_from=f"sqlite:///{tmp_path}/{name}")
        assert (tmp_path / name).read_bytes() == before
    start(tmp_path / "moved", storage=f"sqlite:///{tmp_path}/moved.db")
    (tmp_path / "moved.db").unlink()
    with pytest.raises(UsageError, match=r"--start-from .*moved: no such file: .*moved.db"):
        start(tmp_path / "run", start_from=f"{tmp_path}/moved")
    assert not (tmp_path / "moved.db").exists()


def test_a_study_that_is_missing_is_not_made_by_looking_for_what_confirms_it(tmp_path: Path) -> None:
    start(tmp_path / "run")
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "confirm": 2}))
    (tmp_path / "run" / "study.log").unlink()
    with pytest.raises(UsageError, match="is missing: restore it"):
        start(tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "study.log").exists()
