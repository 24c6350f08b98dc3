"""Detect an objective that blocks in a collective (a function that waits until all ranks have called it)."""

from __future__ import annotations

from collections.abc import Sequence
from traceback import FrameSummary

from hpo.evaluation.trainer_client import COLLECTIVES_PATH, TrainerClient
from hpo.process import clock

_CHECKS_PER_WAIT = 4
_MAX_IDLE_TICKS = 2  # CPU time between two checks in hundredths of a second; to write the stacks takes this much


class HangDetector:
    """Checks at intervals whether an objective blocks in a collective of torch.distributed.

    The check is needed for process groups that the objective creates. Their collectives would wait for 30 minutes, the
    default of torch. The default process group has a shorter timeout.

    Args:
        patience: Seconds after which a blocked objective counts as hanging.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._interval = self._patience / _CHECKS_PER_WAIT
        self._since = clock.now()
        self.next_check = self._since + self._interval
        self._ticks = 0
        self.frames: Sequence[FrameSummary] = ()

    def is_hanging(self, trainer: TrainerClient, now: float) -> bool:
        """Return whether an objective has blocked at one line in torch.distributed for `patience` seconds."""
        if now < self.next_check:
            return False
        self.next_check = now + self._interval
        frames, ticks = trainer.find_stack(), trainer.count_cpu_ticks()
        used, self._ticks = ticks - self._ticks, ticks
        # The innermost frame counts, since torch.distributed may call code of the user.
        is_in_collective = bool(frames) and COLLECTIVES_PATH in frames[-1].filename
        is_waiting = used <= _MAX_IDLE_TICKS and is_in_collective
        if not is_waiting or _find_positions(frames) != _find_positions(self.frames):
            self.frames, self._since = frames, now
            return False
        return now - self._since >= self._patience


def _find_positions(frames: Sequence[FrameSummary]) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in frames]
