from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from hpo.results.confirmation import plan_of
from hpo.results.reader import Look, RunReader
from hpo.run.session import Session
from hpo.store.evaluations import Evaluation
from hpo.store.run_dir import RunDir
from hpo.text import clock
from hpo.trainer.search_file import load_search_file
from hpo.views.live.lines import Pen
from hpo.views.live.plot import Steps
from hpo.views.live.standing import standing
from hpo.views.live.view import View, shares
from hpo.views.working_time import WorkingTime
from tests.support.evaluations import one
from tests.support.launch import PROGRAM, ROOT, Mpi, finish
from tests.support.outcome import lines_of
from tests.support.runs import QUICK, claim, manifest, start

DAY = 86400.0


def a_look(evaluations: list[Evaluation], at: float = 200.0, **values: Any) -> Look:
    run = manifest(**{"budget": 100, **values.pop("about", {})})
    return Look(
        **{"at": at, "manifest": run, "evaluations": evaluations, "confirmations": [], "in_use": True, **values}
    )


def written(seconds: float) -> str:
    """Write a moment as run.json does."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(seconds))


def test_the_time_left_is_that_of_this_session_without_the_pause_before_it() -> None:
    before = [one(n, started=float(n), ended=n + 1.0) for n in range(50)]
    now = [one(50 + n, started=DAY + 30 * n, ended=DAY + 30 * n + 30) for n in range(4)]
    going = one(54, "running", started=DAY + 120)
    run = standing(a_look([*before, *now, going], DAY + 160, about={"started": written(DAY)}))
    assert (run.done, run.total) == (54, 100)
    assert run.pace.per_minute == pytest.approx(60 * 4 / 160), "the 40 s since the last one count"
    assert run.pace.left == pytest.approx(45 * 160 / 5), "the one that runs for longer than the others is nearly done"
    over = standing(a_look([*before, *now], DAY + 9999, about={"started": written(DAY)}, in_use=False))
    assert (over.phase, over.pace.left) == ("stopped", None)
    assert over.pace.per_minute == pytest.approx(60 * 4 / 120), "nothing goes on, so that time does not count"
    new = standing(a_look(before, DAY + 5, about={"started": written(DAY)}))
    assert (new.pace.per_minute, new.pace.left) == (None, None)


def test_the_pace_is_that_of_the_last_evaluations() -> None:
    fast = [one(n, started=n * 1.0, ended=n + 1.0) for n in range(60)]
    slow = [one(60 + n, started=60 + 10.0 * n, ended=70 + 10.0 * n) for n in range(20)]
    run = standing(a_look(fast + slow, 260))
    assert run.pace.per_minute == pytest.approx(6)
    assert run.pace.left == pytest.approx(200)
    taken_over = [one(80 + n, origin="trial 1 of other", started=0.0, ended=1.0) for n in range(500)]
    assert standing(a_look(fast + slow + taken_over, 260)).pace == run.pace


def test_the_first_of_many_workers_to_end_does_not_speak_for_all() -> None:
    running = [one(n, "running", worker=n, started=0.0) for n in range(1, 100)]
    run = standing(a_look([one(0, ended=3600.0), *running], 3600, about={"budget": 1000}))
    assert run.pace.per_minute == pytest.approx(1 / 60)
    assert run.pace.left == pytest.approx((999 - 99) * 36)
    hanging = standing(a_look([one(0, ended=3600.0), *running], 36000, about={"budget": 1000}))
    assert hanging.pace.left == pytest.approx((999 - 99) * 360)


@pytest.mark.parametrize("started", ["", "yesterday", "2026-01-01T00:00:00"])
def test_a_session_whose_beginning_is_not_known_is_the_whole_run(started: str) -> None:
    run = standing(a_look([one(0), one(10), one(20)], 30, about={"started": started}))
    assert run.pace.per_minute == pytest.approx(6)


def test_pauses_are_no_working_time() -> None:
    done = [one(0), one(5), one(7, started=7.0, ended=9.0), one(100), one(110)]
    time_of = WorkingTime([*done, one(3, "interrupted", started=3.0, ended=99.0), one(120, "running")], 125.0)
    assert [time_of.at(moment) for moment in (0, 9, 15, 100, 105, 120, 125)] == [0, 9, 15, 15, 20, 35, 40]
    assert time_of.total == 40
    assert WorkingTime([one(120, "running")], None).total == 0


def test_the_best_so_far_begins_with_what_was_taken_over_and_counts_only_what_is_complete() -> None:
    evaluations = [
        one(0, loss=5.0, origin="trial 3 of other", started=-1000.0, ended=-900.0),
        one(1, loss=6.0),
        one(2, "pruned", loss=0.1),
        one(3, loss=4.0, ended=40.0),
        one(4, loss=3.0, ended=30.0),
        one(5, "failed"),
    ]
    run = standing(a_look(evaluations))
    assert run.best == evaluations[4]
    assert run.improvements == [(0.0, 5.0), (29.0, 3.0)]
    assert run.counts == {"taken over": 1, "complete": 3, "pruned": 1, "failed": 1}
    assert run.done == 5


WAITING = one(0, "waiting", confirms=0, seed=1)
CONFIRMING = one(0, "running", confirms=0, seed=1)
NOT_HERE = "no run is going on here"
GO_ON = "To go on: the same command with --run-dir runs/name --resume"
NOT_SEEN = "process 1 on there since 2026 may still go on; its lock cannot be seen from this host"
PHASES: list[tuple[dict[str, Any], str, str]] = [
    ({"evaluations": []}, "searching", ""),
    ({"evaluations": [one(0, "running")]}, "searching", ""),
    ({"evaluations": [one(0)]}, "ending", ""),
    ({"evaluations": [one(0)], "about": {"confirm": 1}}, "searching", ""),
    ({"evaluations": [one(0)], "confirmations": [WAITING], "about": {"confirm": 1}}, "confirming", ""),
    (
        {"evaluations": [one(0), one(1, "running")], "confirmations": [WAITING], "about": {"confirm": 1}},
        "searching",
        "",
    ),
    ({"evaluations": [one(0)], "confirmations": [WAITING], "about": {"confirm": 1, "budget": 2}}, "searching", ""),
    ({"evaluations": [one(0)], "confirmations": [CONFIRMING], "about": {"confirm": 1, "budget": 2}}, "confirming", ""),
    ({"evaluations": [one(0)], "in_use": False, "holder": "process 1 on here since 2026"}, "finished", ""),
    ({"evaluations": [one(0)], "in_use": None, "holder": "process 1 on there since 2026"}, "finished", ""),
    ({"evaluations": [one(0, "failed")], "in_use": False, "about": {"confirm": 1}}, "finished", ""),
    ({"evaluations": [one(0)], "in_use": False, "about": {"confirm": 1}}, "stopped", f"{NOT_HERE}. {GO_ON}"),
    (
        {"evaluations": [one(0)], "confirmations": [WAITING], "in_use": False, "about": {"confirm": 1}},
        "stopped",
        f"{NOT_HERE}. {GO_ON}",
    ),
    ({"evaluations": [], "in_use": False, "stopped": "SIGTERM"}, "stopped", f"SIGTERM. {GO_ON}"),
    (
        {"evaluations": [one(0, "running")], "in_use": False, "holder": "process 1 on here since 2026"},
        "died",
        f"{NOT_HERE}: process 1 on here has died. {GO_ON}",
    ),
    (
        {"evaluations": [one(0, "running")], "in_use": None, "holder": "process 1 on there since 2026"},
        "unknown",
        NOT_SEEN,
    ),
]


@pytest.mark.parametrize(("values", "phase", "why"), PHASES)
def test_the_phase_of_a_run(values: dict[str, Any], phase: str, why: str) -> None:
    run = standing(a_look(**{**values, "about": {"budget": 1, **values.get("about", {})}}))
    assert run.phase == phase
    heading, *lines = drawn(run, width=100).splitlines()
    shown = {"confirming": "confirming the best", "unknown": "running or not?"}.get(phase, phase)
    assert heading.split(maxsplit=1) == ["runs/name", shown]
    bar = next(place for place, line in enumerate(lines) if f" {run.done}/{run.total} " in line)
    assert " ".join(lines[:bar]) == why


def test_rungs_are_watched() -> None:
    curve = {epoch: 1 / epoch for epoch in range(1, 10)}
    evaluations = [
        one(0, curve=curve),
        one(1, "promoted", loss=1.5, curve={1: 1.5}, paused_after=1),
        one(2, "running", curve={1: 1.5, 2: 1.2}, repeats=1),
        *(one(trial, "paused", loss=trial, curve={1: float(trial)}, paused_after=1) for trial in (3, 4)),
    ]
    run = standing(a_look(evaluations, about={"pruner": "asha"}))
    assert (run.done, run.phase) == (4, "searching"), "the promoted one has ended before"
    assert run.counts == {"complete": 1, "promoted": 1, "running": 1, "paused": 2}
    lines = [str(line).split() for line in View(Path("run"), Pen(100), braille=True).draw(run, 40)]
    place = lines.index(["rung", "reached", "went", "on", "paused", "best", "next", "to", "go", "on"])
    assert lines[place + 1] == ["1", "4", "2", "2", "1", "trial", "3,", "3:", "if", "9", "reach", "it"]
    assert lines[place + 2] == ["3", "1", "1", "0", "0.3333"]
    spent = a_look(evaluations[:1] + evaluations[3:], about={"pruner": "asha", "budget": 3})
    assert standing(spent).phase == "ending"
    better = [one(0, "failed"), *evaluations[3:]]
    assert standing(a_look(better, about={"pruner": "asha", "budget": 3})).phase == "searching", "trial 3 is promoted"


def test_islands_that_are_gone_are_dealt_to_those_that_are_left() -> None:
    evaluations = [
        one(0, island=0, loss=3.0),
        one(1, island=1, loss=2.0),
        one(2, island=2, loss=1.0),
        one(3, "failed", island=3),
        one(4, "running", island=1),
        one(5, "waiting", island=0),
        one(6, "interrupted", island=0),
    ]
    run = standing(a_look(evaluations))
    shown = [
        (island.index, island.population, island.best and island.best.trial, island.failed) for island in run.islands
    ]
    assert shown == [(0, 2, 2, 0), (1, 2, 1, 1)]


def test_each_worker_does_one_thing_and_the_oldest_comes_first() -> None:
    dead = one(1, "running", worker=0, started=10.0)
    evaluations = [
        dead,
        one(2, worker=3, started=20.0),
        one(3, "running", worker=0, started=130.0),
        one(4, "running", worker=2, started=120.0),
        one(5, worker=1, started=110.0, ended=140.0),
    ]
    run = standing(a_look(evaluations, about={"started": written(100)}))
    assert [evaluation.trial for evaluation in run.running] == [4, 3]
    assert run.idle == [1], "worker 3 is of an earlier session"


def view(width: int = 80, encoding: str = "utf-8", braille: bool = True) -> View:
    return View(Path("runs/name"), Pen(width, encoding), braille)


def drawn(run: Any, height: int = 24, **values: Any) -> str:
    return "\n".join(line.plain for line in view(**values).draw(run, height))


def a_large_run() -> Look:
    evaluations = [
        one(n, ("failed" if n % 7 == 0 else "complete"), island=n % 128 // 4, worker=n % 128, loss=1000.0 / (n + 1))
        for n in range(1000)
    ]
    evaluations += [one(1000 + n, "running", worker=n, island=n // 4, curve={1: 0.5, 2: 0.25}) for n in range(120)]
    return a_look(
        evaluations, 1300, about={"budget": 5000, "layout": {"ranks": 128, "ranks_per_worker": 1, "islands": 32}}
    )


def test_what_is_left_out_of_a_large_run_is_said() -> None:
    run = standing(a_large_run())
    lines = view().draw(run, 24, "q leaves")
    text = [line.plain for line in lines]
    assert len(text) == 24
    assert max(line.cell_len for line in lines) <= 80
    heading = next(place for place, line in enumerate(text) if "population" in line)
    islands = [line.split()[-4:] for line in text[heading + 1 : text.index("", heading)]]
    assert sum(int(population) for _, population, _, _ in islands) == 1000
    assert sum(int(failed) for _, _, _, failed in islands) == 143
    assert islands[-1][0] == f"+{32 - (len(islands) - 1)}"
    assert islands[0] == ["25", "32", "1", "4"], "the best island comes first"
    heading = next(place for place, line in enumerate(text) if line.startswith("worker"))
    workers = text[heading + 1 : text.index("", heading)]
    more = 120 - (len(workers) - 1)
    assert workers[-1] == f"+{more + 8} workers: {more} evaluating, 8 idle"
    assert workers[0].split()[:6] == ["0", "0", "1000", "2", "0.25", "5:00"]
    assert text[-1] == "q leaves"


@pytest.mark.parametrize("width", [1, 5, 19, 40, 61, 80, 233])
@pytest.mark.parametrize("height", [1, 2, 5, 11, 24, 90])
def test_a_terminal_may_have_any_size(width: int, height: int) -> None:
    foreign = [
        one(0, loss=math.inf, ended=math.nan, curve={1: math.nan}),
        one(1, "running", started=math.nan, params={}),
    ]
    for look in (
        a_large_run(),
        a_look([]),
        a_look(foreign),
        a_look([one(n, loss=n * -1e308) for n in range(2)], in_use=False),
    ):
        lines = view(width).draw(standing(look), height, "q leaves")
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
    assert sum(shares([3, 100, 0, 7], height)) == min(height, 110)


HOSTILE = ["[bold]x[/bold]", "a\nb\x1b[2J\x07\r", "\u202egnp.exe", "\udcff\U0001f3d6", "w" * 10_000, "\u4e2d" * 99, ""]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "iso-8859-1"])
def test_nothing_in_a_run_moves_the_cursor_or_leaves_its_line(encoding: str) -> None:
    params = {name: name for name in HOSTILE}
    evaluations = [one(n, params=params, metrics={name: 0.5}) for n, name in enumerate(HOSTILE)]
    evaluations += [one(10 + n, "failed", failure=text) for n, text in enumerate(HOSTILE)]
    evaluations += [one(20 + n, "running", params=params, worker=n) for n in range(3)]
    origin = one(30, loss=0.5, origin="\x1b[2J\n" * 99, params=params)
    for look in (a_look(evaluations), a_look([*evaluations, origin], in_use=None, holder="\x1b[31m\nhere")):
        lines = View(Path("runs") / HOSTILE[1], Pen(80, encoding), braille=encoding == "utf-8").draw(standing(look), 60)
        assert all(line.plain.isprintable() for line in lines)
        assert all(cell_len(line.plain) <= 80 for line in lines)
        text = "\n".join(line.plain for line in lines)
        assert "[bold]x[/bold]" in text, "it is no markup"
        text.encode(encoding)


def test_long_lists_of_hyperparameters_are_cut_and_counted() -> None:
    params = {f"parameter_{n}": n * 1000 for n in range(30)}
    text = drawn(standing(a_look([one(0, params=params), one(1, "running", params=params)])))
    shown = re.findall(r"parameter_\d+=\d+", text)
    assert f"+{30 - len(shown)} more" in text
    heading = next(line for line in text.splitlines() if line.startswith("trial"))
    more = re.search(r"\+(\d+) more$", heading)
    assert more
    assert heading.split()[5:-2] == [f"parameter_{n}" for n in range(30 - int(more[1]))], "not cut to what all share"
    assert len(heading.split()[5:-2]) >= 2
    assert "hpo show runs/name 0 shows all 30 hyperparameters" in text
    few = drawn(standing(a_look([one(0, params={"lr": 0.25, "act": "relu"})])))
    assert few.splitlines()[-2].endswith("  lr    act ")
    assert few.splitlines()[-1].endswith("  0.25  relu")


def test_steps_go_down_where_the_value_does() -> None:
    steps = Steps([(0, 9.0), (5, 5.0), (9, 1.0)], 9)
    assert not steps.scale.logarithmic
    assert steps.draw(10, 3, braille=False) == ["******    ", "     *****", "         *"]
    assert Steps([(5, 100.0), (9, 1.0)], 9).scale.logarithmic
    assert Steps([(5, 2.0)], 10).draw(5, 2, braille=False) == ["     ", "  ***"]
    assert Steps([(0, 2.0)], 0).draw(2, 1) == ["\u28c0\u28c0"]
    assert Steps([(0, 2.0), (1, 1.0)], 1).draw(1, 1) == ["\u28b9"]
    assert Steps([(0, 1e308), (1, -1e308)], 1).draw(2, 2, braille=False) == ["**", " *"]


def test_a_best_that_had_diverged_is_above_the_plot_and_flattens_nothing() -> None:
    steps = Steps([(0, 1.5e5), (2, 2.0), (5, 1.0), (9, 0.5)], 9, losses=[1.5e5, 2.0, 1.0, 0.5, 1.2])
    assert steps.draw(20, 4, braille=False) == [
        "^^^^^ 1 beyond      ",
        "     *******        ",
        "           *********",
        "                   *",
    ]
    assert steps.draw(4, 2, braille=False) == ["^   ", " ***"]
    late = Steps([(8, 1.5e5), (9, 2.0)], 9, losses=[1.5e5, 2.0, 1.0])
    assert late.draw(12, 2, braille=False) == [" 1 beyond ^ ", "           *"]
    assert Steps([(0, 1.5e5), (9, 2.0)], 9).draw(3, 2, braille=False) == ["***", "  *"], "two may be anything"
    losses = [1.5e5, 2e4, *(2 / (n + 1) for n in range(20))]
    lines = drawn(standing(a_look([one(n, loss=loss) for n, loss in enumerate(losses)]))).splitlines()
    top = next(place for place, line in enumerate(lines) if line.startswith("best loss over time"))
    assert lines[top][:40].rstrip() == "best loss over time", "what is left is not far apart"
    assert re.match(r"150000 +\^\^ 2 beyond ", lines[top + 1])
    assert lines[top + 2].startswith("     2 ")
    assert any(line.startswith("   0.1 ") for line in lines[top + 3 :])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (90000, "1 d 01 h"), (math.nan, "?")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


PARAMS = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}


def evaluate(session: Session, number: int, losses: int = 1, budget: int = 9) -> None:
    """Record an evaluation that is complete if it has two losses, and running if it has not."""
    record, distributions = session.open_record(), load_search_file(QUICK).space.distributions()
    place = {"island": number % 2, "worker": 0, "generation": 0}
    assignment = claim(record, {**PARAMS, "depth": number}, distributions, budget, **place)
    for epoch in range(losses):
        record.report(assignment, epoch + 1, 1.0 / number)
    if losses > 1:
        record.complete(assignment, 1.0 / number, 1.0, {"accuracy": 0.5})


@pytest.mark.parametrize("url", [None, "sqlite:///{}/study.db"])
def test_looks_follow_the_record(tmp_path: Path, url: str | None) -> None:
    session = start(tmp_path / "run", storage=url and url.format(tmp_path))
    run_json = tmp_path / "run" / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "confirm": 1}))
    follower = RunReader(tmp_path / "run").follow()
    assert follower.look().evaluations == []
    evaluate(session, 1, losses=2)
    record, space = session.open_record(), load_search_file(QUICK).space
    assignment = claim(record, {**PARAMS, "depth": 2}, space.distributions(), 9, island=1, worker=1, generation=0)
    for epochs in range(3):
        look = follower.look()
        assert [evaluation.state for evaluation in look.evaluations] == ["complete", "running"]
        assert len(look.evaluations[1].curve) == epochs
        record.report(assignment, epochs + 1, 0.25)
    record.interrupt(assignment)
    assert [evaluation.state for evaluation in follower.look().evaluations] == ["complete", "interrupted", "waiting"]
    assert follower.look().confirmations == []
    session.create_confirmations(space)
    plan = plan_of(RunReader(tmp_path / "run").manifest)
    plan.begin(session.open_confirmations(), look.evaluations[:1], space)
    assert [evaluation.state for evaluation in follower.look().confirmations] == ["waiting"]
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "budget": 77}))
    assert follower.look().manifest.budget == 77
    assert follower.look().evaluations == RunReader(tmp_path / "run").evaluations()


HOLD = """
import sys
from pathlib import Path
from hpo.store.run_dir import RunDir
from tests.support.runs import claim
with RunDir(Path(sys.argv[1])).hold():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Be a run in a directory; what is in ``with`` may kill it."""
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
        process.wait(timeout=20)


def test_whether_a_run_goes_on_is_told_where_it_can_be(tmp_path: Path) -> None:
    run_dir = RunDir(start(tmp_path / "run").run_dir.path)
    assert run_dir.in_use is False
    with held(run_dir.path) as process:
        assert run_dir.in_use is True
        assert run_dir.in_use is True, "asking takes no lock"
    assert (run_dir.in_use, run_dir.holder) == (False, "")
    with held(run_dir.path) as process:
        process.kill()
        process.wait(timeout=20)
    assert (run_dir.in_use, run_dir.holder.split(" on ")[0]) == (False, f"process {process.pid}")
    run_dir.lock.write_text("process 1 on node17 since 2026-01-01 00:00:00\n")
    assert run_dir.in_use is None
    run_dir.lock.unlink()
    assert run_dir.in_use is False


def hpo(*arguments: object) -> list[str]:
    # The terminal on standard input, if there is one, becomes that of the process, so that Ctrl-C reaches it.
    code = "import fcntl, os, sys, termios\n"
    code += "if os.isatty(0): fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code += "from hpo.cli import main\n"
    code += "try: main()\n"
    code += "finally: assert not {'torch', 'mpi4py', 'propulate'} & sys.modules.keys()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}


def piped(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = hpo("watch", *arguments)
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=60)


def finished_run(path: Path, budget: int = 5) -> None:
    session = start(path)
    run_json = path / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "budget": budget}))
    for number in range(1, budget + 1):
        evaluate(session, number, losses=2)


@pytest.mark.slow
def test_a_finished_run_is_printed_once(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    shown = piped(tmp_path / "run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    lines = shown.stdout.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert lines[0].endswith("finished")
    assert "5/5 evaluations" in lines[1]
    assert "best 0.2  trial 4, found 0:0" in shown.stdout
    ascii_only = piped(tmp_path / "run", PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0
    assert "*" in ascii_only.stdout
    assert ascii_only.stdout.isascii()


@pytest.mark.slow
def test_a_run_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        shown = piped(path)
        assert (shown.returncode, shown.stdout) == (2, "")
        assert shown.stderr == f"error: {path} holds no run: there is no {path}/run.json\n"


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, f"no run is going on here. {GO_ON}"),
        ({"stopped": "--time-limit 10.0 s"}, f"--time-limit 10.0 s. {GO_ON}"),
        ({"stopped": "a target", "remedy": "a lower one"}, f"a target. {GO_ON} and a lower one"),
        ({"exhausted": True}, "the search space is exhausted"),
        ([], f"no run is going on here. {GO_ON}"),
    ],
)
def test_a_run_that_stopped_says_why(tmp_path: Path, summary: object, said: str) -> None:
    evaluate(start(tmp_path / "run"), 1)
    if summary is not None:
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    look = RunReader(tmp_path / "run").follow().look()
    text = drawn(standing(look), width=120)
    assert said in text.splitlines()
    assert "1 not ended" in text


@dataclass
class Screen:
    """A process in a terminal of 80 columns and 24 lines, and what it has written so far."""

    process: subprocess.Popen[bytes]
    terminal: int
    slave: int
    before: list[Any]
    written: str = ""

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until a text has come since this was asked for the last time."""
        end = time.monotonic() + seconds
        place = len(self.written)
        while text not in self.written[place:]:
            assert time.monotonic() < end, f"no {text!r} in {self.written[place:]!r}"
            ready, _, _ = select.select([self.terminal], [], [], 0.2)
            if ready:
                self.written += os.read(self.terminal, 65536).decode(errors="replace")
            else:
                assert self.process.poll() is None, f"ended without {text!r}: {self.written[place:]!r}"

    def wait_for_drawing(self, pattern: str, seconds: float = 60) -> list[str]:
        """Read until a drawing that begins from now on matches the pattern, and return the drawing."""
        end = time.monotonic() + seconds
        begun = len(self.drawings())
        while True:
            # Another drawing has begun behind each of these, so they are whole.
            for drawing in self.drawings()[begun:-1]:
                if re.search(pattern, "\n".join(drawing), re.MULTILINE):
                    return drawing
            assert time.monotonic() < end, f"no drawing matches {pattern!r}: {self.drawings()[-3:]}"
            assert self.process.poll() is None, f"ended before {pattern!r} was drawn: {self.drawings()[-3:]}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.written += os.read(self.terminal, 65536).decode(errors="replace")

    def end(self) -> int:
        """Wait for the end of the process, and give its status; the terminal must be as it was."""
        end = time.monotonic() + 30
        while self.process.poll() is None or select.select([self.terminal], [], [], 0)[0]:
            assert time.monotonic() < end, self.written[-2000:]
            if select.select([self.terminal], [], [], 0.05)[0]:
                self.written += os.read(self.terminal, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.slave) == self.before
        for taken, given_back in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert self.written.count(taken) == self.written.count(given_back)
            assert self.written.rfind(taken) <= self.written.rfind(given_back)
        return int(self.process.returncode)

    @property
    def takes_keys(self) -> bool:
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)

    def drawings(self) -> list[list[str]]:
        """Return the lines of each whole screen that was drawn."""
        text = re.sub(r"\x1b\[[\d;]*m", "", self.written)
        rows = re.findall(r"\x1b\[(\d+);1H([^\x1b]*)", text)
        screens: list[list[str]] = []
        for row, line in rows:
            if row == "1":
                screens.append([])
            screens[-1].append(line)
        return screens


