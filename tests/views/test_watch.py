"""Test the status of a run for `hpo watch`, and its output without a screen."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader
from hpo.store.run_dir import RunDir
from hpo.text_format import format_clock
from hpo.trainer.search_file import load_search_file
from hpo.views.live.run_status import compute_run_status, format_header
from hpo.views.live.table_rows import make_rung_rows
from hpo.views.times import WorkingTime
from tests.support.evaluations import make_evaluation
from tests.support.limits import scale
from tests.support.runs import QUICK, claim_evaluation, start_session
from tests.support.watching import (
    PARAMS,
    hold_run_dir,
    make_environment,
    make_finished_run,
    make_light_command,
    make_snapshot,
    record_evaluation,
)

DAY = 86400.0


def format_start(seconds: float) -> str:
    """Return a time as it is written in run.json."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(seconds))


def test_pace_counts_only_current_session() -> None:
    before = [make_evaluation(n, started=float(n), ended=n + 1.0) for n in range(50)]
    now = [make_evaluation(50 + n, started=DAY + 30 * n, ended=DAY + 30 * n + 30) for n in range(4)]
    running = make_evaluation(54, "running", started=DAY + 120)
    run = compute_run_status(
        make_snapshot(
            [*before, *now, running], DAY + 160, manifest_values={"started": format_start(DAY)}
        )
    )
    assert (run.done, run.total) == (54, 100)
    assert run.pace.per_minute == pytest.approx(60 * 4 / 160), "the 40 s since the last end count"
    assert run.pace.seconds_left == pytest.approx(45 * 160 / 5), (
        "the evaluation that runs longer than the others counts as nearly done"
    )
    stopped = compute_run_status(
        make_snapshot(
            [*before, *now],
            DAY + 9999,
            manifest_values={"started": format_start(DAY)},
            is_in_use=False,
        )
    )
    assert (stopped.phase, stopped.pace.seconds_left) == ("stopped", None)
    assert stopped.pace.per_minute == pytest.approx(60 * 4 / 120), (
        "time after the end of the run does not count"
    )
    just_started = compute_run_status(
        make_snapshot(before, DAY + 5, manifest_values={"started": format_start(DAY)})
    )
    assert (just_started.pace.per_minute, just_started.pace.seconds_left) == (None, None)


def test_pace_uses_latest_evaluations() -> None:
    quick = [make_evaluation(n, started=n * 1.0, ended=n + 1.0) for n in range(60)]
    slow = [make_evaluation(60 + n, started=60 + 10.0 * n, ended=70 + 10.0 * n) for n in range(20)]
    run = compute_run_status(make_snapshot(quick + slow, 260))
    assert run.pace.per_minute == pytest.approx(6)
    assert run.pace.seconds_left == pytest.approx(200)
    imported = [
        make_evaluation(80 + n, imported_from="trial 1 of other", started=0.0, ended=1.0)
        for n in range(500)
    ]
    assert compute_run_status(make_snapshot(quick + slow + imported, 260)).pace == run.pace


def test_pace_counts_running_evaluations_in_part() -> None:
    running = [make_evaluation(n, "running", worker=n, started=0.0) for n in range(1, 100)]
    run = compute_run_status(
        make_snapshot(
            [make_evaluation(0, ended=3600.0), *running], 3600, manifest_values={"budget": 1000}
        )
    )
    assert run.pace.per_minute == pytest.approx(1 / 60)
    assert run.pace.seconds_left == pytest.approx((999 - 99) * 36)
    hanging = compute_run_status(
        make_snapshot(
            [make_evaluation(0, ended=3600.0), *running], 36000, manifest_values={"budget": 1000}
        )
    )
    assert hanging.pace.seconds_left == pytest.approx((999 - 99) * 360)


@pytest.mark.parametrize("started", ["", "yesterday", "2026-01-01T00:00:00"])
def test_pace_with_unknown_session_start_uses_whole_run(started: str) -> None:
    run = compute_run_status(
        make_snapshot(
            [make_evaluation(0), make_evaluation(10), make_evaluation(20)],
            30,
            manifest_values={"started": started},
        )
    )
    assert run.pace.per_minute == pytest.approx(6)


