"""A run while it goes on: on a screen if there is a terminal, or else a line for each evaluation that ends."""

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

from hpo.results.reader import Look, RunReader
from hpo.store.run_dir import RunDir
from hpo.text import printable, show_command
from hpo.views.front import so_far
from hpo.views.live.head import head_lines, progress
from hpo.views.live.standing import Standing, standing
from hpo.views.progress import SECONDS_BETWEEN_ESTIMATES, Lines

_SECONDS_BETWEEN_LOOKS = 1.0
_SHARE = 0.02  # of a core that looking may take: at 10,000 evaluations, it is this which makes looks rarer


def watch(path: Path, storage: str | None = None) -> int:
    """Show a run until the user quits, or as lines until it ends; return the exit status.

    Raises UsageError if the directory holds no run.
    """
    RunDir(path).manifest()  # a mistake is told before the terminal is taken over
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of hyperparameters, in a terminal that cannot show them
    try:
        return _show(path, storage) if _can_show() else _list(path, storage)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the pipe's reader has gone; Python would try to write once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _can_show() -> bool:
    """Tell whether there is a terminal that can be taken over: Textual reads from stdin, and writes to stderr."""
    terminals = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    is_capable = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return terminals and is_capable and sys.stdout.encoding.lower().startswith("utf")


def _looks(path: Path, storage: str | None) -> Iterator[tuple[Look, Standing, float]]:
    """Yield the run as it is, again and again, each time with the seconds to wait before the next.

    How a run stands is the same object as before if it has ended and nothing has changed.
    """
    follower = RunReader(path, storage).follow()
    look = follower.look()
    run, pause = standing(look), _SECONDS_BETWEEN_LOOKS  # the first look alone reads everything
    while True:
        yield look, run, pause
        began = time.thread_time()
        before, look = look, follower.look()
        if run.goes_on or replace(look, at=before.at) != before:
            run = standing(look)
        pause = max(_SECONDS_BETWEEN_LOOKS, (time.thread_time() - began) / _SHARE)


def _show(path: Path, storage: str | None) -> int:
    from hpo.views.live.app import Watch  # Textual takes 0.3 s

    app = Watch(path, _looks(path, storage))
    status = app.run() or 0
    if app.error:
        raise app.error
    if app.standing:
        with suppress(OSError):  # The terminal may be gone.
            _print(head_lines(replace(app.standing, at=time.time()), path))
    return status


def _list(path: Path, storage: str | None) -> int:
    """Print how the run stands, and a line for each evaluation that ends until it does."""
    listing: Listing | None = None
    for look, run, pause in _looks(path, storage):
        if listing is None:
            _print(head_lines(run, path))
            if not run.goes_on:
                return 0
            listing = Listing(look, path)
        _print(Text(printable(line)) for line in listing.lines(look, run))
        if not run.goes_on:
            _print(head_lines(run, path))
            return 0
        time.sleep(pause)
    return 0


class Listing:
    """Writes a line for each evaluation that has ended since the look before, and now and then the time left."""

    def __init__(self, first: Look, path: Path) -> None:
        self._path = path
        self._stages = [Lines(past, 0, first.manifest.objectives) for past in (first.evaluations, first.confirmations)]
        self._headed: set[Lines] = set()
        self._estimated = time.monotonic()

    def lines(self, look: Look, run: Standing) -> Iterator[str]:
        """Yield the lines; the search and its confirmation each have a heading."""
        budgets = look.manifest.budget, len(look.confirmations)
        for stage, evaluations, budget in zip(
            self._stages, (look.evaluations, look.confirmations), budgets, strict=True
        ):
            stage.budget = budget
            for one in stage.take(evaluations):
                if stage not in self._headed:
                    self._headed.add(stage)
                    yield stage.heading
                yield stage.line(one) + (f"  ({show_command(self._path, one.label)})" * (one.state == "failed"))
        if time.monotonic() - self._estimated > SECONDS_BETWEEN_ESTIMATES and run.done < run.total:
            self._estimated = time.monotonic()
            yield f"-- {so_far(run.best, len(run.front))}{progress(run)}"


def _print(lines: Iterable[Text]) -> None:
    """Print lines, in colour if a terminal can show it."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for line in lines:
        console.print(line)
