"""A finding of a check: its level, a text, and advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One finding of a check, such as an evaluation that fails."""

    level: Literal["ok", "look", "wrong"]
    """The severity, from "ok" to "wrong". For "look", a person must decide whether the finding is a problem."""
    text: str
    """The description of the finding."""
    advice: str = ""
    """The remedy; empty if there is none."""
