"""A run in a terminal of any size: as much of it as there are lines for, and how much more there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from hpo.results.summary import reason_of
from hpo.store.evaluations import Evaluation
from hpo.text import clock, number, show_command, tenths
from hpo.views.live.columns import Columns
from hpo.views.live.head import STYLES, Head
from hpo.views.live.lines import GAP, Pen
from hpo.views.live.plot import Steps
from hpo.views.live.standing import Island, Standing
from hpo.views.rungs import rung_columns

_OF_RUNNING = ("worker", "island", "trial", "epochs", "loss", "for")
_OF_ENDED = ("trial", "worker", "loss", "seconds", "ago")
_HEIGHT_WITH_GAPS = 20
_PLOT_ROWS = 8
_PLOT_WIDTH = 24
_ISLANDS_WIDTH = 37


class View:
    """Draws the run in a directory."""

    def __init__(self, path: Path, pen: Pen, braille: bool) -> None:
        self._path = path
        self._pen = pen
        self._braille = braille

    def draw(self, run: Standing, height: int, footer: str = "") -> list[Text]:
        """Return the lines, `height` at most; the footer is on the last one of them."""
        head = self.head(run)
        drawers: list[tuple[int, Callable[[int], list[Text]]]] = [
            (self._rows_of_islands(run), lambda rows: self._middle(run, rows)),
            (len(run.rungs), lambda rows: self._rungs(run, rows)),
            (len(run.running) + len(run.idle), lambda rows: self._workers(run, rows)),
            (len(run.latest) + any(map(_has_failed, run.latest)), lambda rows: self._latest(run, rows)),
        ]
        sections = [(rows, draw) for rows, draw in drawers if rows]
        gap = [self._pen.text("")] if height >= _HEIGHT_WITH_GAPS else []
        room = height - len(head) - bool(footer) - len(gap) * len(sections)
        lines = head
        for share, (_, draw) in zip(shares([rows + 1 for rows, _ in sections], room), sections, strict=True):
            if share > 1:
                lines += [*gap, *draw(share - 1)]
        lines = lines[: height - bool(footer)]
        if footer:
            lines += [self._pen.text("") for _ in range(height - 1 - len(lines))] + [self._pen.text(footer, "dim")]
        return [self._pen.cut(line) for line in lines]

    def head(self, run: Standing) -> list[Text]:
        """Return the first lines: how far it is, and what is best."""
        return [self._pen.cut(line) for line in Head(self._path, self._pen).lines(run)]

    def _rows_of_islands(self, run: Standing) -> int:
        return max(len(run.islands), _PLOT_ROWS if self._has_plot(run) else 0)

    def _has_plot(self, run: Standing) -> bool:
        return bool(run.improvements) and self._pen.width >= _ISLANDS_WIDTH + _PLOT_WIDTH

    def _middle(self, run: Standing, rows: int) -> list[Text]:
        """Return the plot and the islands side by side where there is room for both, else the islands."""
        islands = self._islands(run.islands, rows)
        width = self._pen.width - max([_ISLANDS_WIDTH, *(line.cell_len for line in islands)])
        if not self._has_plot(run) or rows < 3 or width < _PLOT_WIDTH:
            return islands
        pairs = itertools.zip_longest(self._plot(run, width - 3, min(rows, _PLOT_ROWS)), islands, fillvalue=Text())
        return [Text.assemble(self._pen.cut(left, width, fill=True), right) for left, right in pairs]

    def _plot(self, run: Standing, width: int, rows: int) -> list[Text]:
        steps = Steps(run.improvements, run.worked, run.losses)
        labels = steps.labels(rows - 1)
        left = max(map(len, labels))
        lines = [self._pen.text(f"best loss over time{', logarithmic' if steps.scale.logarithmic else ''}", "bold")]
        for label, line in zip(labels, steps.draw(width - left - 1, rows - 1, self._braille), strict=True):
            lines.append(Text.assemble(f"{label:>{left}} ", (line, "green")))
        lines.append(self._pen.text(f"{'':{left}} 0:00{clock(run.worked):>{max(0, width - left - 5)}}"))
        return lines

    def _islands(self, islands: Sequence[Island], rows: int) -> list[Text]:
        """Return a table of islands; where there is no room for all, of the best, with one row for the others."""
        shown, rest = list(islands), []
        if len(islands) > rows:
            ranked = sorted(islands, key=lambda island: _loss(island.best))
            shown, rest = ranked[: rows - 1], ranked[rows - 1 :]
        table = [_island_row(str(island.index), [island]) for island in shown]
        if rest:
            table.append(_island_row(f"+{len(rest)}", rest))
        return self._pen.table(("island", "population", "best", "failed"), table)

    def _rungs(self, run: Standing, rows: int) -> list[Text]:
        columns = rung_columns(sorted(run.rungs, key=lambda rung: rung["epochs"])[-rows:])
        return self._pen.table(
            [heading for heading, _ in columns], list(zip(*(cells for _, cells in columns), strict=True))
        )

    def _workers(self, run: Standing, rows: int) -> list[Text]:
        """Return a table of workers; where there is no room for all, of those that evaluate for longest."""
        running, idle, more = list(run.running), list(run.idle), None
        if len(running) + len(idle) > rows:
            running, rest = running[: rows - 1], running[rows - 1 :]
            busy, helping = f"{len(rest)} {'evaluating' if run.goes_on else 'not ended'}", len(run.helping)
            busy += f", {helping} helping" if helping else ""
            more = f"+{len(rest) + len(idle)} workers: {busy}, {len(idle) - helping} idle"
            idle = []
        shown: list[Evaluation | int] = [*running, *idle]
        if not more:
            shown.sort(key=lambda one: one if isinstance(one, int) else one.worker)
        fixed = self._pen.table(_OF_RUNNING, [_worker_row(one, run) for one in shown])
        idling = {worker: run.helping.get(worker, "idle") for worker in idle}
        what = [idling[one] if isinstance(one, int) else self._said_of(one) or one.params for one in shown]
        lines = self._beside(fixed, what, _OF_RUNNING)
        return lines + ([self._pen.text(more)] if more else [])

    def _latest(self, run: Standing, rows: int) -> list[Text]:
        """Return a table of what has ended and, where there is a line for it, how to see more of the last failure."""
        shown = run.latest[: rows - 1]
        failed = next(filter(_has_failed, shown), None)
        if failed is None:
            return self._list(run, run.latest[:rows])
        more = "the traceback" if failed.traceback else "more of it"
        return [
            *self._list(run, shown),
            self._pen.text(f"{show_command(self._path, failed.label)} shows {more}", "dim"),
        ]

    def _list(self, run: Standing, shown: Sequence[Evaluation]) -> list[Text]:
        fixed = self._pen.table(
            _OF_ENDED,
            [
                (
                    one.label,
                    str(one.worker),
                    number(one.loss)
                    if one.state == "complete"
                    else self._pen.text(one.state, STYLES.get(one.state, "")),
                    tenths(one.seconds),
                    clock(run.at - one.ended),
                )
                for one in shown
            ],
        )
        return self._beside(fixed, [reason_of(one) or self._said_of(one) or one.params for one in shown], _OF_ENDED)

    def _said_of(self, one: Evaluation) -> str:
        return "" if one.confirms is None else f"confirms trial {one.confirms} with seed {one.seed}"

    def _beside(
        self, fixed: Sequence[Text], what: Sequence[str | Mapping[str, Any]], headings: Sequence[str]
    ) -> list[Text]:
        """Return lines with hyperparameters in columns, or a text, beside them; the first line is for the headings."""
        room = max(0, self._pen.width - fixed[0].cell_len - GAP)
        columns = Columns(self._pen, [one for one in what if not isinstance(one, str)], room, headings)
        rest = [self._pen.text(one) if isinstance(one, str) else columns.row(one) for one in what]
        return [
            Text(" " * GAP).join([left, right]) for left, right in zip(fixed, [columns.heading, *rest], strict=True)
        ]


def shares(wants: Sequence[int], room: int) -> list[int]:
    """Return how many of `room` lines each section gets: they are shared evenly, but none gets more than it wants."""
    given = [0] * len(wants)
    while room > 0 and given != list(wants):
        for place, want in enumerate(wants):
            if given[place] < want and room > 0:
                given[place] += 1
                room -= 1
    return given


def _island_row(name: str, islands: Sequence[Island]) -> tuple[str, ...]:
    best = min((_loss(island.best) for island in islands), default=float("inf"))
    population, failed = (sum(getattr(island, what) for island in islands) for what in ("population", "failed"))
    return name, str(population), "" if best == float("inf") else number(best), str(failed)


def _worker_row(one: Evaluation | int, run: Standing) -> tuple[str, ...]:
    """Return what a worker does, or did when the run ended: an evaluation, or nothing."""
    if isinstance(one, int):
        return str(one), "", "", "", "", ""
    return (
        str(one.worker),
        str(one.island),
        one.label,
        str(len(one.curve)),
        number(min(one.curve.values())) if one.curve else "",
        clock(run.at - one.started) if run.goes_on else "",
    )


def _has_failed(evaluation: Evaluation) -> bool:
    return evaluation.state == "failed"


def _loss(best: Evaluation | None) -> float:
    return float("inf") if best is None else best.loss
