"""Test run directories that disks, editors and other programs have damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from hpo.errors import RunError, UsageError
from hpo.results.reader import RunReader
from hpo.store.run_dir import RunDir
from hpo.views.page.html_report import render_report
from tests.support import fuzz
from tests.support.runs import (
    START_SECONDS,
    add_evaluation,
    complete_evaluations,
    make_run,
    start_evaluation,
    start_session,
)


@pytest.mark.slow
def test_damaged_run_is_read_or_refused_with_one_message(tmp_path: Path) -> None:
    outcome = fuzz.fuzz_runs(tmp_path / "fuzz", seed=0, count=50)
    assert set(outcome) == {"read", "refused", "resumed", "resume refused"}
    assert min(outcome.values()) >= 10


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    session = start_session(tmp_path / "run")
    complete_evaluations(session.open_record(), 1, 2, 3)
    return tmp_path / "run"


def read_lines(run_dir: Path) -> list[bytes]:
    return (run_dir / "study.log").read_bytes().splitlines(keepends=True)


def assert_refused(run_dir: Path, lines: list[bytes], message: str) -> None:
    """Write lines to the journal.

    Assert that readers and resumed runs refuse it, and do not change it.
    """
    (run_dir / "study.log").write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match=message):
        RunReader(run_dir)
    with pytest.raises(UsageError, match=message):
        start_session(run_dir, resume=True)
    assert read_lines(run_dir) == lines


@pytest.mark.slow
def test_journal_with_damaged_line_is_refused(run_dir: Path) -> None:
    lines = read_lines(run_dir)
    damages: dict[str, Callable[[int], list[bytes]]] = {
        "lost": lambda n: [*lines[:n], *lines[n + 1 :]],
        "changed": lambda n: [*lines[:n], lines[n].replace(b":1", b":2", 1), *lines[n + 1 :]],
        "repeated": lambda n: [*lines[: n + 1], *lines[n:]],
        "moved": lambda n: [*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]],
    }
    for name, damaged in damages.items():
        for n in range(len(lines) - 1):
            if damaged(n) != lines:
                number = n + 2 if name == "repeated" else n + 1
                assert_refused(
                    run_dir,
                    damaged(n),
                    rf"study.log is damaged: line {number} does not match its checksum",
                )
    (run_dir / "study.log").write_bytes(b"".join(lines[:-1]))
    assert [evaluation.state for evaluation in RunReader(run_dir).read_evaluations()] == [
        "complete",
        "complete",
        "running",
    ]


def test_next_checksum_covers_lines_of_other_program(run_dir: Path) -> None:
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(run_dir / "study.log")))
    optuna.load_study(study_name="run", storage=storage).set_user_attr("note", "look at 1")
    complete_evaluations(start_session(run_dir, resume=True).open_record(), 4)
    lines = read_lines(run_dir)
    assert [evaluation.loss for evaluation in RunReader(run_dir).read_evaluations()] == [1, 2, 3, 4]
    note = next(number for number, line in enumerate(lines) if b"look at 1" in line)
    assert b"crc" not in lines[note]
    changed = [*lines[:note], lines[note].replace(b"look at 1", b"look at 2"), *lines[note + 1 :]]
    assert_refused(run_dir, changed, f"line {note + 2} does not match its checksum")
    assert_refused(
        run_dir, [*lines[:note], *lines[note + 1 :]], f"line {note + 1} does not match its checksum"
    )


def test_journal_of_several_writers_has_valid_checksums(run_dir: Path) -> None:
    session = start_session(run_dir, resume=True)
    records = [session.open_record() for _ in range(3)]
    assignments = [start_evaluation(record, depth) for depth, record in enumerate(records, start=4)]
    for record, assignment in zip(reversed(records), assignments, strict=True):
        record.complete(assignment, 9.0, 1.0, {})
    assert [evaluation.loss for evaluation in RunReader(run_dir).read_evaluations()] == [
        1,
        2,
        3,
        9,
        9,
        9,
    ]


@pytest.mark.parametrize(
    "params", [{"layers": 3}, {"depth": 3, "act": "relu", "flag": True, "lr": 2.0}]
)
def test_resume_with_trial_of_other_space_is_refused(
    run_dir: Path, params: dict[str, object]
) -> None:
    study = RunReader(run_dir).study
    distributions = {
        name: optuna.distributions.CategoricalDistribution([value])  # type: ignore[list-item]
        for name, value in params.items()
    }
    study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=1.0))  # type: ignore[arg-type]
    lines = read_lines(run_dir)
    with pytest.raises(
        UsageError,
        match=(
            r"study\.log: trial 3: (unknown parameter 'layers'|parameter 'lr' must be in .*, got "
            r"2.0)"
        ),
    ):
        start_session(run_dir, resume=True)
    with pytest.raises(
        UsageError,
        match=r"trial 3 is not of this run's search space: parameter '\w+' is 3 of Categ",
    ):
        RunReader(run_dir)
    assert read_lines(run_dir) == lines


def test_trial_attribute_of_wrong_type_counts_as_missing(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    strange: dict[str, Any] = {
        "island": "north",
        "worker": None,
        "generation": -1,
        "confirms": [1],
        "crash_count": "two",
    }
    add_evaluation(
        record, **{**strange, "metrics": {"accuracy": "high", "recall": 1}, "propagator": 7}
    )
    (evaluation,) = RunReader(tmp_path / "run").read_evaluations()
    assert (
        evaluation.island,
        evaluation.worker,
        evaluation.generation,
        evaluation.confirms,
        evaluation.crash_count,
    ) == (0, 0, 0, None, 0)
    assert (evaluation.metrics, evaluation.propagator) == ({"recall": 1}, "")


def test_deeply_nested_json_is_one_message(run_dir: Path) -> None:
    for depth in (500, 980, 100_000):
        nested = f'"{depth}": ' + "[" * depth + "]" * depth
        content = json.loads((run_dir / "run.json").read_text())
        text = json.dumps({**content, "budget": "BUDGET"}).replace(
            '"BUDGET"', nested.split(": ")[1]
        )
        copied = run_dir.with_name(f"copy{depth}") / "run"
        shutil.copytree(run_dir, copied)
        (copied / "run.json").write_text(text)
        with pytest.raises(
            UsageError, match=r"run\.json(: 'budget' must be| cannot be read)"
        ) as raised:
            RunReader(copied)
        assert len(str(raised.value)) < 500
    (run_dir / "summary.json").write_text("[" * 100_000)
    assert RunReader(run_dir).take_snapshot().stop_reason == ""
    assert_refused(
        run_dir, [*read_lines(run_dir), b"[" * 100_000 + b"\n"], "is damaged: line .* is not JSON"
    )


def test_missing_study_file_is_one_message(run_dir: Path) -> None:
    record, follower = (
        start_session(run_dir, resume=True).open_record(),
        RunReader(run_dir),
    )
    assert len(follower.take_snapshot().evaluations) == 3
    (run_dir / "study.log").unlink()
    with pytest.raises(UsageError, match=r"study\.log cannot be read: No such file or directory"):
        follower.take_snapshot()
    with pytest.raises(RunError, match=r"study\.log cannot be read: No such file or directory"):
        start_evaluation(record, 4)
    assert not (run_dir / "study.log").exists()


def test_lock_that_is_not_a_text_file_is_one_message(run_dir: Path) -> None:
    lock = RunDir(run_dir).lock
    lock.write_bytes(b"\xff\x1b[31m\n")
    assert start_session(run_dir, resume=True).manifest.budget
    lock.unlink()
    lock.mkdir()
    with pytest.raises(
        UsageError, match=r"--run-dir .*/run: .*/run/lock cannot be used: Is a directory"
    ):
        start_session(run_dir, resume=True)


def test_top_json_has_stop_reason(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text(
        '{"stopped": "SIGTERM", "remedy": null, "exhausted": false}'
    )
    summary = RunReader(run_dir).make_summary(3)
    assert (summary.session.stopped, summary.session.remedy, summary.session.exhausted) == (
        "SIGTERM",
        None,
        False,
    )
    (run_dir / "summary.json").unlink()
    assert RunReader(run_dir).make_summary(3).session.stopped is None


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", None])
def test_edited_summary_counts_as_missing(tmp_path: Path, content: str | None) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.read_summary() == {}
    run_dir.summary_json.write_text('{"stopped": "SIGTERM"}')
    assert run_dir.read_summary() == {"stopped": "SIGTERM"}
    run_dir.summary_json.unlink() if content is None else run_dir.summary_json.write_text(content)
    assert run_dir.read_summary() == {}


def test_journal_end_without_value_is_refused(run_dir: Path) -> None:
    lines = read_lines(run_dir)
    end = next(number for number, line in enumerate(lines) if b'"values":[' in line)
    entry = {**json.loads(lines[end]), "values": []}
    entry.pop("crc")
    changed = [*lines[:end], json.dumps(entry).encode() + b"\n"]
    assert_refused(
        run_dir, changed, rf"line {end + 1} is not an entry of a journal: 'values' is \[\]"
    )


def test_integer_loss_of_other_program_is_shown(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    for trial in range(3):
        add_evaluation(record, curve={1: 3 + trial})
    run = RunReader(tmp_path / "run")
    assert [type(evaluation.loss) for evaluation in run.read_evaluations()] == [float] * 3
    assert "Parallel coordinates" in render_report(run, 3, START_SECONDS)
