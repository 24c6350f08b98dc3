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

    Only a process whose main thread sleeps and uses no CPU time is asked for its stack: one that is running Python code
    may crash then, since faulthandler reads frames that are just being made or removed (seen with Python 3.13).

    Args:
        trainer: The process that runs the objective.
        patience: Seconds after which a blocked objective counts as hanging.
    """

    def __init__(self, trainer: TrainerClient, patience: float) -> None:
        self._trainer = trainer
        self._patience = patience
        self._interval = patience / _CHECKS_PER_WAIT
        self._since = clock.now()
        self.next_check = self._since + self._interval
        _, self._ticks = trainer.read_thread_state()
        self.frames: Sequence[FrameSummary] = ()

    def is_hanging(self, now: float) -> bool:
        """Return whether an objective has blocked at one line in torch.distributed for `patience` seconds."""
        if now < self.next_check:
            return False
        self.next_check = now + self._interval
        is_asleep, ticks = self._trainer.read_thread_state()
        used, self._ticks = ticks - self._ticks, ticks
        if not is_asleep and used <= _MAX_IDLE_TICKS:
            return False  # It waits for a core. The next check tells more.
        frames = self._trainer.find_stack() if used <= _MAX_IDLE_TICKS else ()
        # The innermost frame counts, since torch.distributed may call code of the user.
        if not frames or COLLECTIVES_PATH not in frames[-1].filename:
            self.frames = ()
            return False
        if _find_positions(frames) != _find_positions(self.frames):
            self.frames, self._since = frames, now
        return now - self._since >= self._patience


def _find_positions(frames: Sequence[FrameSummary]) -> list[tuple[str, int | None]]:
    return [(frame.filename, frame.lineno) for frame in frames]
