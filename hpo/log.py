"""What objectives have printed, kept as a file for each evaluation that has printed anything."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hpo.failure import showable
from hpo.printed import plain

_MOST_KEPT = 1 << 20  # bytes of an evaluation


class Log:
    """Writes what is printed in evaluations to the files that `path_of` gives for their trials; on a leader."""

    def __init__(self, path_of: Callable[[int], Path]) -> None:
        self._path_of = path_of
        self._written: Counter[int] = Counter()
        self._failed = False

    def add(self, trial: int, text: str) -> None:
        """Add lines to what is kept of an evaluation, as far as there is room; the search goes on without them."""
        if not text or self._written[trial] > _MOST_KEPT or self._failed:
            return
        content = showable(text).encode()
        self._written[trial] += len(content)
        if self._written[trial] > _MOST_KEPT:
            content += f"(what it printed from here on is not kept: {_MOST_KEPT} bytes are the most)\n".encode()
        path = self._path_of(trial)
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(content)
        except OSError as error:
            self._failed = True
            text = f"warning: what objectives print is not kept: {path}: {error.strerror}"
            print(text, file=plain(sys.stderr), flush=True)
