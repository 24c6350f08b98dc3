"""Summarize a run in a few lines: progress, pace, best result, and how to resume it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from hpo.results.display_names import merge_params_and_metrics
from hpo.results.reader import EXHAUSTED_REASON
from hpo.store.evaluations import Evaluation
from hpo.text_format import (
    cut_text,
    format_clock,
    format_duration,
    format_named_values,
    format_number,
    make_printable,
    make_show_command,
)
from hpo.views.front_text import format_ranges
from hpo.views.individual_table import MAX_HYPERPARAMETERS
from hpo.views.live.run_status import RunStatus

_PHASE_TITLES = {
    "searching": ("searching", "bold"),
    "confirming": ("confirming the best", "bold"),
    "ending": ("ending", "bold"),
    "finished": ("finished", "bold green"),
    "stopped": ("stopped", "bold yellow"),
    "crashed": ("crashed", "bold red"),
    "unknown": ("running or not?", "bold yellow"),
}
_MAX_LINE_LENGTH = 500  # characters
_STATES = (
    "complete",
    "pruned",
    "paused",
    "failed",
    "running",
    "waiting",
    "imported",
    "promoted",
    "interrupted",
)
_STATE_NAMES = {"promoted": "promoted and continued", "interrupted": "interrupted and retried"}
TEXT_STYLES = {"failed": "red", "pruned": "yellow", "paused": "yellow"}


def format_header(run: RunStatus, path: Path) -> list[Text]:
    """Return the lines of the header. The first line has the phase and the progress of the run."""
    title = Text.assemble(
        _PHASE_TITLES[run.phase], f"  {format_progress(run)}  {make_printable(str(path))}"
    )
    return [
        title,
        *(Text(make_printable(line), _PHASE_TITLES[run.phase][1]) for line in _explain(run, path)),
        *_format_results(run, path),
    ]


def _format_results(run: RunStatus, path: Path) -> Iterator[Text]:
    counts = {
        _STATE_NAMES.get(state, state): (run.counts.get(state, 0), TEXT_STYLES.get(state, ""))
        for state in _STATES
    }
    if not run.may_be_running:
        counts["not ended"] = counts.pop("running")
    texts = [Text(f"{count} {name}", style) for name, (count, style) in counts.items() if count]
    yield Text(", ").join(texts) if texts else Text("no evaluation has begun")
    if run.best is None:
        yield Text("no evaluation is complete")
        return
    yield _describe_best(run, run.best)
    params, metrics = run.best.params, run.best.metrics
    if len(params) > MAX_HYPERPARAMETERS:
        yield Text(cut_text(format_named_values(metrics), _MAX_LINE_LENGTH))
        yield Text(
            f"{make_show_command(path, run.best.label)} shows all {len(params)} hyperparameters",
            "dim",
        )
    else:
        yield Text(
            cut_text(
                format_named_values(merge_params_and_metrics(params, metrics, ("loss", "trial"))),
                _MAX_LINE_LENGTH,
            )
        )
    if run.front:
        yield Text(make_printable(format_ranges(run.front, run.objectives)))
    first = next(iter(run.confirmed), None)
    if first is not None and first.mean is not None:
        mean, seeds = format_number(first.mean), len(first.losses)
        yield Text(
            f"confirmed: trial {first.trial} is first, mean loss {mean} of {seeds} other seeds"
        )


def _describe_best(run: RunStatus, best: Evaluation) -> Text:
    found = f"found {format_clock(run.at - best.ended)} ago on island {best.island} by worker {best.worker}"
    if best.imported_from:
        found = cut_text(make_printable(f"imported from {best.imported_from}"), _MAX_LINE_LENGTH)
    name = f"front {len(run.front)}  lowest loss" if run.front else "best"
    return Text.assemble(
        (f"{name} {format_number(best.loss)}", "bold green"), f"  trial {best.trial}, {found}"
    )


def format_progress(run: RunStatus) -> str:
    """Return a text with the number of ended evaluations, and if known the pace and the remaining time."""
    text = (
        f"{run.done}/{run.total} {'confirmations' if run.phase == 'confirming' else 'evaluations'}"
    )
    if run.pace.per_minute is not None:
        rate = run.pace.per_minute
        text += f", {rate:.0f} a minute" if rate >= 10 else f", {rate:.2g} a minute"
    if run.pace.seconds_left is not None and run.done < run.total:
        left = (
            format_duration(run.pace.seconds_left)
            if run.pace.seconds_left >= 60
            else f"{run.pace.seconds_left:.0f} s"
        )
        text += f", about {left} left{', then --confirm-seeds' if run.to_confirm else ''}"
    return text


def _explain(run: RunStatus, path: Path) -> list[str]:
    """Return lines that explain the phase, such as why a run has stopped and how to resume it; empty if not needed."""
    resume = f"To resume: the same command with --run-dir {shlex.quote(str(path))} --resume"
    if run.phase == "stopped" and run.reason != EXHAUSTED_REASON:
        remedy = f" and {run.remedy}" if run.remedy else ""
        return [f"{run.reason or 'the run is not active'}. {resume}{remedy}"]
    if run.phase == "crashed":
        return [f"the run is not active: {run.reason} has crashed. {resume}"]
    return [run.reason] if run.reason else []
