"""Define the screen of one evaluation: a plot of its losses, and the text of `hpo show`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.events import Mount
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static

from hpo.store.evaluations import Evaluation
from hpo.views.evaluation_lookup import EvaluationLookup
from hpo.views.evaluation_text import format_evaluation
from hpo.views.live.plot import Plot


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
        """Show the current state of an evaluation. Call this again when the evaluation has changed."""
        self._lookup, self.evaluation = lookup, evaluation
        curve = sorted(evaluation.curve.items())
        first, last = (curve[0][0], curve[-1][0]) if curve else (0, 0)
        points = [(float(step - first), loss) for step, loss in curve]
        self.query_one(Plot).plot("loss by epoch", points, [], (str(first), str(last)))
        self.run_worker(self._read_details, thread=True, exclusive=True)

    def _read_details(self) -> None:
        """Collect the details of the evaluation. Textual calls it in a thread, because reading the log may be slow."""
        details = self._lookup.collect_details(self.evaluation)
        self.post_message(
            self.DetailsRead(format_evaluation(details, self._lookup.run_dir.path, "", time.time()))
        )

    @on(DetailsRead)
    def _show_details(self, event: DetailsRead) -> None:
        self.query_one("#title", Static).update(Text(event.lines[0], "bold"))
        self.query_one("#text", Static).update(Text("\n".join(event.lines[1:])))
