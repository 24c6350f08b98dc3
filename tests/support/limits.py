"""Time limits of tests, which depend on the speed of the machine."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache

_USUAL_SECONDS = 1.3  # in which a usual machine imports torch


def scale(seconds: float) -> float:
    """Return a time limit for this machine; `seconds` is that of a usual machine."""
    return seconds * measure_slowness()


@cache
def measure_slowness() -> float:
    """Return how many times slower this machine is than a usual one, at least 1.

    Call it before a job starts, since the first call takes seconds.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return max(1.0, (time.monotonic() - began) / _USUAL_SECONDS)
