"""Test the screen of `hpo watch`, with Textual's pilot and in a terminal."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text
from textual.pilot import Pilot

from hpo.errors import UsageError
from hpo.results.run_snapshot import RunSnapshot
from hpo.store.evaluations import Evaluation
from hpo.views.live.app import RunUpdated, WatchApp
from hpo.views.live.run_status import RunStatus, compute_run_status
from hpo.views.live.table_rows import RowOrder, make_columns
from hpo.views.live.widgets import Table, plot_steps
from tests.support.evaluations import make_evaluation
from tests.support.limits import scale
from tests.support.runs import make_manifest, start_session
from tests.support.watching import (
    Terminal,
    hold_run_dir,
    make_environment,
    make_snapshot,
    record_evaluation,
    run_in_terminal,
    set_budget,
)

SCREENS = Path(__file__).parent / "screens"
HOSTILE = [
    "[bold]x[/bold]",
    "a\nb\x1b[2J\x07\r",
    "\u202egnp.exe",
    "\udcff\U0001f3d6",
    "w" * 10_000,
    "\u4e2d" * 99,
    "",
]

Act = Callable[[WatchApp, "Pilot[int]"], Awaitable[None]]
Updates = Iterator[tuple[RunStatus, float]]


def make_updates(*updates: RunSnapshot) -> Updates:
    """Return the status of each snapshot with a pause of 0 s, as WatchApp expects them."""
    return ((compute_run_status(snapshot), 0.0) for snapshot in updates)


def watch(
    updates: Updates, act: Act, size: tuple[int, int] = (100, 30), path: Path = Path("runs/name")
) -> WatchApp:
    """Show a run on a screen, call `act` while it is shown, and return the app."""
    app = WatchApp(path, updates)

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await settle(app, pilot)
            await act(app, pilot)

    asyncio.run(run())
    return app


async def settle(app: WatchApp, pilot: Pilot[int]) -> None:
    """Wait until the first update is shown and all worker threads have ended."""
    while app.run_status is None and app.is_running:
        await pilot.pause(0.01)
    await app.workers.wait_for_complete()
    # Without a delay, pause waits until the process is idle: up to a second on a busy machine.
    for _ in range(3):
        await pilot.pause(0.01)


def read_screen(app: WatchApp) -> str:
    """Return the screen as text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


async def wait_for(app: WatchApp, pilot: Pilot[int], text: str) -> None:
    """Wait until a text is on the screen."""
    until = time.monotonic() + scale(20)
    while text not in read_screen(app):
        assert time.monotonic() < until, read_screen(app)
        await pilot.pause(0.05)


def press(*keys: str) -> Act:
    """Return a function that presses these keys in an app."""

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await pilot.press(*keys)
        await settle(app, pilot)

    return act


def press_and_read_screen(
    snapshot: RunSnapshot,
    *keys: str,
    size: tuple[int, int] = (100, 30),
    path: Path = Path("runs/name"),
) -> str:
    """Show a snapshot, press these keys, and return the screen as text."""
    screens: list[str] = []

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await press(*keys)(app, pilot)
        screens.append(read_screen(app))

    watch(make_updates(snapshot), act, size, path)
    return screens[0]


def make_evaluations() -> list[Evaluation]:
    """Return 14 evaluations: a pruned one, three failed, two running, and eight complete ones."""
    evaluations = []
    for trial in range(14):
        params = {
            "lr": 0.5 / (trial + 1),
            "act": ("relu", "tanh")[trial % 2],
            "layers": trial % 5 + 1,
        }
        values = {
            "params": params,
            "island": trial % 2,
            "worker": trial % 4,
            "generation": trial // 4,
            "propagator": "ga",
        }
        loss, curve = 2.0 / (trial + 1), {step: 2.5 / (trial + step) for step in range(1, 5)}
        state = (
            "pruned"
            if trial == 5
            else "failed"
            if trial in (3, 7, 10)
            else "running"
            if trial > 11
            else "complete"
        )
        if state == "failed":
            values["failure"] = f"rank 1, train.py:{trial % 2}: ValueError: too bad"
            values["traceback"] = (
                "Traceback (most recent call last):\n  train.py\nValueError: too bad"
            )
        elif state != "running":
            values.update(loss=loss, metrics={"accuracy": 1 - loss / 4}, seconds=9.5)
        evaluations.append(make_evaluation(trial, state, curve=curve, **values))
    return evaluations


