"""Define the screens of `hpo watch`: tabs with the run's status, and one evaluation.

Evaluations can be sorted and filtered.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.events import Mount
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, HelpPanel, Input, Static, TabbedContent, TabPane, Tabs

from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import select_top
from hpo.store.run_dir import RunDir
from hpo.text_format import format_clock, format_count, make_printable
from hpo.views.evaluation_details import EvaluationLookup, format_evaluation
from hpo.views.live.run_status import RunStatus, format_header
from hpo.views.live.table_rows import (
    RowOrder,
    TableRows,
    make_columns,
    make_failure_rows,
    make_island_rows,
    make_rung_rows,
    make_worker_rows,
)
from hpo.views.live.widgets import Plot, Table

_TABS = ("overview", "evaluations", "failures", "rungs", "islands", "workers")
_QUIT_TOOLTIP = "the run continues"
_MAX_BEST = 10  # individuals in the overview of an ended run


class EvaluationScreen(Screen[None]):
    """Screen with all facts about one evaluation."""

    BINDINGS: ClassVar[list[Any]] = [Binding("escape", "app.pop_screen", "close")]
    CSS = "EvaluationScreen Static { padding: 0 1; }"

    @dataclass
    class DetailsRead(Message):
        """Message to the screen with all facts about the evaluation, as lines of text."""

        lines: list[str]

    def __init__(self, lookup: EvaluationLookup, evaluation: Evaluation) -> None:
        super().__init__()
        self.evaluation = evaluation
        self._lookup = lookup

    def compose(self) -> ComposeResult:
        """Create the plot and the text."""
        yield Static(id="title")
        yield Plot()
        with VerticalScroll():
            yield Static(id="text")
        yield Footer()

    @on(Mount)
    def _show_initial(self) -> None:
        self.show(self._lookup, self.evaluation)

    def show(self, lookup: EvaluationLookup, evaluation: Evaluation) -> None:
        """Show the current state of an evaluation."""
        self._lookup = lookup
        self.evaluation = evaluation
        curve = sorted(evaluation.curve.items())
        first, last = (curve[0][0], curve[-1][0]) if curve else (0, 0)
        points = [(float(step - first), loss) for step, loss in curve]
        self.query_one(Plot).plot("loss by epoch", points, [], (str(first), str(last)))
        self.run_worker(self._read_details, thread=True, exclusive=True)

    def _read_details(self) -> None:
        """Collect the details, in a thread of Textual, because reading the log may be slow."""
        details = self._lookup.collect_details(self.evaluation)
        lines = format_evaluation(details, self._lookup.run_dir.path, "", time.time())
        self.post_message(self.DetailsRead(lines))

    @on(DetailsRead)
    def _show_details(self, event: DetailsRead) -> None:
        self.query_one("#title", Static).update(Text(event.lines[0], "bold"))
        self.query_one("#text", Static).update(Text("\n".join(event.lines[1:])))


@dataclass
class RunUpdated(Message):
    """Message to the app with the new status of the run."""

    status: RunStatus


class WatchApp(App[int]):
    """Terminal app, made with Textual, that shows a run and follows its changes.

    Attributes:
        run_status: The latest status; None before the first update.
        error: The exception that stopped the updates, if there is one.
    """

    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012 - Textual declares it like this.
    CSS = """
    #title { height: 1; text-wrap: nowrap; text-overflow: ellipsis; padding: 0 1; }
    #head { height: auto; padding: 0 1; }
    TabbedContent, TabPane { height: 1fr; padding: 0; }
    .-low Plot { display: none; }
    #overview Table { margin-top: 1; }
    Horizontal { height: 1; }
    Horizontal Input { width: 1fr; }
    #count { width: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[Any]] = [
        *(
            Binding(str(number), f"go('{name}')", name, show=False)
            for number, name in enumerate(_TABS, 1)
        ),
        Binding("tab", "go_by(1)", "next tab", priority=True),
        Binding("shift+tab", "go_by(-1)", "previous tab", show=False, priority=True),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort_by(1)", "sort"),
        Binding("S", "sort_by(-1)", "sort by the column before", show=False),
        Binding("r", "sort_by(0)", "reverse"),
        Binding("c", "copy", "copy"),
        Binding("escape", "clear", "close the keys, or clear the filter", show=False),
        Binding("question_mark", "help", "keys"),
        Binding("q", "quit", "quit"),
        *(
            Binding(key, "quit", "quit", show=False, priority=True, tooltip=_QUIT_TOOLTIP)
            for key in ("ctrl+c", "ctrl+q")
        ),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    def __init__(self, path: Path, updates: Iterator[tuple[RunStatus, float]]) -> None:
        super().__init__()
        self.animation_level = "none"  # Animations cost time, and more over SSH.
        self.run_status: RunStatus | None = None
        self.error: Exception | None = None
        self._path = path
        self._updates = updates
        self._row_order = RowOrder()
        self._headings: list[str] = []

    def compose(self) -> ComposeResult:
        """Create the tabs."""
        yield Static(make_printable(f"reading {self._path}"), id="title", markup=False)
        with TabbedContent():
            for name in _TABS:
                with TabPane(name, id=name):
                    if name == "overview":
                        yield Static(id="head")
                        yield Plot()
                    if name == "evaluations":
                        with Horizontal():
                            yield Input(
                                placeholder="/ filters: failed, 17, lr=0.1, relu, ValueError",
                                compact=True,
                            )
                            yield Static(id="count")
                    yield Table()
        yield Footer()

    @on(Mount)
    def _start_following(self) -> None:
        self.query_one(Tabs).can_focus = False
        # A worker of Textual would delay the exit of the app, since reading 10,000 evaluations
        # takes seconds.
        self.call_after_refresh(threading.Thread(target=self._follow_updates, daemon=True).start)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if not self.is_headless:
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit, 128 + number)

    def _follow_updates(self) -> None:
        try:
            for run, pause in self._updates:
                if not self.post_message(RunUpdated(run)):
                    return
                time.sleep(pause)
        except Exception as error:
            self.error = error
            self.call_later(self.exit)

    @on(RunUpdated)
    def _show_update(self, message: RunUpdated) -> None:
        if message.status is self.run_status:
            return
        self.run_status = message.status
        self._show_active_tab()
        if isinstance(self.screen, EvaluationScreen) and not self.screen.evaluation.has_ended:
            self.screen.show(*self._find_evaluation(self.screen.evaluation.label))

    def _show_active_tab(self, from_first: bool = False) -> None:
        """Update the content of the active tab. If `from_first`, scroll to its first row."""
        if self.run_status is None:
            return
        run = replace(self.run_status, at=time.time())
        tab = self._tabs.active
        title, *head = format_header(run, self._path)
        main = self.screen_stack[0]
        main.query_one("#title", Static).update(title)
        (self._tabs.show_tab if run.rungs else self._tabs.hide_tab)("rungs")
        if tab == "overview":
            main.query_one("#head", Static).update(Text("\n").join(head))
            until_now = [(run.working_seconds, loss) for _, loss in run.improvements[-1:]]
            points = [*run.improvements, *until_now]
            ends = ("0:00", format_clock(run.working_seconds))
            main.query_one(Plot).plot("best loss over time", points, run.losses, ends)
        self._table.show(self._make_rows(tab, run), from_first)

    def _make_rows(self, tab: str, run: RunStatus) -> TableRows:
        evaluations = [*run.snapshot.evaluations, *run.snapshot.confirmations]
        if tab == "overview" and (run.running or run.idle_workers):
            return make_worker_rows(run)
        if tab == "failures":
            return make_failure_rows(evaluations)
        if tab == "rungs":
            return make_rung_rows(run)
        if tab == "islands":
            return make_island_rows(run)
        if tab == "workers":
            return make_worker_rows(run, evaluations)
        objectives = run.snapshot.manifest.objectives
        order = self._row_order
        if tab == "overview":
            evaluations = select_top(run.snapshot.evaluations, _MAX_BEST, objectives)
            order = RowOrder("loss", reverse=False)
        columns = make_columns(evaluations, objectives, run.at)
        self._headings = [column.heading for column in columns]
        rows = order.make_rows(evaluations, columns)
        some = f"{len(rows.keys)} of " if order.filter_words else ""
        count = f"{some}{format_count(len(evaluations), 'evaluation')}"
        self.screen_stack[0].query_one("#count", Static).update(count)
        return rows

    @property
    def _tabs(self) -> TabbedContent:
        return self.screen_stack[0].query_one(TabbedContent)

    @property
    def _table(self) -> Table:
        return self._tabs.query_one(f"#{self._tabs.active} Table", Table)

    @on(TabbedContent.TabActivated)
    def _activate_tab(self) -> None:
        self._show_active_tab()
        self._table.focus()
        self.refresh_bindings()

    @on(Table.Opened)
    def _open_evaluation(self, event: Table.Opened) -> None:
        self.push_screen(EvaluationScreen(*self._find_evaluation(event.key)))

    def _find_evaluation(self, label: str) -> tuple[EvaluationLookup, Evaluation]:
        assert self.run_status
        lookup = EvaluationLookup(RunDir(self._path), self.run_status.snapshot)
        return lookup, lookup.find_evaluation(label)

    @on(Table.Sorted)
    def _sort_rows(self, event: Table.Sorted) -> None:
        if self._tabs.active == "evaluations":
            self._row_order.sort_by(self._headings[event.column])
            self._show_active_tab(from_first=True)

    @on(Input.Changed)
    def _filter_rows(self, event: Input.Changed) -> None:
        self._row_order.filter_words = event.value
        self._show_active_tab(from_first=True)

    @on(Input.Submitted)
    def _leave_filter(self) -> None:
        self._table.focus()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002
        """Return whether an action is available on the current screen. Textual calls it."""
        if isinstance(self.screen, EvaluationScreen):
            return action not in ("go", "go_by", "filter", "clear", "sort_by")
        return action != "sort_by" or self._tabs.active == "evaluations"

    def _action_go(self, tab: str) -> None:
        if self._tabs.get_tab(tab).display:
            self._tabs.active = tab

    def _action_go_by(self, step: int) -> None:
        visible = [name for name in _TABS if self._tabs.get_tab(name).display]
        self._tabs.active = visible[(visible.index(self._tabs.active) + step) % len(visible)]

    def _action_filter(self) -> None:
        self._tabs.active = "evaluations"
        self.call_after_refresh(self.query_one(Input).focus)

    def _action_clear(self) -> None:
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
            return
        self.query_one(Input).clear()
        self._table.focus()

    def _action_sort_by(self, step: int) -> None:
        if self._row_order.heading in self._headings:
            index = self._headings.index(self._row_order.heading) + step
            self._row_order.sort_by(self._headings[index % len(self._headings)])
            self._show_active_tab(from_first=True)

    def _action_copy(self) -> None:
        opened = self._table.key
        if isinstance(self.screen, EvaluationScreen):
            opened = self.screen.evaluation.label
        if opened:
            _, evaluation = self._find_evaluation(opened)
            self.copy_to_clipboard(json.dumps(evaluation.params, indent=2))
            self.notify(f"copied the hyperparameters of trial {opened}")

    def _action_help(self) -> None:
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()
