"""Test sessions of a run: start, resume, warm start, and the copies of the search file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.errors import UsageError
from hpo.options import Options
from hpo.results.reader import RunReader
from hpo.run.session import Session
from hpo.run.source_versions import Commit, find_commit
from hpo.store.record import Record, make_study
from hpo.store.run_dir import RunDir
from hpo.store.storage import open_storage
from hpo.store.storage_url import mask_password
from hpo.trainer.search_file import load_search_file
from tests.support.limits import scale
from tests.support.runs import QUICK, claim_evaluation, complete_evaluations, start_session


@pytest.mark.parametrize("url", [None, "sqlite:///{}/study.db"])
def test_run_killed_at_its_start_can_start_again(tmp_path: Path, url: str | None) -> None:
    run_dir, storage = tmp_path / "run", url and url.format(tmp_path)
    start_session(run_dir, storage=storage)
    (run_dir / "run.json").unlink()
    session = start_session(run_dir, resume=True, storage=storage)
    record = session.open_record()
    space = load_search_file(QUICK).space
    params = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
    assert (
        claim_evaluation(record, params, space.make_distributions(), session.manifest.budget)
        is not None
    )
    (run_dir / "run.json").unlink()
    with pytest.raises(UsageError, match="already has a study named 'run'"):
        start_session(run_dir, resume=True, storage=storage)


def test_resume_keeps_settings_that_were_set_last(tmp_path: Path) -> None:
    for settings, epochs in ((("epochs=3", "seconds=0.5"), 3), (("epochs=4",), 4), ((), 4)):
        session = start_session(tmp_path / "run", resume=True, settings=settings)
        content = json.loads((tmp_path / "run" / "run.json").read_text())
        assert content["set"] == {"epochs": str(epochs), "seconds": "0.5"}
        assert content["settings"] == {"epochs": epochs, "seconds": 0.5}
    assert "was" not in session.headline


def test_resume_with_nan_setting_reports_no_difference(tmp_path: Path) -> None:
    search = tmp_path / "search.py"
    search.write_text(
        QUICK.read_text().replace(
            "    epochs: int", '    clip: float = float("nan")\n    epochs: int', 1
        )
    )
    for settings in (("seconds=inf",), (), ()):
        session = start_session(tmp_path / "run", search, resume=True, settings=settings)
        text = (tmp_path / "run" / "run.json").read_text()
        content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (content["settings"]["clip"], content["settings"]["seconds"]) == ("nan", "inf")
        assert "losses may not be comparable" not in session.headline


def test_run_json_holds_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SQLite refuses it, but the message must hide the password.
    url = f"sqlite://me:secret@/{tmp_path}/study.db"
    monkeypatch.setattr("sys.argv", ["run_islands.py", "--storage", url])
    with pytest.raises(UsageError, match=r"the storage sqlite://me:\*\*\*@/") as raised:
        start_session(tmp_path / "run", storage=url)
    assert "secret" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    start_session(tmp_path / "other")
    run_json = tmp_path / "other" / "run.json"
    content = json.loads(run_json.read_text())
    run_json.write_text(json.dumps({**content, "storage": "postgresql://me:***@host/db"}))
    with pytest.raises(UsageError, match="give --storage URL again, with the password"):
        start_session(tmp_path / "other", resume=True)


def test_reader_without_study_file_raises_usage_error(tmp_path: Path) -> None:
    session = start_session(tmp_path / "run")
    assert RunReader(tmp_path / "run").make_summary(3).counts["budget"] == session.manifest.budget
    (tmp_path / "run" / "study.log").unlink()
    with pytest.raises(
        UsageError, match=r"study.log, the study of this run, is missing: restore it"
    ):
        RunReader(tmp_path / "run").make_summary(3)
    with pytest.raises(UsageError, match="holds no run"):
        RunReader(tmp_path / "nowhere")


PARAMS = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}


def make_killed_run(path: Path, evaluations: int = 3) -> Session:
    """Write a run that was killed: `evaluations` are complete, and one more is running."""
    session = start_session(path)
    record, distributions = (
        session.open_record(),
        load_search_file(QUICK).space.make_distributions(),
    )
    for number in range(evaluations + 1):
        assignment = claim_evaluation(
            record,
            {**PARAMS, "depth": number + 1},
            distributions,
            9,
            island=0,
            worker=0,
            generation=0,
        )
        if number < evaluations:
            record.complete(assignment, 0.5, 1.0, {})
    return session


@pytest.mark.slow
def test_resume_with_cut_journal_continues_or_is_refused(tmp_path: Path) -> None:
    make_killed_run(tmp_path / "whole")
    whole = (tmp_path / "whole" / "study.log").read_bytes()
    starts = [0, *(position for position, byte in enumerate(whole, 1) if byte == ord("\n"))]
    in_lines = {
        position
        for start, end in pairwise(starts)
        for position in (start, start + 1, (start + end) // 2, end - 1)
    }
    outcomes = Counter[int]()
    for position in sorted({*in_lines, len(whole)}):
        run_dir = tmp_path / f"cut{position}" / "whole"
        shutil.copytree(tmp_path / "whole", run_dir)
        (run_dir / "study.log").write_bytes(whole[:position])
        complete = sum(
            b'"state":1' in line
            for line in whole[:position].splitlines(keepends=True)
            if line[-1:] == b"\n"
        )
        if whole[:position].count(b"\n") < 2:  # These lines create the study and record its space.
            with pytest.raises(
                UsageError, match=r"there is no study 'whole' in|has another search space"
            ):
                start_session(run_dir, resume=True)
            assert (run_dir / "study.log").read_bytes() == whole[:position]
            continue
        session = start_session(run_dir, resume=True)
        outcomes[complete] += 1
        states = Counter(
            evaluation.state for evaluation in session.open_record().read_evaluations()
        )
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
        ("space", "the study 'run' in .*study.log has another search space than .*run.json"),
    ],
    ids=["empty", "binary", "json", "glued", "missing", "another study", "another space"],
)
def test_resume_with_foreign_study_is_refused(
    tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    make_killed_run(tmp_path / "run")
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
        name, parameters = ("theirs", space) if content == "study" else ("run", {"x": "Int(1, 2)"})
        Record.create(journal, name, parameters)
    before = {
        path: path.read_bytes()
        for path in sorted((tmp_path / "run").iterdir())
        if path.name != "lock"
    }
    with pytest.raises(UsageError, match=message) as raised:
        start_session(tmp_path / "run", resume=True)
    assert "\n" not in str(raised.value)
    assert {
        path: path.read_bytes()
        for path in sorted((tmp_path / "run").iterdir())
        if path.name != "lock"
    } == before
    if content != "space":
        with pytest.raises(UsageError, match=message):
            RunReader(tmp_path / "run").make_summary(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": "many"}, "'budget' must be a whole number from 1, got 'many'"),
        ({"budget": True}, "'budget' must be a whole number from 1, got True"),
        ({"budget": -3}, "'budget' must be a whole number from 1, got -3"),
        ({"seed": None}, "'seed' must be a whole number from 0, got nothing"),
        ({"set": {"epochs": 3}}, "'set' must be an object of texts, got {'epochs': 3}"),
        (
            {"set": {"epoch": "3"}},
            r"--resume: --set epoch=3: .*no setting 'epoch'; did you mean epochs.*: change it in "
            r"'set' of .*run\.json",
        ),
        (
            {"set": {"epochs": "3.5"}},
            "--set epochs=3.5: epochs takes a whole number, not '3.5'. The setting was given in an "
            "earlier session",
        ),
        ({"space": {"lr": "Float(0, 1)"}}, "another search space: parameter 'lr' was Float"),
        (
            {"propagators": ["ga", "gaa"]},
            r"'propagators' must be a list of some of ga, tpe, .*, got \['ga', 'gaa'\]",
        ),
        (
            {"pruner": "medium"},
            "'pruner' must be none, median, percentile:P .* or one-epoch, got 'medium'",
        ),
        ({"study": "other"}, "there is no study 'other' in .* which holds 'run'"),
        ({"storage": "other.log"}, "other.log, the study of this run, is missing"),
        ({"storage": "nosql://me:pass@word"}, r"the storage nosql://me:\*\*\*@word"),
        (
            {"sessions": None},
            "'sessions' must be a list of sessions with a file and its sha256, got nothing",
        ),
        ({"sessions": []}, r"'sessions' must be .*, got \[\]"),
        ({"sessions": ["first"]}, r"'sessions' must be .*, got \['first'\]"),
        (
            {"sessions": [{"file": "../search_space-1.py", "sha256": "0" * 64}]},
            r"'sessions' must be .*, got \[{'file': '../",
        ),
        ({"sessions": [{"file": "search_space-1.py", "sha256": 3}]}, "'sessions' must be"),
        (
            {"sessions": [{"file": "search_space-1.py", "sha256": "0" * 64, "commit": "main"}]},
            "'commit': 'main'",
        ),
    ],
)
def test_resume_with_edited_run_json_is_one_message(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    make_killed_run(tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    journal = (tmp_path / "run" / "study.log").read_bytes()
    with pytest.raises(UsageError, match=message):
        start_session(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "study.log").read_bytes() == journal


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"/run\.json is missing; restore it, or give another --run-dir"),
        *((text, r"/run\.json cannot be read: \w") for text in ("", "{", "\0\xff", "[" * 100_000)),
        ("[]", r"/run\.json: 'space' must be an object of texts, got nothing"),
    ],
    ids=["missing", "empty", "cut", "binary", "deep", "list"],
)
def test_resume_with_invalid_run_json_is_one_message(
    tmp_path: Path, content: str | None, message: str
) -> None:
    make_killed_run(tmp_path / "run")
    path, journal = tmp_path / "run" / "run.json", (tmp_path / "run" / "study.log").read_bytes()
    path.unlink()
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(UsageError, match=message):
        start_session(tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "study.log").read_bytes() == journal


def test_run_dir_without_write_permission_is_one_message(tmp_path: Path) -> None:
    make_killed_run(tmp_path / "run")
    mount = ["mount", "--bind", "-o", "ro", str(tmp_path / "run"), str(tmp_path / "run")]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=scale(20)).returncode:
        pytest.skip("a read-only folder needs root, and permission to mount it")
    try:
        with pytest.raises(
            UsageError, match=r"--run-dir .*/run: .*/run/lock cannot be used: Read-only"
        ):
            start_session(tmp_path / "run", resume=True)
        assert RunReader(tmp_path / "run").make_summary(3).counts["complete"] == 3, (
            "the run must be readable"
        )
    finally:
        subprocess.run(["umount", str(tmp_path / "run")], check=True, timeout=scale(20))


def test_study_of_relative_sqlite_url_is_found_from_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    record = start_session(tmp_path / "run", storage="sqlite:///study.db?timeout=9").open_record()
    url = f"sqlite:///{tmp_path}/here/study.db?timeout=9"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["storage"] == url
    monkeypatch.chdir(tmp_path / "elsewhere")
    complete_evaluations(start_session(tmp_path / "run", resume=True).open_record(), 1)
    assert (
        len(record.read_evaluations()) == len(RunReader(tmp_path / "run").read_evaluations()) == 1
    )
    with pytest.raises(
        UsageError, match=r"study\.db, the study of this run, is missing: restore it"
    ):
        RunReader(tmp_path / "run", "sqlite:///study.db")
    (tmp_path / "here" / "study.db").rename(tmp_path / "here" / "moved.db")
    for step in (
        lambda: RunReader(tmp_path / "run"),
        lambda: start_session(tmp_path / "run", resume=True, confirm_seeds=1),
    ):
        with pytest.raises(
            UsageError,
            match=rf"{tmp_path}/here/study\.db, the study of this run, is missing: restore it",
        ):
            step()
    assert [path.name for path in (*Path().iterdir(), *(tmp_path / "here").iterdir())] == [
        "moved.db"
    ]


def test_run_dir_in_use_is_locked_for_others(tmp_path: Path) -> None:
    start_session(tmp_path / "run")
    run_dir = RunDir(tmp_path / "run")
    code = "import sys, pathlib, hpo.store.run_dir\n"
    code += "run_dir = hpo.store.run_dir.RunDir(pathlib.Path(sys.argv[1]))\n"
    code += "print(run_dir.is_in_use)\nwith run_dir.hold_lock():\n    print('held')\n"
    command = [sys.executable, "-c", code, str(run_dir.path)]
    with run_dir.hold_lock():
        assert run_dir.is_in_use
        other = subprocess.run(command, capture_output=True, text=True, timeout=scale(60))
        assert other.stdout == "True\n"
        assert f"is in use by process {os.getpid()} on " in other.stderr
        assert run_dir.is_in_use
    assert not run_dir.is_in_use
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=scale(60)).stdout
        == "False\nheld\n"
    )


@pytest.mark.parametrize("position", [0, 3, 13, 60, "line"])
def test_session_killed_while_creating_study_can_start_again(
    tmp_path: Path, position: int | str
) -> None:
    start_session(tmp_path / "run")
    journal = tmp_path / "run" / "study.log"
    whole = journal.read_bytes()
    (tmp_path / "run" / "run.json").unlink()
    journal.write_bytes(whole[: position if isinstance(position, int) else whole.index(b"\n") + 1])
    (tmp_path / "run" / "study.log.lock").symlink_to(journal)
    began = time.monotonic()
    session = start_session(tmp_path / "run", resume=True)
    assert time.monotonic() - began < scale(20), "it must not wait for the lock"
    assert (
        session.open_record().read_attributes()["space"] == load_search_file(QUICK).space.describe()
    )


def test_confirmation_study_without_space_is_continued(tmp_path: Path) -> None:
    session, space = start_session(tmp_path / "run", confirm_seeds=1), load_search_file(QUICK).space
    storage = open_storage(session.storage)
    study = make_study(storage, session.manifest.confirmation_study, session.manifest.objectives)
    storage.set_study_user_attr(study, "confirms", session.manifest.study)
    confirmations = session.open_confirmations()
    confirmations.enqueue(
        {"depth": 1, "act": "relu", "flag": True, "lr": 0.5}, space.make_distributions(), confirms=0
    )
    session.create_confirmations(space)
    assert [evaluation.state for evaluation in session.open_confirmations().read_evaluations()] == [
        "waiting"
    ]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql://me:secret1@host/db?password=secret2&sslkey=secret3&options=all",
            "postgresql://me:***@host/db?options=all&password=***&sslkey=***",
        ),
        ("postgresql://me:p@secret:secret@host/db", "postgresql://..."),
        ("postgresql://me:secret@secret@host/db", "postgresql://..."),
        ("postgresql://me:sec/ret:secret@host/db", "postgresql://me:***@host/db"),
    ],
)
def test_mask_password_hides_secrets_in_query(tmp_path: Path, url: str, shown: str) -> None:
    assert mask_password(url) == shown
    with pytest.raises(UsageError) as raised:
        start_session(tmp_path / "run", storage=url)
    assert "secret" not in str(raised.value)
    with pytest.raises(UsageError) as raised:
        Options(QUICK, storage=url.split("://")[1])
    assert "secret" not in str(raised.value)


def test_warm_start_from_foreign_study_ignores_attributes(tmp_path: Path) -> None:
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "mine.log"))
    study = optuna.create_study(study_name="mine", storage=optuna.storages.JournalStorage(backend))
    some: list[dict[str, Any]] = [
        {"seconds": "12.5 s", "metrics": ["accuracy"]},
        {"metrics": {"a": [1], "b": "high", "c": 1}},
        {},
    ]
    for depth, attributes in enumerate(some, start=1):
        study.enqueue_trial(
            {"depth": depth, "act": "relu", "flag": True, "lr": 0.123456789012345 / depth},
            attributes,
        )
    study.optimize(suggest_other_parameters, n_trials=4)
    session = start_session(tmp_path / "run", warm_start=f"{tmp_path}/mine.log#mine")
    assert f"with 3 evaluations of {tmp_path}/mine.log#mine, the best 1\n" in session.headline
    assert (
        "without 1 that is not valid in this search space, such as trial 3: parameter"
        in session.headline
    )
    evaluations = session.open_record().read_evaluations()
    assert [(e.loss, e.metrics, e.params["lr"]) for e in evaluations] == [
        (1.0, {}, 0.123456789012),
        (2.0, {"c": 1.0}, 0.0617283945062),
        (3.0, {}, 0.0411522630041),
    ]
    assert all(0 < evaluation.seconds < 10 for evaluation in evaluations)
    assert RunReader(tmp_path / "run").make_summary(3).imported == 3


def suggest_other_parameters(trial: optuna.Trial) -> float:
    depth = trial.suggest_int("depth", 1, 20)
    trial.suggest_categorical("act", ["relu", "tanh"])
    if trial.number < 3:
        trial.suggest_categorical("flag", [True, False])
    trial.suggest_float("lr", 1e-4, 1, log=True)
    time.sleep(0.001)
    return float(depth)


def test_warm_start_converts_other_distributions(tmp_path: Path) -> None:
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
        distributions: dict[str, BaseDistribution] = {
            n: CategoricalDistribution(list(choices[n])) for n in params
        }
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, **outcome)
        )

    for loss, params in enumerate(fitting + others):
        add(params, value=loss, intermediate_values={0: math.nan, 10: loss})
    add(fitting[0], state=optuna.trial.TrialState.PRUNED)  # It was pruned before its first loss.
    session = start_session(tmp_path / "run", warm_start=f"sqlite:///{tmp_path}/mine.db")
    imported = session.open_record().read_evaluations()
    assert [evaluation.params for evaluation in imported] == [
        {"depth": 2, "act": "relu", "flag": True, "lr": 1.0},
        {"depth": 3, "act": "tanh", "flag": False, "lr": 0.5},
        {"depth": 4, "act": "tanh", "flag": False, "lr": 0.25},
    ]
    assert all(
        [type(value) for value in e.params.values()] == [int, str, bool, float] for e in imported
    )
    assert "without 4 that are not valid in this search space, such as trial" in session.headline
    assert "parameter 'depth' must be in Int(1, 9), got 2.5" in session.headline


def test_warm_start_value_fills_a_new_hyperparameter(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{tmp_path}/mine.db")
    lr, depth = FloatDistribution(0.0, 1.0), IntDistribution(1, 9)
    for number in range(2):
        params: dict[str, Any] = {"lr": 0.5, "depth": 2 + number}
        distributions: dict[str, BaseDistribution] = {"lr": lr, "depth": depth}
        if number == 1:
            params["act"] = "tanh"  # It has a value of its own.
            distributions["act"] = CategoricalDistribution(["relu", "tanh"])
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=1)
        )
    source = f"sqlite:///{tmp_path}/mine.db"
    given = ("act=relu", "flag=True")
    session = start_session(tmp_path / "run", warm_start=source, warm_start_values=given)
    imported = session.open_record().read_evaluations()
    assert [evaluation.params for evaluation in imported] == [
        {"lr": 0.5, "depth": 2, "act": "relu", "flag": True},
        {"lr": 0.5, "depth": 3, "act": "tanh", "flag": True},
    ]
    unknown = "must be NAME=VALUE with one of depth, act, flag, lr, got 'dropout=0'"
    for values, message in (
        (("act=relu",), "no finished evaluation is valid in this search space: trial 0: "),
        (("act=relu", "flag=7"), "parameter 'flag' must be "),
        (("dropout=0",), unknown),
        (("act",), "must be NAME=VALUE with one of depth, act, flag, lr, got 'act'"),
    ):
        with pytest.raises(UsageError, match=message):
            start_session(tmp_path / "other", warm_start=source, warm_start_values=values)
    with pytest.raises(UsageError, match="--warm-start-value must be used with --warm-start"):
        start_session(tmp_path / "other", warm_start_values=given)


def test_warm_start_killed_halfway_is_reported(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="mine", storage=f"sqlite:///{tmp_path}/mine.db")
    study.enqueue_trial({"depth": 2, "act": "relu", "flag": True, "lr": 0.1})
    study.optimize(suggest_other_parameters, n_trials=1)
    run_json = tmp_path / "run" / "run.json"
    first = start_session(tmp_path / "run", warm_start=f"sqlite:///{tmp_path}/mine.db")
    assert "with 1 evaluation of sqlite:///" in first.headline
    assert "imported" not in start_session(tmp_path / "run", resume=True).headline
    content = json.loads(run_json.read_text())
    # As after a kill during the import.
    run_json.write_text(json.dumps({**content, "warm_start": "runs/other"}))
    again = start_session(tmp_path / "run", resume=True)
    assert (
        "only a part of runs/other was imported. Give --warm-start again to import the rest"
        in again.headline
    )


def test_warm_start_leaves_source_unchanged(tmp_path: Path) -> None:
    database = tmp_path / "other.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    (tmp_path / "empty.db").touch()
    (tmp_path / "text.db").write_text("x")
    for name in ("other.db", "empty.db", "text.db"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(
            UsageError,
            match=rf"--warm-start sqlite:///.*{name} cannot be read as an Optuna storage: ",
        ):
            start_session(tmp_path / "run", warm_start=f"sqlite:///{tmp_path}/{name}")
        assert (tmp_path / name).read_bytes() == before
    start_session(tmp_path / "moved", storage=f"sqlite:///{tmp_path}/moved.db")
    (tmp_path / "moved.db").unlink()
    with pytest.raises(UsageError, match=r"--warm-start .*moved: no such file: .*moved.db"):
        start_session(tmp_path / "run", warm_start=f"{tmp_path}/moved")
    assert not (tmp_path / "moved.db").exists()


def test_lookup_of_confirmations_does_not_create_storage(tmp_path: Path) -> None:
    start_session(tmp_path / "run")
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "confirm_seeds": 2}))
    (tmp_path / "run" / "study.log").unlink()
    with pytest.raises(UsageError, match="is missing: restore it"):
        start_session(tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "study.log").exists()


def save_and_resume(run_dir: Path, path: Path, text: str, **options: Any) -> list[str]:
    """Resume the run with a new search file in a new process. Return the lines that are printed."""
    path.write_text(text)
    return start_session(run_dir, path, resume=True, **options).headline.splitlines()[2:]


def read_sessions(run_dir: Path) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = json.loads((run_dir / "run.json").read_text())["sessions"]
    return sessions


def test_resume_prints_changes_of_search_space_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, path, text = Path("runs", "mine"), Path("mine.py"), QUICK.read_text()
    other = text.replace("1 / (epoch + 1)", "2 / (epoch + 1)").replace(
        "import time\n", "import math\nimport time\n"
    )
    assert save_and_resume(run_dir, path, text) == []
    assert save_and_resume(run_dir, path, text) == []
    assert save_and_resume(run_dir, Path("renamed.py"), text) == []
    changed = save_and_resume(run_dir, path, other)
    number = (
        text.splitlines().index('        yield params["depth"] + params["lr"] + 1 / (epoch + 1)')
        + 1
    )
    assert changed == [
        "mine.py has changed since the last session: 2 lines added, 1 removed; earlier evaluations "
        "used search_space-1.py in runs/mine: losses may not be comparable",
        "  @@ -2,0 +3 @@",
        "  +import math",
        f"  @@ -{number} +{number + 1} @@",
        '  -        yield params["depth"] + params["lr"] + 1 / (epoch + 1)',
        '  +        yield params["depth"] + params["lr"] + 2 / (epoch + 1)',
    ]
    assert save_and_resume(run_dir, path, other) == []
    back = save_and_resume(run_dir, path, text)
    assert back[0] == (
        "mine.py has changed since the last session: 1 line added, 2 removed; earlier evaluations "
        "used search_space-1.py, search_space-2.py in runs/mine: losses may not be comparable"
    )
    sessions = read_sessions(run_dir)
    assert [session["file"] for session in sessions] == [
        f"search_space-{n}.py" for n in (1, 1, 1, 2, 2, 1)
    ]
    for session in sessions:
        content = (run_dir / session["file"]).read_bytes()
        assert content.decode() == (other if session["file"] == "search_space-2.py" else text)
        assert hashlib.sha256(content).hexdigest() == session["sha256"]
    assert sorted(path.name for path in run_dir.glob("*.py")) == [
        "search_space-1.py",
        "search_space-2.py",
    ]


def test_resume_with_long_change_prints_its_beginning(tmp_path: Path) -> None:
    run_dir, path, text = tmp_path / "my runs", tmp_path / "mine.py", QUICK.read_text()
    save_and_resume(run_dir, path, text)
    hostile = "# \x1b[31m\x07\u202e\t" + "x" * 1000
    lines = save_and_resume(
        run_dir, path, "\n".join([hostile, *(f"# {n}" for n in range(12)), text])
    )
    assert len(lines) == 1 + 10 + 1
    assert lines[2].startswith(r"  +# \x1b[31m\x07\u202e  ")
    assert all(line.isprintable() and len(line) < 200 for line in lines[1:-1])
    assert (
        lines[-1]
        == f"  and 4 more: diff '{run_dir}/search_space-1.py' '{run_dir}/search_space-2.py'"
    )
    shown = subprocess.run(
        lines[-1].partition(": ")[2], shell=True, capture_output=True, text=True, timeout=scale(20)
    )
    assert shown.stdout.count("\n> # ") == 13


@pytest.mark.parametrize("ends", ["\r\n", "\n\n"])
def test_resume_prints_invisible_change(tmp_path: Path, ends: str) -> None:
    path, text = tmp_path / "mine.py", QUICK.read_text()
    save_and_resume(tmp_path / "run", path, text)
    other = text.replace("\n", ends) if ends == "\r\n" else text[:-1] + ends
    path.write_bytes(other.encode())
    session = start_session(tmp_path / "run", path, resume=True)
    count = text.count("\n") if ends == "\r\n" else 0
    assert f"changed since the last session: {count or '1 line'} " in session.headline.replace(
        " lines", ""
    )
    assert (tmp_path / "run" / "search_space-2.py").read_bytes() == other.encode()


@pytest.mark.parametrize("content", [None, "# edited\n"])
def test_resume_with_edited_copy_of_file_warns(tmp_path: Path, content: str | None) -> None:
    run_dir, path, text = tmp_path / "run", tmp_path / "mine.py", QUICK.read_text()
    save_and_resume(run_dir, path, text)
    copy = run_dir / "search_space-1.py"
    copy.unlink()
    if content is not None:
        copy.write_text(content)
    (line,) = save_and_resume(run_dir, path, text + "# new\n")
    assert (
        f"{path} has changed since the last session, and its copy {copy} is missing or was edited; "
        "earlier eval" in line
    )
    assert (copy.read_text() if copy.exists() else None) == content
    assert (run_dir / "search_space-2.py").read_text() == text + "# new\n"
    assert save_and_resume(run_dir, path, text + "# new\n") == []


def test_copy_of_search_space_file_overwrites_no_file(tmp_path: Path) -> None:
    run_dir, path, text = tmp_path / "run", tmp_path / "mine.py", QUICK.read_text()
    run_dir.mkdir()
    (run_dir / "search_space-7.py").write_text("mine")
    (run_dir / "search_space-8.py").mkdir()
    save_and_resume(run_dir, path, text)
    assert (run_dir / "search_space-7.py").read_text() == "mine"
    assert [session["file"] for session in read_sessions(run_dir)] == ["search_space-9.py"]
    (run_dir / "run.json").unlink()  # As after a kill before run.json is written.
    save_and_resume(run_dir, path, text)
    assert [session["file"] for session in read_sessions(run_dir)] == ["search_space-9.py"]
    assert (run_dir / "search_space-9.py").read_text() == text


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="no git")


def git(folder: Path, *arguments: str) -> str:
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=me",
        "-c",
        "user.email=me@example.org",
        *arguments,
    ]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=scale(20)
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git repository with a search file and a module that the search file may import."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    folder = tmp_path / "repository"
    (folder / "searches").mkdir(parents=True)
    (folder / "searches" / "mine.py").write_text(QUICK.read_text())
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def read_tree(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@needs_git
def test_resume_prints_other_commit_of_repository(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, path, text = (
        repository / "runs" / "mine",
        repository / "searches" / "mine.py",
        QUICK.read_text(),
    )
    first = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # As in a git hook of another repository.
    assert save_and_resume(run_dir, path, text) == []
    monkeypatch.delenv("GIT_DIR")
    assert save_and_resume(run_dir, path, text) == [], "files of the run must not count as changes"
    (repository / "model.py").write_text("width = 2\n")
    what = f"{path} has not changed, but its repository was at commit"
    assert save_and_resume(run_dir, path, text) == [
        f"{what} {first[:7]} before, and is at {first[:7]} with uncommitted changes now: imported "
        "modules may differ"
    ]
    git(repository, "commit", "--quiet", "--all", "--message", "second")
    second = git(repository, "rev-parse", "HEAD")
    assert save_and_resume(run_dir, path, text) == [
        f"{what} {first[:7]} with uncommitted changes before, and is at {second[:7]} now: imported "
        "modules may differ"
    ]
    assert save_and_resume(run_dir, path, text) == []
    assert [line[:2] for line in save_and_resume(run_dir, path, text + "\n# new\n")[1:]] == [
        "  "
    ] * 3
    commits = [(session["commit"], session["dirty"]) for session in read_sessions(run_dir)]
    assert commits == [(first, False)] * 2 + [(first, True)] + [(second, False)] * 2 + [
        (second, True)
    ]


@needs_git
def test_git_query_leaves_index_unchanged(repository: Path) -> None:
    (repository / "new.py").write_text("")  # An untracked file.
    model = repository / "model.py"
    os.utime(model, (1, 1))  # git finds it unchanged, and would update its index.
    before = read_tree(repository)
    assert find_commit(repository / "searches" / "mine.py") == Commit(
        git(repository, "rev-parse", "HEAD"), dirty=False
    )
    assert read_tree(repository) == before
    git(repository, "status")
    assert read_tree(repository) != before, "git status must change the index"


def replace_git(programs: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command git run `script` instead. The script is put first in PATH."""
    programs.mkdir(exist_ok=True)
    (programs / "git").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


