"""Test that `hpo export` writes CSV, JSON and Parquet files that other programs can read."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from optuna.trial import TrialState

from hpo import Categorical, SearchSpace
from hpo.store.run_dir import RunDir
from hpo.trainer.search_file import load_search_file
from tests.support.launch import call_hpo, make_hpo_command
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import (
    add_evaluation,
    claim_evaluation,
    complete_evaluations,
    make_run,
    make_run_of_everything,
    start_session,
)

Export = Callable[..., tuple[int, bytes, str]]


@pytest.fixture
def export(capfdbinary: pytest.CaptureFixture[bytes]) -> Export:
    def run(*arguments: object) -> tuple[int, bytes, str]:
        status = call_hpo("export", *arguments)
        out, err = capfdbinary.readouterr()
        return status, out, err.decode()

    return run


def parse_json_rows(content: bytes) -> list[dict[str, Any]]:
    def reject_constant(name: str) -> float:
        raise AssertionError(f"{name} is not valid JSON")

    rows: list[dict[str, Any]] = json.loads(content, parse_constant=reject_constant)
    return rows


def parse_csv_rows(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True))


def read_parquet_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


COLUMNS = [
    *(
        "study",
        "trial",
        "state",
        "loss",
        "param_depth",
        "param_act",
        "param_flag",
        "param_lr",
        "metric_accuracy",
    ),
    *(
        "island",
        "worker",
        "generation",
        "propagator",
        "started",
        "ended",
        "seconds",
        "epochs",
        "ranks",
        "hosts",
        "gpus",
        "failure",
        "imported_from",
    ),
    *("confirms", "seed", "inherits", "curve"),
]


def test_export_formats_have_same_rows_and_columns(tmp_path: Path, export: Export) -> None:
    run_dir = make_run_of_everything(tmp_path)
    status, out, err = export(run_dir, "--to", "json")
    assert (status, err) == (0, "")
    rows = parse_json_rows(out)
    assert all(list(row) == COLUMNS for row in rows)
    states = [
        "complete",
        "pruned",
        *["complete"] * 4,
        "pruned",
        "failed",
        "interrupted",
        "running",
        "waiting",
    ]
    confirming = [("run-confirm", 0, "complete"), ("run-confirm", 1, "waiting")]
    assert [(row["study"], row["trial"], row["state"]) for row in rows] == [
        *(("run", trial, state) for trial, state in enumerate(states)),
        *confirming,
    ]
    trials = [*load_trials(run_dir), *load_trials(run_dir, "run-confirm")]
    for row, trial in zip(rows, trials, strict=True):
        assert {name: row[f"param_{name}"] for name in trial.params} == trial.params
        assert row["loss"] == trial.value
        assert row["curve"] == list(trial.intermediate_values.values())
        assert row["epochs"] == len(trial.intermediate_values)
        for column, at in (("started", trial.datetime_start), ("ended", trial.datetime_complete)):
            assert row[column] == (
                at and at.astimezone(timezone.utc).isoformat(timespec="microseconds")
            )
        places = (2, "node", 2) if "hosts" in trial.user_attrs else (None, None, None)
        assert (row["ranks"], row["hosts"], row["gpus"]) == places
    assert sum(row["ranks"] is None for row in rows) < len(rows)
    assert [row["imported_from"] for row in rows[:3]] == [
        *(f"trial {n} of {tmp_path}/before" for n in (0, 1)),
        None,
    ]
    assert [row["metric_accuracy"] for row in rows] == [0.1, None, 0.3, 0.4, 0.5, 0.6, *[None] * 7]
    assert [row["seconds"] for row in rows] == [
        1.5,
        0.5,
        *[1.5] * 4,
        0.7,
        0.8,
        None,
        None,
        None,
        2.0,
        None,
    ]
    assert [row["failure"] is None for row in rows] == [row["state"] != "failed" for row in rows]
    assert [row["confirms"] for row in rows] == [*[None] * 11, 0, 0]
    assert [row["seed"] for row in rows[11:]] == [trial.user_attrs["seed"] for trial in trials[11:]]
    locations = [(row["island"], row["worker"], row["generation"]) for row in rows]
    imported, confirmed, unassigned = [(0, 0, None), (1, 1, None)], (0, 0, None), (None, None, None)
    assert locations == [
        *imported,
        *((1, 1, n) for n in (3, 4, 5, 6, 7, 8, 9, 9)),
        unassigned,
        confirmed,
        unassigned,
    ]

    assert export(run_dir, "--to", "parquet", "-o", tmp_path / "run.parquet") == (0, b"", "")
    table = read_parquet_rows(tmp_path / "run.parquet")
    assert all(type(row["started"]) in (datetime, type(None)) for row in table)
    as_text = [
        {
            name: value.isoformat(timespec="microseconds") if isinstance(value, datetime) else value
            for name, value in r
        }
        for r in (row.items() for row in table)
    ]
    assert as_text == rows
    assert [type(table[0][f"param_{name}"]) for name in ("depth", "act", "flag", "lr")] == [
        int,
        str,
        bool,
        float,
    ]

    text = parse_csv_rows(export(run_dir, "--to", "csv")[1])
    assert [list(row) for row in text] == [COLUMNS] * len(rows)
    for row, line in zip(rows, text, strict=True):
        assert json.loads(line.pop("curve")) == row.pop("curve")
        failure, cell = row.pop("failure"), line.pop("failure")
        assert cell == (failure or "").replace("\x1b", "\\x1b").replace("\0", "\\x00"), (
            "control characters must be escaped"
        )
        bred, cell = row.pop("propagator") or "", line.pop("propagator")
        assert cell == ("'" + bred if bred.startswith("--") else bred), (
            "an option must not look like a formula to a spreadsheet"
        )
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}


HOSTILE_SEARCH = r"""
from hpo import Categorical, Float, Int, SearchSpace
from tests.support.runs import claim_evaluation

