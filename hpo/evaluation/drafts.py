"""The drafts of a script's evaluation, on the leader: its last checkpoint, and the weights of its lowest loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpo.process import clock
from hpo.store.states import STATE, WEIGHTS, About, check_space
from hpo.store.tensors import Source, copy_tensors, read_header
from hpo.text import message


class Drafts:
    """Keeps the drafts of one evaluation, whose names begin with `prefix`, and makes files of the run from them."""

    def __init__(self, prefix: Path, params: Mapping[str, Any]) -> None:
        self._prefix = prefix
        self._params = dict(params)
        self._checkpoint: Path | None = None
        self._about: Mapping[str, Any] = {}
        self._weights: Source | None = None
        self._has_weights = False
        self.close()  # of an attempt before, whose process was killed while it wrote

    def continue_from(self, path: Path) -> None:
        """Take over the weights in the file of the state from which the evaluation continues."""
        kept = self._path("continued")
        with suppress(OSError):
            kept.unlink(missing_ok=True)
            os.link(path, kept)  # the file itself is replaced later
            self._weights = Source(kept, prefix=WEIGHTS)

    def take_checkpoint(self, name: str, about: Mapping[str, Any], has_weights: bool) -> None:
        """Keep a checkpoint instead of the one before; `about` has the losses, the metrics and the seconds until it."""
        self._drop(self._checkpoint)
        self._checkpoint, self._about, self._has_weights = self._path(name), about, has_weights

    def take_weights(self, name: str) -> bool:
        """Keep weights instead of those before; return whether they exist."""
        if self._weights is not None:
            self._drop(self._weights.path)
        path = self._path(name)
        self._weights = Source(path) if path.exists() else None
        return self._weights is not None

    def drop(self, name: str) -> None:
        """Remove a draft that is not kept."""
        self._drop(self._path(name) if name else None)

    def write_state(self, path: str) -> dict[str, Any]:
        """Write the state of the evaluation to a path; return after how many losses it is, and an error, if any."""
        began, losses = clock.now(), self._about.get("losses", [])
        if self._checkpoint is None:
            return {"losses": 0, "seconds": 0.0}
        try:
            sources = [Source(self._checkpoint, STATE, STATE)]
            if self._has_weights and self._weights is not None:
                sources.append(Source(self._weights.path, self._weights.prefix, WEIGHTS))
            about = About(self._params, **self._about, tree=_read_tree(self._checkpoint), has_weights=len(sources) > 1)
            _copy(Path(path), sources, {"about": json.dumps(asdict(about))}, checked="about")
        except (OSError, ValueError, KeyError) as error:
            return {"error": message(error), "losses": 0, "seconds": clock.now() - began}
        return {"losses": len(losses), "seconds": clock.now() - began}

    def write_weights(self, path: str, about: Mapping[str, str]) -> str:
        """Write the weights of the lowest loss to a path, with texts about them; return an error, or an empty text."""
        if self._weights is None:
            return "the script has removed them"
        try:
            _copy(Path(path), [self._weights], about)
        except (OSError, ValueError) as error:
            return message(error)
        return ""

    def close(self) -> None:
        """Remove all drafts."""
        for path in self._prefix.parent.glob(f"{self._prefix.name}-*.safetensors"):
            self._drop(path)

    def _path(self, name: str) -> Path:
        return self._prefix.with_name(f"{self._prefix.name}-{name}.safetensors")

    def _drop(self, path: Path | None) -> None:
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _read_tree(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(read_header(file)[0]["__metadata__"]["tree"])


def _copy(path: Path, sources: list[Source], texts: Mapping[str, str], checked: str = "") -> None:
    check_space(path, sum(source.path.stat().st_size for source in sources))
    copy_tensors(path, sources, texts, checked)