ENDED = [
    replace(found, state="complete", loss=1.5, ended=30.0) if found.state == "running" else found
    for found in make_evaluations()
]
RUNNING = make_snapshot(make_evaluations(), 40.0, manifest_values={"budget": 20})
FINISHED = make_snapshot(ENDED, 40.0, manifest_values={"budget": 14}, is_in_use=False)


@pytest.fixture
def _at_a_known_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: 42.0)


@pytest.mark.usefixtures("_at_a_known_time")
@pytest.mark.parametrize(
    ("name", "snapshot", "keys", "size"),
    [
        ("running", RUNNING, (), (100, 30)),
        ("finished", FINISHED, (), (80, 24)),
        ("low", FINISHED, (), (40, 10)),
        ("evaluations", RUNNING, ("2", "s", "s"), (120, 20)),
        ("failures", RUNNING, ("3",), (80, 12)),
        ("islands", RUNNING, ("tab", "tab", "tab"), (80, 12)),
        ("workers", RUNNING, ("6",), (80, 12)),
        ("evaluation", RUNNING, ("3", "enter"), (80, 36)),
    ],
)
def test_screen_matches_snapshot(
    name: str, snapshot: RunSnapshot, keys: tuple[str, ...], size: tuple[int, int], tmp_path: Path
) -> None:
    path, seen = SCREENS / f"{name}.txt", tmp_path / f"{name}.txt"
    seen.write_text(press_and_read_screen(snapshot, *keys, size=size))
    before = path.read_text() if path.exists() else ""
    assert seen.read_text().splitlines() == before.splitlines(), (
        f"to accept this screen: cp {seen} {path}"
    )


def test_row_order_filters_by_any_property() -> None:
    evaluations = [*make_evaluations(), make_evaluation(0, "waiting", confirms=4, seed=1)]
    columns = make_columns(evaluations, make_manifest().objectives, 100.0)

    def filter_labels(words: str) -> list[str]:
        return list(
            RowOrder("trial", reverse=False, filter_words=words)
            .make_rows(evaluations, columns)
            .keys
        )

    assert filter_labels("failed") == ["3", "7", "10"]
    assert filter_labels("7") == ["7"]
    assert filter_labels("valueError act=tanh") == ["3", "7"]
    assert filter_labels("layers=1 complete") == ["0"], "5 is pruned"
    assert filter_labels("confirm") == ["confirm-0"]
    assert filter_labels("none") == []
    assert len(filter_labels(" ")) == 15


def test_row_order_sorts_missing_values_last() -> None:
    evaluations = [
        make_evaluation(0, loss=10.0, params={"a": "x"}),
        make_evaluation(1, "failed", params={"a": 3}),
        make_evaluation(2, loss=9.0, params={"b": True}),
        make_evaluation(3, loss=-1.5, params={"a": 20}),
        make_evaluation(4, loss=math.nan, params={"a": "[b]"}),
    ]
    columns = make_columns(evaluations, make_manifest().objectives, 100.0)

    def sort_labels(heading: str, reverse: bool = False) -> list[str]:
        return list(RowOrder(heading, reverse).make_rows(evaluations, columns).keys)

    assert sort_labels("loss") == ["3", "2", "0", "1", "4"]
    assert sort_labels("loss", reverse=True) == ["0", "2", "3", "1", "4"]
    assert sort_labels("a") == ["1", "3", "4", "0", "2"], "numbers, then texts, then none"
    order = RowOrder("loss", reverse=False)
    order.sort_by("loss")
    assert order.reverse
    order.sort_by("a")
    assert not order.reverse


@pytest.mark.slow
def test_table_renders_only_visible_rows() -> None:
    many = [
        make_evaluation(trial, params={"lr": trial / 7}, worker=trial % 64)
        for trial in range(10_000)
    ]
    rendered_rows: set[int] = set()

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await press("2")(app, pilot)
        table = app.query_one("#evaluations Table", Table)
        rows = table._rows

        def cells(row: int) -> Sequence[str | Text]:
            rendered_rows.add(row)
            return rows.cells(row)

        table.show(rows._replace(cells=cells))
        await press("end")(app, pilot)
        assert table.key == "0", "the latest comes first"
        assert re.search(r"^ +0  complete .*\n", read_screen(app), re.MULTILINE)
        await press("pageup", "up", "home", "down")(app, pilot)
        assert table.key == "9998"
        await press("slash", *"9997")(app, pilot)
        assert "1 of 10000 evaluations" in read_screen(app)
        assert table.key == "9997"
        await press("escape")(app, pilot)
        assert "10000 evaluations" in read_screen(app)
        assert app.focused is table

    watch(make_updates(make_snapshot(many, 1e5, manifest_values={"budget": 20_000})), act)
    assert rendered_rows
    assert len(rendered_rows) < 300


