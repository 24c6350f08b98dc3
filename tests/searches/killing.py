"""A search in which some individuals kill the rank of the job that has started their template."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 7))


@dataclass(frozen=True)
class Settings:
    kills: str = ""  # individuals, as in "3,7"
    seconds: float = 0.3


def objective(params, _, settings):
    time.sleep(settings.seconds)
    if str(params["k"]) in settings.kills.split(","):
        template = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(template.rpartition(")")[2].split()[1]), signal.SIGKILL)
        time.sleep(60)
    time.sleep(settings.seconds)
    yield params["k"]
