"""Watch a run: on a screen if there is a terminal, otherwise with a line per ended evaluation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hpo.results.reader import RunReader
from hpo.results.run_snapshot import RunSnapshot
from hpo.store.run_dir import RunDir
from hpo.text_format import make_printable, make_show_command
from hpo.views.live.run_status import (
    RunStatus,
    compute_run_status,
    format_header,
    format_progress,
)
from hpo.views.progress import SECONDS_BETWEEN_ESTIMATES, ProgressLines, format_best_so_far

_MIN_POLL_SECONDS = 1.0
# Of a core, used for reading; with 10,000 evaluations, this makes updates less frequent.
_MAX_CPU_SHARE = 0.02


def watch_run(path: Path, storage: str | None = None) -> int:
    """Show a run until the user quits, or print lines until it ends; return the exit status."""
    # Errors are raised before the screen replaces the terminal's content.
    RunDir(path).read_manifest()
    if isinstance(sys.stdout, TextIOWrapper):
        # The terminal may not support characters of hyperparameters.
        sys.stdout.reconfigure(errors="replace")
    try:
        show = _show_screen if _has_capable_terminal() else _print_listing
        return show(path, storage)
    except KeyboardInterrupt:
        return 0
    # The reader has closed the pipe. At its exit, Python would try to write again.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _has_capable_terminal() -> bool:
    """Return whether Textual can use the terminal: it reads from stdin and writes to stderr."""
    terminals = all(
        stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )
    is_capable = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return terminals and is_capable and sys.stdout.encoding.lower().startswith("utf")


def _read_updates(path: Path, storage: str | None) -> Iterator[tuple[RunStatus, float]]:
    """Yield the status of a run without end, each with the seconds to wait after it.

    If the run is not active and its data have not changed, the previous status object is yielded.
    """
    reader = RunReader(path, storage)
    # Only the first snapshot reads everything.
    run = compute_run_status(reader.take_snapshot())
    pause = _MIN_POLL_SECONDS
    while True:
        yield run, pause
        began = time.thread_time()
        before = run.snapshot
        snapshot = reader.take_snapshot()
        if run.may_be_running or replace(snapshot, taken_at=before.taken_at) != before:
            run = compute_run_status(snapshot)
        pause = max(_MIN_POLL_SECONDS, (time.thread_time() - began) / _MAX_CPU_SHARE)


def _show_screen(path: Path, storage: str | None) -> int:
    from hpo.views.live.app import WatchApp  # The import of Textual takes 0.3 s.

    app = WatchApp(path, _read_updates(path, storage))
    status = app.run() or 0
    if app.error:
        raise app.error
    if app.run_status:
        with suppress(OSError):  # The terminal may be gone.
            _print_lines(format_header(replace(app.run_status, at=time.time()), path))
    return status


def _print_listing(path: Path, storage: str | None) -> int:
    """Print the status of the run, then a line per ended evaluation until the run ends."""
    listing: RunListing | None = None
    for run, pause in _read_updates(path, storage):
        if listing is None:
            _print_lines(format_header(run, path))
            if not run.may_be_running:
                return 0
            listing = RunListing(run.snapshot, path)
        _print_lines(Text(make_printable(line)) for line in listing.format_lines(run))
        if not run.may_be_running:
            _print_lines(format_header(run, path))
            return 0
        time.sleep(pause)
    return 0


class RunListing:
    """Formats a line for each evaluation that ends, and every 30 seconds the remaining time."""

    def __init__(self, first_snapshot: RunSnapshot, path: Path) -> None:
        self._path = path
        self._stages = [
            ProgressLines(past, 0, first_snapshot.manifest.objectives)
            for past in (first_snapshot.evaluations, first_snapshot.confirmations)
        ]
        self._stages_with_heading: set[ProgressLines] = set()
        self._estimated_at = time.monotonic()

    def format_lines(self, run: RunStatus) -> Iterator[str]:
        """Yield a line for each evaluation that has ended since the previous call.

        A line of headings precedes the first evaluation of the search, and the first confirmation.
        """
        snapshot = run.snapshot
        budgets = snapshot.manifest.budget, len(snapshot.confirmations)
        for stage, evaluations, budget in zip(
            self._stages, (snapshot.evaluations, snapshot.confirmations), budgets, strict=True
        ):
            stage.budget = budget
            for evaluation in stage.take_ended(evaluations):
                if stage not in self._stages_with_heading:
                    self._stages_with_heading.add(stage)
                    yield stage.heading
                line = stage.format_line(evaluation)
                if evaluation.state == "failed":
                    line += f"  ({make_show_command(self._path, evaluation.label)})"
                yield line
        if (
            time.monotonic() - self._estimated_at > SECONDS_BETWEEN_ESTIMATES
            and run.done < run.total
        ):
            self._estimated_at = time.monotonic()
            yield f"-- {format_best_so_far(run.best, len(run.front))}{format_progress(run)}"


def _print_lines(lines: Iterable[Text]) -> None:
    """Print lines, in colour if the terminal supports it."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        console.print(line)