def test_table_cursor_stays_on_its_evaluation() -> None:
    before = make_evaluations()
    after = [*before, make_evaluation(14, "running")]

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        table = app.query_one("#evaluations Table", Table)
        await press("2")(app, pilot)
        assert table.key == "13"
        post_update(app, after)
        await settle(app, pilot)
        assert table.key == "14", "a cursor in the first row stays in it"
        await press("down", "down")(app, pilot)
        assert table.key == "12"
        post_update(app, [*after, make_evaluation(15, "running")])
        await settle(app, pilot)
        assert table.key == "12"
        assert read_screen(app).splitlines()[5].split()[0] == "15"

    watch(make_updates(make_snapshot(before)), act)


def post_update(app: WatchApp, evaluations: list[Evaluation], **values: object) -> None:
    """Send a new snapshot of the run to an app."""
    snapshot = make_snapshot(evaluations, 300.0, **values)
    app.post_message(RunUpdated(compute_run_status(snapshot)))


def test_table_click_sorts_or_opens() -> None:
    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await press("2")(app, pilot)
        heading = read_screen(app).splitlines()[4]
        for arrow in "\u25b2\u25bc":
            await pilot.click("#evaluations Table", offset=(heading.index("lr"), 0))
            await settle(app, pilot)
            assert f" lr{arrow}" in read_screen(app)
        assert read_screen(app).splitlines()[5].split()[0] == "0", "the highest lr"
        await pilot.click("#evaluations Table", offset=(10, 2))
        await settle(app, pilot)
        assert "trial 1 of runs/name: complete" in read_screen(app)
        await press("escape")(app, pilot)
        assert "evaluations" in read_screen(app).splitlines()[1]

    watch(make_updates(RUNNING), act)


def test_copy_puts_hyperparameters_on_clipboard() -> None:
    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await press("2", "end", "c")(app, pilot)
        assert json.loads(app.clipboard) == RUNNING.evaluations[0].params
        await wait_for(app, pilot, "copied the hyperparameters of trial 0")
        await press("home", "down", "enter", "c")(app, pilot)
        assert json.loads(app.clipboard) == RUNNING.evaluations[12].params
        await press("escape", "question_mark")(app, pilot)
        await wait_for(app, pilot, "previous tab")
        await press("escape")(app, pilot)
        assert "previous tab" not in read_screen(app)
        await press("question_mark", "question_mark", "4", "3", "slash", "escape", "1")(app, pilot)
        assert "previous tab" not in read_screen(app)
        assert "best loss over time" in read_screen(app)

    watch(make_updates(RUNNING), act)


def test_evaluation_screen_updates_while_running(tmp_path: Path) -> None:
    curve = {1: 0.75}

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        await press("2", "enter")(app, pilot)
        assert "trial 0 of" in read_screen(app)
        assert "loss by epoch" not in read_screen(app), "a plot needs two losses"
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "0.txt").write_text("rank 0 | [red]hello[/red]\x1b[2J\n")
        post_update(app, [make_evaluation(0, "running", curve={**curve, 2: 0.25})])
        await settle(app, pilot)
        text = read_screen(app)
        assert "loss by epoch" in text
        assert "0.25" in text
        assert r"rank 0 | [red]hello[/red]\x1b[2J" in text

    watch(
        make_updates(make_snapshot([make_evaluation(0, "running", curve=curve)])),
        act,
        path=tmp_path,
    )


@pytest.mark.parametrize(
    ("values", "title", "line"),
    [
        (
            {"manifest_values": {"budget": 14}, "is_in_use": False},
            "finished  14/14 evaluations",
            "14 complete",
        ),
        (
            {"is_in_use": False, "last_summary": {"stopped": "a target", "remedy": "a lower one"}},
            "stopped  14/100 evaluations",
            "a target. To resume: the same command with "
            "--run-dir runs/name --resume and a lower one",
        ),
        (
            {"is_in_use": False, "holder": "process 7 on here since 2026"},
            "crashed  14/100 evaluations",
            "process 7 on here has crashed",
        ),
    ],
)
def test_screen_stays_when_run_ends(values: dict[str, object], title: str, line: str) -> None:
    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        assert "searching  12/20 evaluations" in read_screen(app)
        post_update(app, [make_evaluation(trial) for trial in range(14)], **values)
        await settle(app, pilot)
        assert title in read_screen(app)
        assert line in read_screen(app)
        assert app.is_running
        await pilot.press("q")

    assert watch(make_updates(RUNNING), act).return_value is None


