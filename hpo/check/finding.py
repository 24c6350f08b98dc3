"""One point of a check: what was found, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One point: `state` is ok, look (for a person to judge) or wrong; `text` what was found, `advice` what to do."""

    level: Literal["ok", "look", "wrong"]
    text: str
    advice: str = ""