space = SearchSpace(
    trial=Int(0, 5),
    param_trial=Float(0, 1),
    metric_a=Categorical("relu", True, 3, '=1+1, "a"\r\n\t\0\udcff'),
    loss=Categorical(1, 2.5),
    curve=Categorical(2**70, 1),
    state=Categorical(1.5, True),
    λ=Categorical("2**53", "x"),
)


def objective(params, worker):
    return 0.0
"""


def test_export_accepts_any_names_and_texts(tmp_path: Path, export: Export) -> None:
    search = tmp_path / "hostile.py"
    search.write_text(HOSTILE_SEARCH, "utf-8")
    session = start_session(tmp_path / "run", search)
    record, distributions = (
        session.open_record(),
        load_search_file(search).space.make_distributions(),
    )
    text = '=1+1, "a"\r\n\t\0\udcff'
    params_list: list[dict[str, Any]] = [
        {"metric_a": text, "loss": 2.5, "curve": 2**70, "state": True},
        {"metric_a": 3, "loss": 1, "curve": 1, "state": 1.5},
        {"metric_a": True, "loss": 1, "curve": 1, "state": 1.5},
    ]
    for number, params in enumerate(params_list):
        params.update(trial=number, param_trial=number / 4, λ="x")
        island = "of another program" if number == 0 else number
        assignment = claim_evaluation(
            record, params, distributions, 9, island=island, worker=0, generation=0
        )
        metrics = {"a": float("nan"), "trial": 7.0, "": 8.0, 'b,"\n': 9.0}
        record.report(assignment, 1, float("nan"))
        record.complete(assignment, 0.5, 1.0, metrics)
    escaped = text.replace("\udcff", "\\udcff")
    names = ["trial", "param_trial", "metric_a", "loss", "curve", "state", "λ"]
    rows = parse_json_rows(export(tmp_path / "run", "--to", "json")[1])
    for row, params, known in zip(rows, params_list, (escaped, 3, True), strict=True):
        assert {name: row[f"param_{name}"] for name in names} == {**params, "metric_a": known}
        assert (row["trial"], row["metric_trial"], row["metric_"], row['metric_b,"\n']) == (
            params["trial"],
            7,
            8,
            9,
        )
        assert (row["metric_a"], row["loss"], row["state"], row["curve"]) == (
            None,
            0.5,
            "complete",
            [None],
        )
        assert [type(row[f"param_{name}"]) for name in ("loss", "state")] == [
            type(params["loss"]),
            type(params["state"]),
        ]
    first = parse_csv_rows(export(tmp_path / "run", "--to", "csv")[1])[0]
    assert first["param_metric_a"] == "'" + escaped.replace("\r", "\\r").replace("\0", "\\x00")
    assert list(first) == list(rows[0])

    export(tmp_path / "run", "--to", "parquet", "-o", tmp_path / "run.parquet")
    table = read_parquet_rows(tmp_path / "run.parquet")
    assert list(table[0]) == list(rows[0])
    assert [row["param_metric_a"] for row in table] == [escaped, "3", "True"], (
        "values of several types become texts"
    )
    assert [row["param_loss"] for row in table] == [2.5, 1.0, 1.0]
    assert [row["param_curve"] for row in table] == [str(2**70), "1", "1"], (
        "integers of more than 64 bits become texts"
    )
    assert [row["param_state"] for row in table] == ["True", "1.5", "1.5"]
    assert [row["curve"] for row in table] == [[None]] * 3
    assert [row["island"] for row in table] == [0, 1, 2], "an invalid island counts as missing"


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1+1", "\r=1+1", "\n=1+1", "\uff1d1+1"]


def test_export_csv_escapes_formulas_only_in_texts(tmp_path: Path, export: Export) -> None:
    space = SearchSpace(x=Categorical(*FORMULAS, -1.5, "a=1", "\u202ea\u2066"))
    record = make_run(tmp_path / "=run", space)
    for choice in [*FORMULAS, -1.5, "a=1", "\u202ea\u2066"]:
        add_evaluation(
            record,
            params={"x": choice},
            space=space,
            curve={1: -2.5},
            metrics={"=a": -0.5},
            imported_from="@x",
        )
    add_evaluation(
        record,
        TrialState.FAIL,
        params={"x": "+1"},
        space=space,
        failure="=cmd|'/c calc'!A1",
        propagator="-x",
    )
    text = parse_csv_rows(export(tmp_path / "=run", "--to", "csv")[1])
    guarded = [f"'{choice}" for choice in FORMULAS]
    guarded[5] = r"\r=1+1"
    assert [row["param_x"] for row in text] == [*guarded, "-1.5", "a=1", r"\u202ea\u2066", "'+1"]
    assert [(row["loss"], row["metric_=a"], row["imported_from"]) for row in text[:-1]] == [
        ("-2.5", "-0.5", "'@x")
    ] * 11
    assert (text[-1]["failure"], text[-1]["propagator"]) == ("'=cmd|'/c calc'!A1", "'-x")
    assert {row["study"] for row in text} == {"'=run"}
    assert [
        row["param_x"] for row in parse_json_rows(export(tmp_path / "=run", "--to", "json")[1])
    ][:8] == FORMULAS
    export(tmp_path / "=run", "--to", "parquet", "-o", tmp_path / "run.parquet")
    assert [row["param_x"] for row in read_parquet_rows(tmp_path / "run.parquet")][:8] == FORMULAS


def test_export_of_empty_run_has_columns(tmp_path: Path, export: Export) -> None:
    start_session(tmp_path / "run")
    columns = [column for column in COLUMNS if column != "metric_accuracy"]
    assert export(tmp_path / "run", "--to", "csv") == (0, (",".join(columns) + "\n").encode(), "")
    assert parse_json_rows(export(tmp_path / "run", "--to", "json")[1]) == []
    export(tmp_path / "run", "--to", "parquet", "-o", tmp_path / "run.parquet")
    assert pq.read_table(tmp_path / "run.parquet").column_names == columns
    assert read_parquet_rows(tmp_path / "run.parquet") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Missing option '--to'"),
        (["run", "--to", "xls"], "--to must be one of csv, json, parquet, got 'xls'"),
        (["run", "--to", "parquet"], "--to parquet must be used with -o FILE"),
        (
            ["run", "--to", "csv", "-o", "here"],
            "-o here exists. Add --overwrite to replace it, or name another file",
        ),
        (["run", "--to", "csv", "-o", "."], "-o must be a file or a pipe, got '.'"),
        (
            ["run", "--to", "csv", "-o", "nowhere/x"],
            "-o nowhere/x cannot be written: No such file or directory",
        ),
        (["run", "--to", "csv", "-o", "here/x"], "-o here/x cannot be written: Not a directory"),
        (
            ["run", "--to", "csv", "-o", "run", "--overwrite"],
            "-o must be a file or a pipe, got 'run'",
        ),
        (["run", "--to", "csv", "-o", "x" * 300], "cannot be written: File name too long"),
        (["nowhere", "--to", "csv"], "nowhere holds no run: there is no nowhere/run.json"),
        (["here", "--to", "csv"], "here/run.json cannot be read"),
    ],
)
def test_export_usage_error_prints_one_message(
    tmp_path: Path,
    export: Export,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    start_session(Path("run"))
    Path("here").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = export(*arguments)
    assert (status, out) == (2, b"")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("here").read_text() == "mine"


@pytest.mark.parametrize("name", ["study.log", "run.json", "lock", "logs/0.txt", "link"])
def test_export_never_replaces_a_file_of_a_run(tmp_path: Path, export: Export, name: str) -> None:
    run = tmp_path / "run"
    start_session(run)
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "0.txt").write_text("printed")
    (run / "lock").touch()
    (run / "link").symlink_to(run / "study.log")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, out, err = export(run, "--to", "csv", "-o", run / name, "--overwrite")
    assert (status, out) == (2, b"")
    assert err == f"error: -o {run / name} is a file of a run. Name another file\n"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for _ in range(2):
        assert export(run, "--to", "csv", "-o", run / "table.csv", "--overwrite")[0] == 0


def test_export_to_a_dash_writes_to_standard_output(tmp_path: Path, export: Export) -> None:
    start_session(tmp_path / "run")
    expected = export(tmp_path / "run", "--to", "csv")
    assert export(tmp_path / "run", "--to", "csv", "-o", "-") == expected
    assert not Path("-").exists()


def test_export_overwrite_replaces_file_atomically(tmp_path: Path, export: Export) -> None:
    complete_evaluations(start_session(tmp_path / "run").open_record(), 1, 2, 3, 4)
    out = tmp_path / "out.csv"
    out.write_text("mine")
    command = [tmp_path / "run", "--to", "csv", "-o", out, "--overwrite"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # The limit simulates a full disk.
    try:
        full = export(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full == (2, b"", f"error: -o {out} cannot be written: File too large\n")
    assert out.read_text() == "mine"
    assert export(*command) == (0, b"", "")
    assert [row["loss"] for row in parse_csv_rows(out.read_bytes())] == ["1.0", "2.0", "3.0", "4.0"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out.csv"}


def test_export_parquet_without_pyarrow_names_package(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_session(tmp_path / "run")
    for module in [name for name in sys.modules if name.startswith("pyarrow.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, err = export(tmp_path / "run", "--to", "parquet", "-o", tmp_path / "x")
    assert status == 2
    assert err.startswith("error: --to parquet needs pyarrow: ")
    assert "pip install 'hpo-islands[parquet]'" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "command", [["export", "--to", "csv"], ["top"], ["top", "--json"]], ids=" ".join
)
@pytest.mark.parametrize(
    "variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"]
)
@pytest.mark.parametrize(
    ("reader", "status", "message"),
    [
        ("closed", 1, ""),
        ("full", 2, "error: the standard output cannot be written: No space left on device\n"),
    ],
    ids=["closed", "full"],
)
@pytest.mark.slow
def test_closed_or_full_output_ends_command(
    tmp_path: Path,
    command: list[str],
    variables: dict[str, str],
    reader: str,
    status: int,
    message: str,
) -> None:
    complete_evaluations(start_session(tmp_path / "run").open_record(), 1)
    line = make_hpo_command(*command, tmp_path / "run")
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed, Path("/dev/full").open("w") as full:
        out = closed if reader == "closed" else full
        job = subprocess.run(
            line,
            env={**os.environ, **variables},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=scale(60),
            check=False,
        )
    assert (job.returncode, job.stderr) == (status, message)


def test_export_does_not_change_run(tmp_path: Path, export: Export) -> None:
    run_dir = make_run_of_everything(tmp_path)
    before = {path: path.read_bytes() for path in RunDir(run_dir).path.iterdir()}
    export(run_dir, "--to", "json")
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_export_through_symlink_replaces_target(tmp_path: Path, export: Export) -> None:
    start_session(tmp_path / "run")
    file, link, dangling = tmp_path / "folder" / "file", tmp_path / "link", tmp_path / "dangling"
    file.parent.mkdir()
    file.write_text("old")
    link.symlink_to(file)
    dangling.symlink_to(file.with_name("new"))
    for output, target in ((link, file), (dangling, file.with_name("new"))):
        assert export(tmp_path / "run", "--to", "csv", "-o", output)[0] == 2
        assert export(tmp_path / "run", "--to", "csv", "-o", output, "--overwrite")[0] == 0
        assert output.is_symlink()
        assert target.read_bytes().startswith(b"study,trial,")
    assert sorted(path.name for path in file.parent.iterdir()) == ["file", "new"]


def test_export_writes_to_pipes_and_devices(tmp_path: Path, export: Export) -> None:
    start_session(tmp_path / "run")
    whole = export(tmp_path / "run", "--to", "csv")[1]
    pipe, device, disk = tmp_path / "pipe", tmp_path / "device", tmp_path / "disk"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        assert export(tmp_path / "run", "--to", "csv", "-o", pipe)[0] == 0
        assert read.result(20) == whole
    assert pipe.is_fifo()
    assert export(tmp_path / "run", "--to", "csv", "-o", "/dev/stdout") == (0, whole, "")
    if os.geteuid():
        pytest.skip("only root makes devices")
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # the device number of /dev/null
    os.mknod(disk, 0o600 | stat.S_IFBLK, os.makedev(7, 0))
    assert export(tmp_path / "run", "--to", "csv", "-o", device, "--overwrite")[0] == 0
    assert device.is_char_device()
    status, _, err = export(tmp_path / "run", "--to", "csv", "-o", disk, "--overwrite")
    assert (status, err) == (2, f"error: -o must be a file or a pipe, got '{disk}'\n")
    assert disk.is_block_device()


@pytest.mark.parametrize("command", ["top", "watch", "export --to csv"])
@pytest.mark.slow
def test_closed_standard_output_is_an_error(tmp_path: Path, command: str) -> None:
    start_session(tmp_path / "run")
    before = (tmp_path / "run" / "study.log").read_bytes()
    name, *options = command.split()
    line = make_hpo_command(name, "run", *options)
    closed = partial(os.close, 1)  # like >&- in a shell
    job = subprocess.run(
        line, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=scale(60), preexec_fn=closed
    )
    assert (job.returncode, job.stderr) == (
        2,
        "error: the standard output cannot be written: Bad file descriptor\n",
    )
    assert (tmp_path / "run" / "study.log").read_bytes() == before


def test_files_do_not_get_descriptors_of_closed_streams(tmp_path: Path) -> None:
    code = "import os\nos.close(0)\nos.close(1)\n"
    code += "from hpo.process.standard_streams import fill_closed_streams\n"
    code += "fill_closed_streams()\nfile = open('study.log', 'w')\nassert file.fileno() > 2\n"
    code += "try:\n    os.write(1, b'x')\n"
    code += "except OSError as error:\n    assert error.errno == 9\nelse:\n    raise\n"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=scale(60)
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