def test_app_exits_when_study_cannot_be_read() -> None:
    def updates() -> Updates:
        yield from make_updates(RUNNING)
        raise UsageError("runs/name: gone")

    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        while app.is_running:
            await pilot.pause(0.01)

    assert str(watch(updates(), act).error) == "runs/name: gone"


def make_large_run() -> RunSnapshot:
    evaluations = [
        make_evaluation(
            n,
            ("failed" if n % 7 == 0 else "complete"),
            island=n % 128 // 4,
            worker=n % 128,
            loss=1000.0 / (n + 1),
        )
        for n in range(1000)
    ]
    evaluations += [
        make_evaluation(1000 + n, "running", worker=n, island=n // 4, curve={1: 0.5, 2: 0.25})
        for n in range(120)
    ]
    layout = {"ranks": 128, "ranks_per_worker": 1, "islands": 32}
    return make_snapshot(evaluations, 1300, manifest_values={"budget": 5000, "layout": layout})


FOREIGN = make_snapshot(
    [
        make_evaluation(0, loss=math.inf, ended=math.nan, curve={1: math.nan}),
        make_evaluation(1, "running", started=math.nan, params={}),
    ]
)
HUGE = make_snapshot(
    [make_evaluation(n, loss=n * -1e308, curve={1: 1e308, 2: -1e308}) for n in range(2)],
    is_in_use=False,
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (40, 10), (200, 60)])
def test_app_supports_any_terminal_size(size: tuple[int, int]) -> None:
    async def act(app: WatchApp, pilot: Pilot[int]) -> None:
        for snapshot in (make_snapshot([]), FOREIGN, HUGE, make_large_run()):
            app.post_message(RunUpdated(compute_run_status(snapshot)))
            for tab in ("overview", "failures", "islands", "workers", "evaluations"):
                await app.run_action(f"go('{tab}')")
                await settle(app, pilot)
                app._table._action_move(1_000_000)
                await settle(app, pilot)
        await press("home", "enter", "question_mark")(app, pilot)
        await pilot.resize_terminal(*size[::-1])
        await settle(app, pilot)
        assert len(read_screen(app).splitlines()) == size[0]

    watch(make_updates(RUNNING), act, size)


@pytest.mark.slow
def test_app_escapes_markup_and_control_characters() -> None:
    params = {name: name for name in HOSTILE}
    evaluations = [
        make_evaluation(n, params=params, metrics={name: 0.5}, loss=n)
        for n, name in enumerate(HOSTILE)
    ]
    evaluations += [
        make_evaluation(10 + n, "failed", failure=text, traceback=text)
        for n, text in enumerate(HOSTILE)
    ]
    evaluations += [make_evaluation(20 + n, "running", params=params, worker=n) for n in range(3)]
    snapshot = make_snapshot(evaluations, is_in_use=None, holder="\x1b[31m\nhere")
    for keys in ((), ("2",), ("3",), ("2", "end", "enter"), ("3", "enter")):
        text = press_and_read_screen(
            snapshot, *keys, size=(300, 60), path=Path("runs") / HOSTILE[1]
        )
        assert all(character.isprintable() for character in text.replace("\n", ""))
        assert "[bold]x[/bold]" in text or "enter" in keys
    assert r"a b\x1b[2J\x07" in press_and_read_screen(snapshot, "3")


def test_plot_steps_draws_decreasing_loss() -> None:
    text = plot_steps("loss", [(0, 9.0), (5, 5.0), (9, 1.0)], [], ("0", "9"), (12, 5)).plain
    assert [line.rstrip() for line in text.splitlines()] == [
        "loss",
        "9 \u2809\u2809\u2809\u2809\u2809\u28b9",
        "       \u2838\u2824\u2824\u2824\u28a4",
        "1          \u28b8",
        "  0        9",
    ]
    assert (
        "logarithmic" in plot_steps("loss", [(0, 100.0), (9, 1.0)], [], ("0", "9"), (20, 5)).plain
    )
    assert plot_steps("loss", [(0, math.nan)], [], ("0", "9"), (20, 5)).plain == ""
    diverged = plot_steps(
        "loss", [(0, 1.5e5), (2, 2.0), (9, 0.5)], [1.5e5, 2.0, 1.0, 0.5, 1.2], ("0", "9"), (20, 5)
    )
    assert diverged.plain.splitlines()[1].startswith("  2 "), "far higher losses are excluded"


