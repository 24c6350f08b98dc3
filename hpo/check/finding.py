"""A finding of a check: a text and an advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    level: Literal["ok", "look", "wrong"]
    """"look" means that a person must decide whether it is a problem."""
    text: str
    """The description of the finding."""
    advice: str = ""
    """The remedy; empty if there is none."""
