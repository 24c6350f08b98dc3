"""For programs that a search runs: what they report, and what they know of their evaluation. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_METRICS, _TRIAL, _FOLDER = "HPO_METRICS", "HPO_TRIAL", "HPO_FOLDER"


def report(loss: Any, /, **metrics: Any) -> None:
    """Report a validation loss, with metrics, from anywhere in a program that a search runs.

    Numbers are plain ones, or of numpy, or tensors of one element. Call it on one rank, or on all ranks with the same
    loss. The search may end the program after a loss, as a pruner asks. Without a search, nothing happens. Raises
    TypeError if a value is not a number.
    """
    path = os.environ.get(_METRICS)
    if path is None:
        return
    content = {name: _number(name, value) for name, value in {**metrics, "loss": loss}.items()}
    line = f"{json.dumps(content)}\n".encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line)  # at once: other processes may write, too
    finally:
        os.close(descriptor)


def find_trial() -> int | None:
    """Return the number of the evaluation in the run, None without a search."""
    return int(os.environ[_TRIAL]) if _TRIAL in os.environ else None


def find_folder() -> Path | None:
    """Return a folder of this evaluation alone, which is made now, None without a search."""
    if _FOLDER not in os.environ:
        return None
    folder = Path(os.environ[_FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _number(name: str, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError(f"hpo.report: {name} must be a number, not {value!r}")
    return float(plain)
