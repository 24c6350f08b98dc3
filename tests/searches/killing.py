"""A search in which some individuals end the process that evaluates them, in native code or by a signal."""

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 17))


@dataclass(frozen=True)
class Settings:
    kills: str = ""  # individuals, as in "3,7"
    leaves: str = ""  # the same, by os._exit
    status: int = 0  # with which they do
    once: str = ""  # a file: the first evaluation that does not find it calls C's _exit
    seconds: float = 0.3


def objective(params, _, settings):
    time.sleep(settings.seconds)
    if str(params["k"]) in settings.kills.split(","):
        os.kill(os.getpid(), signal.SIGKILL)
    if str(params["k"]) in settings.leaves.split(","):
        os._exit(settings.status)
    if settings.once and not Path(settings.once).exists():
        Path(settings.once).touch()
        ctypes.CDLL(None)._exit(settings.status)
    time.sleep(settings.seconds)
    yield params["k"]