@contextmanager
def in_terminal(*arguments: object, **variables: str) -> Iterator[Screen]:
    """Run `hpo` in a terminal."""
    terminal, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        hpo(*arguments), stdin=slave, stdout=slave, stderr=slave, env=environment(**variables), start_new_session=True
    )
    try:
        yield Screen(process, terminal, slave, before)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(slave)


def _press(key: bytes) -> Callable[[Screen, Path], object]:
    return lambda screen, _: os.write(screen.terminal, key)


def _send(number: signal.Signals) -> Callable[[Screen, Path], object]:
    return lambda screen, _: screen.process.send_signal(number)


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (_press(b"q"), 0),
        (_press(b"\x03"), 0),
        (_send(signal.SIGTERM), 143),
        (_send(signal.SIGHUP), 129),
        (lambda _, run_dir: shutil.rmtree(run_dir), 2),
    ],
    ids=["q", "ctrl-c", "SIGTERM", "SIGHUP", "gone"],
)
@pytest.mark.slow
def test_the_terminal_is_given_back_however_one_leaves(
    tmp_path: Path, leave: Callable[[Screen, Path], object], status: int
) -> None:
    evaluate(start(tmp_path / "run"), 1)
    with held(tmp_path / "run") as run, in_terminal("watch", tmp_path / "run") as screen:
        screen.wait_for("searching")
        assert screen.takes_keys
        _press(b"x")(screen, tmp_path)  # means nothing
        screen.process.send_signal(signal.SIGTSTP)  # which the system does not heed where there is no shell
        screen.wait_for("\x1b[?1049l")
        screen.wait_for("searching")
        assert screen.takes_keys
        leave(screen, tmp_path / "run")
        assert screen.end() == status
        after = screen.written[screen.written.rindex("\x1b[?1049l") :].replace("\x1b[?1049l", "")
        assert ("holds no run" in after) if status == 2 else after.strip() == ""
        assert run.poll() is None