@needs_git
@pytest.mark.parametrize(
    "why", ["no repository", "no commit", "somebody else's", "no git", "fails"]
)
def test_git_without_commit_yields_none(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    path, text = repository / "searches" / "mine.py", QUICK.read_text()
    assert find_commit(path) is not None
    programs = tmp_path / "programs"
    programs.mkdir()
    if why in ("no repository", "no commit"):
        shutil.rmtree(repository / ".git")
    if why == "no commit":
        git(repository, "init", "--quiet")
    if why == "somebody else's":
        if os.geteuid():
            pytest.skip("only root gives files away")
        for entry in (repository, *repository.rglob("*")):
            os.chown(entry, 54321, 54321)
    if why == "no git":
        monkeypatch.setenv("PATH", str(programs))
    if why == "fails":
        replace_git(programs, "echo '# branch.oid'; exit 1", monkeypatch)
    assert find_commit(path) is None
    assert save_and_resume(tmp_path / "run", path, text) == []
    assert save_and_resume(tmp_path / "run", path, text) == []
    assert [
        (session["commit"], session["dirty"]) for session in read_sessions(tmp_path / "run")
    ] == [(None, None)] * 2


@needs_git
@pytest.mark.slow
def test_git_that_hangs_is_killed_and_yields_none(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = repository / "searches" / "mine.py"
    assert find_commit(path) is not None
    replace_git(
        tmp_path / "programs", f"sleep 999 & echo $! > {tmp_path}/sleeping; wait", monkeypatch
    )
    assert save_and_resume(tmp_path / "run", path, QUICK.read_text()) == []
    assert [
        (session["commit"], session["dirty"]) for session in read_sessions(tmp_path / "run")
    ] == [(None, None)]
    stat = Path("/proc", (tmp_path / "sleeping").read_text().strip(), "stat")
    deadline = time.monotonic() + scale(20)
    while stat.exists() and ") Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or ") Z " in stat.read_text(), (
        "processes started by git must be killed with it"
    )
