"""Find the individual that crashes the job, by retrying the individuals in small groups.

This is group testing in two stages (Dorfman, "The detection of defective members of large populations", 1943). All
individuals that were running at a crash are suspects. In the first stage, sqrt(n) of n suspects are retried at the same
time, next to new individuals. The second stage is for individuals that were running at two crashes in a row. They are
retried at the end of the run, one at a time. If the job then crashes again, the only running individual is the cause,
and fails. A suspect is cleared when it saves a checkpoint at a later step than it started from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from hpo.store.json_values import is_whole_number

MAX_CRASHES = 3  # Crashes in a row after which an individual fails. It runs alone at the last one.


def select_next_waiting(
    waiting: Sequence[FrozenTrial], trials: Sequence[FrozenTrial], is_last: bool
) -> FrozenTrial | None:
    """Return the waiting trial to start next; None if no waiting trial may start yet.

    Args:
        trials: All trials of the study.
        is_last: Whether the run will start no new individuals.
    """
    running = [trial for trial in trials if trial.state == TrialState.RUNNING]
    if cleared := [trial for trial in waiting if not read_crash_count(trial)]:
        return cleared[0]
    suspects = [trial for trial in waiting if read_crash_count(trial) == 1]
    running_suspects = sum(read_crash_count(trial) > 0 for trial in running)
    if suspects:
        return suspects[0] if running_suspects < math.isqrt(len(suspects) + running_suspects) else None
    return waiting[0] if is_last and not running else None


def read_crash_count(trial: FrozenTrial) -> int:
    """Return how often in a row the job crashed while the individual of this trial was running."""
    crash_count = trial.user_attrs.get("crash_count", 0)
    return crash_count if is_whole_number(crash_count) else 0


def has_progressed(trial: FrozenTrial) -> bool:
    """Return whether a trial has saved a checkpoint at a later step than it started from.

    If it has, its individual stops being a suspect. If the individual crashes the job at a later step, its retries make
    no further progress. So it becomes a suspect again.
    """
    saved, began = (trial.user_attrs.get(name, 0) for name in ("checkpoint_step", "resumed_from_step"))
    return is_whole_number(saved) and is_whole_number(began) and saved > began
