"""How a supervisor finds an objective that waits in vain."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import FrameSummary

from hpo.evaluation.trainer_client import COLLECTIVES_PATH, TrainerClient
from hpo.process import clock

_CHECKS_PER_WAIT = 4
_MAX_IDLE_TICKS = 2  # hundredths of a second of CPU time, which it takes to write stacks


class HangDetector:
    """Looks now and then where an objective is, to find one that waits in vain in a collective.

    The default process group has a limit of its own; groups that the objective has made wait for torch's 30 minutes.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._interval = self._patience / _CHECKS_PER_WAIT
        self._since = clock.now()
        self.next_check = self._since + self._interval
        self._ticks = 0
        self.frames: Sequence[FrameSummary] = ()

    def is_hanging(self, trainer: TrainerClient, now: float) -> bool:
        """Tell whether an objective has waited at one place, in torch.distributed, for as long as it may."""
        if now < self.next_check:
            return False
        self.next_check = now + self._interval
        frames, ticks = trainer.find_stack(), trainer.count_cpu_ticks()
        used, self._ticks = ticks - self._ticks, ticks
        is_inside = (
            bool(frames) and COLLECTIVES_PATH in frames[-1].filename
        )  # and not in code of the user that torch calls
        waits = used <= _MAX_IDLE_TICKS and is_inside
        if not waits or _find_positions(frames) != _find_positions(self.frames):
            self.frames, self._since = frames, now
            return False
        return now - self._since >= self._patience


def _find_positions(frames: Sequence[FrameSummary]) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in frames]