def test_working_time_excludes_pauses() -> None:
    done = [
        make_evaluation(0),
        make_evaluation(5),
        make_evaluation(7, started=7.0, ended=9.0),
        make_evaluation(100),
        make_evaluation(110),
    ]
    working_time = WorkingTime(
        [
            *done,
            make_evaluation(3, "interrupted", started=3.0, ended=99.0, seconds=math.nan),
            make_evaluation(120, "running"),
        ],
        125.0,
    )
    assert [working_time.compute_seconds(moment) for moment in (0, 9, 15, 100, 105, 120, 125)] == [
        0,
        9,
        15,
        15,
        20,
        35,
        40,
    ]
    assert working_time.total == 40
    assert WorkingTime([make_evaluation(120, "running")], None).total == 0


def test_improvements_start_with_imported_best() -> None:
    evaluations = [
        make_evaluation(
            0, loss=5.0, imported_from="trial 3 of other", started=-1000.0, ended=-900.0
        ),
        make_evaluation(1, loss=6.0),
        make_evaluation(2, "pruned", loss=0.1),
        make_evaluation(3, loss=4.0, ended=40.0),
        make_evaluation(4, loss=3.0, ended=30.0),
        make_evaluation(5, "failed"),
    ]
    run = compute_run_status(make_snapshot(evaluations))
    assert run.best == evaluations[4]
    assert run.improvements == [(0.0, 5.0), (29.0, 3.0)]
    assert run.counts == {"imported": 1, "complete": 3, "pruned": 1, "failed": 1}
    assert run.done == 5


WAITING = make_evaluation(0, "waiting", confirms=0, seed=1)
CONFIRMING = make_evaluation(0, "running", confirms=0, seed=1)
NOT_ACTIVE = "the run is not active"
RESUME = "To resume: the same command with --run-dir runs/name --resume"
UNKNOWN_REASON = "process 1 on there since 2026 may still be active; this host cannot see its lock"
PHASES: list[tuple[dict[str, Any], str, str]] = [
    ({"evaluations": []}, "searching", ""),
    ({"evaluations": [make_evaluation(0, "running")]}, "searching", ""),
    ({"evaluations": [make_evaluation(0)]}, "ending", ""),
    (
        {"evaluations": [make_evaluation(0)], "manifest_values": {"confirm_seeds": 1}},
        "searching",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "confirmations": [WAITING],
            "manifest_values": {"confirm_seeds": 1},
        },
        "confirming",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0), make_evaluation(1, "running")],
            "confirmations": [WAITING],
            "manifest_values": {"confirm_seeds": 1},
        },
        "searching",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "confirmations": [WAITING],
            "manifest_values": {"confirm_seeds": 1, "budget": 2},
        },
        "searching",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "confirmations": [CONFIRMING],
            "manifest_values": {"confirm_seeds": 1, "budget": 2},
        },
        "confirming",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "is_in_use": False,
            "holder": "process 1 on here since 2026",
        },
        "finished",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "is_in_use": None,
            "holder": "process 1 on there since 2026",
        },
        "finished",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0, "failed")],
            "is_in_use": False,
            "manifest_values": {"confirm_seeds": 1},
        },
        "finished",
        "",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "is_in_use": False,
            "manifest_values": {"confirm_seeds": 1},
        },
        "stopped",
        f"{NOT_ACTIVE}. {RESUME}",
    ),
    (
        {
            "evaluations": [make_evaluation(0)],
            "confirmations": [WAITING],
            "is_in_use": False,
            "manifest_values": {"confirm_seeds": 1},
        },
        "stopped",
        f"{NOT_ACTIVE}. {RESUME}",
    ),
    (
        {"evaluations": [], "is_in_use": False, "last_summary": {"stopped": "SIGTERM"}},
        "stopped",
        f"SIGTERM. {RESUME}",
    ),
    (
        {
            "evaluations": [make_evaluation(0, "running")],
            "is_in_use": False,
            "holder": "process 1 on here since 2026",
        },
        "crashed",
        f"{NOT_ACTIVE}: process 1 on here has crashed. {RESUME}",
    ),
    (
        {
            "evaluations": [make_evaluation(0, "running")],
            "is_in_use": None,
            "holder": "process 1 on there since 2026",
        },
        "unknown",
        UNKNOWN_REASON,
    ),
]