@pytest.mark.slow
def test_a_run_that_dies_is_watched_on_until_it_is_resumed_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = start(path)
    evaluate(session, 1, losses=2)
    with in_terminal("watch", path, NO_COLOR="1") as screen:
        assert screen.end() == 0, "nothing goes on, and it does not wait for it"
        assert "no run is going on here" in screen.written
        assert "\x1b[?1049h" not in screen.written
    with held(path) as first, in_terminal("watch", path, NO_COLOR="1") as screen:
        screen.wait_for("1 complete")
        evaluate(session, 2)
        screen.wait_for("1 running")
        first.kill()
        screen.wait_for(f"process {first.pid} on")
        screen.wait_for("1 not ended")
        with held(path):
            assert session.open_record().requeue_interrupted() == 1
            screen.wait_for("searching")
            screen.wait_for("1 waiting")
            for number in range(3, 10):
                evaluate(session, number, losses=2)
            run_json = path / "run.json"
            run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "budget": 8}))
            screen.wait_for("ending")
        assert screen.end() == 0
        last = screen.written[screen.written.rindex("\x1b[?1049l") :]
        assert "finished" in last
        assert "8/8 evaluations" in last
        assert not re.search(r"\x1b\[[\d;]*3\dm", screen.written), "no colour"
        *drawings, final = screen.drawings()
        assert len(drawings) > 5
        assert all(len(drawing) == 24 for drawing in drawings)
        assert all(cell_len(line) == 80 for drawing in [*drawings, final] for line in drawing)


