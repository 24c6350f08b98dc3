"""Find the individual that crashes the job: retry all individuals that ran at a crash, until only one is left.

This is group testing in two stages (Dorfman, "The detection of defective members of large populations", 1943).
Individuals that ran at one crash are suspects. Of n suspects, sqrt(n) at a time are retried next to new individuals.
Suspects of two crashes wait for the end of the run and are retried alone. If the job crashes again, the individual is
the cause. Crashes are counted since the individual's last checkpoint.
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
    """Return the waiting trial to start next; None if all of them should wait longer.

    Args:
        waiting: Waiting trials.
        trials: All trials of the study.
        is_last: Whether no new individual is left to start.
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
    """Return the number of crashes in a row during trials of this individual."""
    crash_count = trial.user_attrs.get("crash_count", 0)
    return crash_count if is_whole_number(crash_count) else 0


def has_progressed(trial: FrozenTrial) -> bool:
    """Return whether a trial has saved a later checkpoint than it started from, which clears it of earlier crashes.

    An individual that crashes the job does so at some step, so sooner or later it stops saving later checkpoints.
    """
    saved, began = (trial.user_attrs.get(name, 0) for name in ("checkpoint_step", "resumed_from_step"))
    return is_whole_number(saved) and is_whole_number(began) and saved > began