@pytest.mark.parametrize(("values", "phase", "reason"), PHASES)
def test_run_status_phase_and_header(values: dict[str, Any], phase: str, reason: str) -> None:
    run = compute_run_status(
        make_snapshot(
            **{**values, "manifest_values": {"budget": 1, **values.get("manifest_values", {})}}
        )
    )
    assert run.phase == phase
    title, *lines = (line.plain for line in format_header(run, Path("runs/name")))
    shown = {"confirming": "confirming the best", "unknown": "running or not?"}.get(phase, phase)
    assert title.startswith(f"{shown}  {run.done}/{run.total} ")
    assert title.endswith("  runs/name")
    assert (lines[0] == reason) is bool(reason)


def test_run_status_shows_rungs() -> None:
    curve = {epoch: 1 / epoch for epoch in range(1, 10)}
    evaluations = [
        make_evaluation(0, curve=curve),
        make_evaluation(1, "promoted", loss=1.5, curve={1: 1.5}, paused_after=1),
        make_evaluation(2, "running", curve={1: 1.5, 2: 1.2}, retry_of=1),
        *(
            make_evaluation(trial, "paused", loss=trial, curve={1: float(trial)}, paused_after=1)
            for trial in (3, 4)
        ),
    ]
    run = compute_run_status(make_snapshot(evaluations, manifest_values={"pruner": "asha"}))
    assert (run.done, run.phase) == (4, "searching"), (
        "the promoted individual has already ended once"
    )
    assert run.counts == {"complete": 1, "promoted": 1, "running": 1, "paused": 2}
    rows = make_rung_rows(run)
    assert rows.headings == ["rung", "reached", "continued", "paused", "best", "next promotion"]
    assert rows.cells(0) == ("1", "4", "2", "2", "1", "trial 3, 3: after 9 have reached it")
    assert rows.cells(1) == ("3", "1", "1", "0", "0.3333", "")
    assert rows.keys == ["3", ""]
    spent = make_snapshot(
        evaluations[:1] + evaluations[3:], manifest_values={"pruner": "asha", "budget": 3}
    )
    assert compute_run_status(spent).phase == "ending"
    assert "next promotion" not in make_rung_rows(compute_run_status(spent)).headings
    better = [make_evaluation(0, "failed"), *evaluations[3:]]
    assert (
        compute_run_status(
            make_snapshot(better, manifest_values={"pruner": "asha", "budget": 3})
        ).phase
        == "searching"
    ), "trial 3 is promoted"


def test_run_status_assigns_evaluations_of_removed_islands() -> None:
    evaluations = [
        make_evaluation(0, island=0, loss=3.0),
        make_evaluation(1, island=1, loss=2.0),
        make_evaluation(2, island=2, loss=1.0),
        make_evaluation(3, "failed", island=3),
        make_evaluation(4, "running", island=1),
        make_evaluation(5, "waiting", island=0),
        make_evaluation(6, "interrupted", island=0),
    ]
    run = compute_run_status(make_snapshot(evaluations))
    shown = [
        (island.index, island.population, island.best and island.best.trial, island.failed)
        for island in run.islands
    ]
    assert shown == [(0, 2, 2, 0), (1, 2, 1, 1)]


def test_run_status_has_one_running_evaluation_per_worker() -> None:
    left_over = make_evaluation(1, "running", worker=0, started=10.0)
    evaluations = [
        left_over,
        make_evaluation(2, worker=3, started=20.0),
        make_evaluation(3, "running", worker=0, started=130.0),
        make_evaluation(4, "running", worker=2, started=120.0),
        make_evaluation(5, worker=1, started=110.0, ended=140.0),
    ]
    run = compute_run_status(
        make_snapshot(evaluations, manifest_values={"started": format_start(100)})
    )
    assert [evaluation.trial for evaluation in run.running] == [4, 3]
    assert run.idle_workers == [1], "worker 3 is of an earlier session"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0:00"),
        (59.9, "0:59"),
        (61, "1:01"),
        (3600, "1:00:00"),
        (90000, "1 d 01 h"),
        (math.nan, "?"),
    ],
)
def test_format_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