def test_a_real_run_is_watched_left_alone_and_listed(mpi: Mpi, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [PROGRAM, QUICK, "--run-dir", run_dir, "--evaluations", 30, "--confirm", 1, "--top-n", 2]
    job = mpi.start(2, *arguments, "--ranks-per-worker", 1, "--set", "seconds=0.25", cwd=tmp_path)
    end = time.monotonic() + 60
    while not (run_dir / "run.json").exists():
        assert time.monotonic() < end
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    listing = subprocess.Popen(
        hpo("watch", run_dir), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with in_terminal("watch", run_dir) as screen:
        screen.wait_for("a minute")
        screen.wait_for("q leaves; the run goes on")
        # Between two evaluations a worker has no line, and before its first report the line has no loss.
        drawing = screen.wait_for_drawing(r"^ +[01] +[01] +\d+ .* 0:0\d  \d")
        os.write(screen.terminal, b"q")
        assert screen.end() == 0
        assert [len(drawing), *map(cell_len, drawing)] == [24, *[80] * 24]
        text = "\n".join(drawing)
        assert re.search(r" [1-9]\d?/30 evaluations, [\d.]+ a minute, about .* left, then --confirm", text)
        assert re.search(r"^best \d\S*  trial \d+, found 0:\d\d ago on island [01] by worker [01]", text, re.MULTILINE)
    assert job.poll() is None
    finish(job)
    assert job.returncode == 0
    listed = finish(listing)
    assert (listed.returncode, listed.stderr) == (0, "")
    lines = lines_of(listed.stdout)
    search = [line for line in lines if line["budget"] == "30"]
    assert [int(line["done"]) for line in search] == list(range(31 - len(search), 31))
    assert len(search) > 5
    assert [line["done"] for line in lines if line["budget"] == "2"] == ["1", "2"]
    assert listed.stdout.index("30/30") < listed.stdout.rindex("finished")
    assert "confirmed: trial" in listed.stdout