@pytest.mark.slow
def test_other_commands_do_not_import_textual(tmp_path: Path) -> None:
    record_evaluation(start_session(tmp_path / "run"), 1, losses=2)
    code = (
        "import sys\nfrom hpo.cli import main\n"
        "try: main()\nfinally: assert 'textual' not in sys.modules"
    )
    for arguments in (
        ["--help"],
        ["top", tmp_path / "run"],
        ["watch", tmp_path / "run"],
        ["top", tmp_path / "run", "--failed"],
    ):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        assert (
            subprocess.run(
                command, env=make_environment(), capture_output=True, timeout=scale(60)
            ).returncode
            == 0
        )


def _send(number: signal.Signals) -> Callable[[Terminal, Path], object]:
    return lambda screen, _: screen.process.send_signal(number)


@pytest.mark.parametrize(
    ("leave", "status"),
    [
        (lambda screen, _: screen.press(b"q"), 0),
        (lambda screen, _: screen.press(b"\x03"), 0),
        (_send(signal.SIGTERM), 143),
        (_send(signal.SIGHUP), 129),
        (lambda _, run_dir: shutil.rmtree(run_dir), 2),
    ],
    ids=["q", "ctrl-c", "SIGTERM", "SIGHUP", "gone"],
)
@pytest.mark.slow
def test_terminal_is_restored_after_any_exit(
    tmp_path: Path, leave: Callable[[Terminal, Path], object], status: int
) -> None:
    record_evaluation(start_session(tmp_path / "run"), 1)
    with (
        hold_run_dir(tmp_path / "run") as run,
        run_in_terminal("watch", tmp_path / "run") as screen,
    ):
        screen.wait_for("searching")
        assert screen.takes_keys
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        screen.press(b"x2")
        screen.wait_for("trial")
        assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        leave(screen, tmp_path / "run")
        assert screen.wait_for_end() == status
        assert ("holds no run" if status == 2 else "searching") in screen.left_behind
        assert run.poll() is None


@pytest.mark.slow
def test_screen_can_be_suspended(tmp_path: Path) -> None:
    record_evaluation(start_session(tmp_path / "run"), 1)
    with run_in_terminal("watch", tmp_path / "run") as screen:
        screen.wait_for("stopped")
        screen.press(b"\x1a")
        screen.wait_for("\x1b[?1049l")
        status, until = Path(f"/proc/{screen.process.pid}/stat"), time.monotonic() + 30
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.01)
        screen.process.send_signal(signal.SIGCONT)
        screen.wait_for("stopped")
        assert screen.takes_keys
        screen.press(b"q")
        assert screen.wait_for_end() == 0


@pytest.mark.slow
def test_watch_follows_crashed_run_until_resumed_and_finished(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = start_session(path)
    record_evaluation(session, 1, losses=2)
    with hold_run_dir(path) as first, run_in_terminal("watch", path, NO_COLOR="1") as screen:
        screen.wait_for("1 complete")
        record_evaluation(session, 2)
        screen.wait_for("1 running")
        first.kill()
        screen.wait_for(f"process {first.pid} on")
        with hold_run_dir(path):
            assert session.open_record().requeue_interrupted() == 1
            screen.wait_for("1 waiting")
            for number in range(3, 10):
                record_evaluation(session, number, losses=2)
            set_budget(path, 8)
            screen.wait_for("ending")
        screen.wait_for("finished")
        screen.press(b"q")
        assert screen.wait_for_end() == 0
        assert screen.left_behind.startswith("\x1b[") or "8/8 evaluations" in screen.left_behind
        assert "8/8 evaluations" in screen.left_behind


@pytest.mark.parametrize(
    "variables", [{"TERM": "dumb"}, {"TERM": ""}, {"PYTHONIOENCODING": "latin-1"}]
)
@pytest.mark.slow
def test_watch_in_limited_terminal_prints_lines(tmp_path: Path, variables: dict[str, str]) -> None:
    record_evaluation(start_session(tmp_path / "run"), 1, losses=2)
    with run_in_terminal("watch", tmp_path / "run", **variables) as screen:
        assert screen.wait_for_end() == 0
        assert "stopped" in screen.written
        assert "\x1b[?1049h" not in screen.written