@pytest.mark.parametrize("url", [None, "sqlite:///{}/study.db"])
def test_snapshots_follow_the_study(tmp_path: Path, url: str | None) -> None:
    session = start_session(tmp_path / "run", storage=url and url.format(tmp_path))
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "confirm_seeds": 1}))
    follower = RunReader(tmp_path / "run")
    assert follower.take_snapshot().evaluations == []
    record_evaluation(session, 1, losses=2)
    record, space = session.open_record(), load_search_file(QUICK).space
    assignment = claim_evaluation(
        record,
        {**PARAMS, "depth": 2},
        space.make_distributions(),
        9,
        island=1,
        worker=1,
        generation=0,
    )
    for epochs in range(3):
        snapshot = follower.take_snapshot()
        assert [evaluation.state for evaluation in snapshot.evaluations] == ["complete", "running"]
        assert len(snapshot.evaluations[1].curve) == epochs
        record.report(assignment, epochs + 1, 0.25)
    record.interrupt(assignment)
    assert [evaluation.state for evaluation in follower.take_snapshot().evaluations] == [
        "complete",
        "interrupted",
        "waiting",
    ]
    assert follower.take_snapshot().confirmations == []
    session.create_confirmations(space)
    plan = make_plan(RunReader(tmp_path / "run").manifest)
    plan.enqueue_planned(session.open_confirmations(), snapshot.evaluations[:1], space)
    assert [evaluation.state for evaluation in follower.take_snapshot().confirmations] == [
        "waiting"
    ]
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "budget": 77}))
    assert follower.take_snapshot().manifest.budget == 77
    again = RunReader(tmp_path / "run").read_evaluations()
    assert list(map(repr, follower.take_snapshot().evaluations)) == list(map(repr, again)), (
        "NaN does not equal itself"
    )


def test_is_in_use_follows_lock_of_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(start_session(tmp_path / "run").run_dir.path)
    assert run_dir.is_in_use is False
    with hold_run_dir(run_dir.path) as process:
        assert run_dir.is_in_use is True
        assert run_dir.is_in_use is True, "the check leaves no lock"
    assert (run_dir.is_in_use, run_dir.holder) == (False, "")
    with hold_run_dir(run_dir.path) as process:
        process.kill()
        process.wait(timeout=scale(20))
    assert (run_dir.is_in_use, run_dir.holder.split(" on ")[0]) == (False, f"process {process.pid}")
    run_dir.lock.write_text("process 1 on node17 since 2026-01-01 00:00:00\n")
    assert run_dir.is_in_use is None
    run_dir.lock.unlink()
    assert run_dir.is_in_use is False


def run_watch(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = make_light_command("watch", *arguments)
    return subprocess.run(
        command,
        env=make_environment(**variables),
        capture_output=True,
        text=True,
        timeout=scale(60),
    )


@pytest.mark.slow
def test_watch_piped_prints_finished_run_once(tmp_path: Path) -> None:
    make_finished_run(tmp_path / "run")
    shown = run_watch(tmp_path / "run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    assert re.match(rf"finished  5/5 evaluations, .* a minute  {tmp_path}/run\n", shown.stdout)
    assert "best 0.2  trial 4, found 0:0" in shown.stdout
    assert "depth=5  act=relu  flag=True  lr=0.1  accuracy=0.5" in shown.stdout
    (tmp_path / "run").rename(tmp_path / "r\N{LATIN SMALL LETTER U WITH DIAERESIS}n")
    ascii_only = run_watch(
        tmp_path / "r\N{LATIN SMALL LETTER U WITH DIAERESIS}n", PYTHONIOENCODING="ascii"
    )
    assert ascii_only.returncode == 0
    assert f"  {tmp_path}/r?n\n" in ascii_only.stdout


@pytest.mark.slow
def test_watch_without_run_prints_one_message(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        shown = run_watch(path)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert shown.stderr == f"error: {path} holds no run: there is no {path}/run.json\n"


@pytest.mark.parametrize(
    ("summary", "expected_line"),
    [
        (None, f"the run is not active. {RESUME}"),
        ({"stopped": "--time-limit 10.0 s"}, f"--time-limit 10.0 s. {RESUME}"),
        ({"stopped": "a target", "remedy": "a lower one"}, f"a target. {RESUME} and a lower one"),
        ({"exhausted": True}, "the search space is exhausted"),
        ([], f"the run is not active. {RESUME}"),
    ],
)
def test_header_explains_why_run_stopped(
    tmp_path: Path, summary: object, expected_line: str
) -> None:
    record_evaluation(start_session(tmp_path / "run"), 1)
    if summary is not None:
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    snapshot = RunReader(tmp_path / "run").take_snapshot()
    lines = [line.plain for line in format_header(compute_run_status(snapshot), Path("runs/name"))]
    assert expected_line in lines
    assert "1 not ended" in lines
