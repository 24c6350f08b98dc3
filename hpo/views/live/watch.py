"""A run while it goes on: in a terminal the view of all of it, and elsewhere a line for each evaluation that ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hpo.results.reader import Look, RunReader
from hpo.views.live.lines import Pen
from hpo.views.live.listing import Listing
from hpo.views.live.standing import Standing, standing
from hpo.views.live.terminal import Left, Terminal
from hpo.views.live.view import View

_SECONDS_BETWEEN_LOOKS = 1.0
_SHARE = 0.02  # of a core that looking may take: at 10,000 evaluations, it is this which makes looks rarer
_HEIGHT = 24  # where there is no terminal


def watch(path: Path, storage: str | None = None) -> int:
    """Show a run until it ends, or a person leaves; return the exit status. Raises UsageError where there is no run."""
    try:
        return _Watch(path, storage).run()
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the pipe's reader has gone; Python would try to write once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Watch:
    def __init__(self, path: Path, storage: str | None) -> None:
        self._path = path
        self._console = Console(highlight=False, markup=False, emoji=False)
        self._follower = RunReader(path, storage).follow()
        self._pause = 0.0

    def run(self) -> int:
        """Print a run that does not go on, or follow one that does; return the exit status."""
        look, run = self._look()
        self._pause = _SECONDS_BETWEEN_LOOKS  # not from the first look, which alone reads everything
        if run.goes_on and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
            return self._show(run)
        if run.goes_on:
            run = self._list(look, run)
        self._print(self._all(run))
        return 0

    def _look(self) -> tuple[Look, Standing]:
        """Return the run as it is now, and how it stands; set the pause until the next look."""
        began = time.process_time()
        look = self._follower.look()
        run = standing(look)
        self._pause = max(_SECONDS_BETWEEN_LOOKS, (time.process_time() - began) / _SHARE)
        return look, run

    def _show(self, run: Standing) -> int:
        """Keep the view on the whole screen until the run ends; one that has died may be resumed, and is watched on."""
        try:
            with Terminal(self._console) as terminal:
                while not run.over:
                    until = time.monotonic() + self._pause
                    while time.monotonic() < until:
                        footer = "q leaves; the run goes on" if run.goes_on else "q leaves, or wait for --resume"
                        now = replace(run, at=time.time())
                        terminal.show(self._view().draw(now, self._console.height, footer))
                        terminal.wait(min(until - time.monotonic(), _SECONDS_BETWEEN_LOOKS))
                    _, run = self._look()
        except Left as left:
            return left.status
        self._print(self._all(run))
        return 0

    def _list(self, look: Look, run: Standing) -> Standing:
        """Print a line for each evaluation that ends, until the run does, and return how it stands then."""
        self._print(self._view().head(run))
        listing = Listing(look, self._pen(), self._path)
        while run.goes_on:
            time.sleep(self._pause)
            look, run = self._look()
            listing.tell(look, run)
        return run

    def _print(self, lines: Sequence[Text]) -> None:
        """Print lines that stay."""
        for line in lines:
            line.rstrip()
            self._console.print(line, no_wrap=True, crop=False)

    def _all(self, run: Standing) -> list[Text]:
        return self._view().draw(run, self._console.height - 2 if sys.stdout.isatty() else _HEIGHT)

    def _view(self) -> View:
        options = self._console.options
        braille = not options.ascii_only and os.environ.get("TERM") != "linux"  # the font of Linux's console has none
        return View(self._path, self._pen(), braille)

    def _pen(self) -> Pen:
        return Pen(self._console.width, self._console.encoding)
