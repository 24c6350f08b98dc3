"""Finding the individual that kills the job: those in flight at a death are evaluated again, and no other one fails.

Group testing in two stages (Dorfman, "The detection of defective members of large populations", 1943). Of n individuals
that were in flight at one death, the square root of n at a time are evaluated again, beside new ones. Those that were
in flight at two deaths wait for the end of the run, and are evaluated alone: if the job dies again, that one kills it.
Deaths count from the last state that an evaluation has saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from hpo.store.json_values import is_whole_number

MAX_CRASHES = 3  # of the job, in a row, the last one with nothing else in flight


def select_next_waiting(
    waiting: Sequence[FrozenTrial], trials: Sequence[FrozenTrial], is_last: bool
) -> FrozenTrial | None:
    """Return the waiting trial to evaluate next; None where all of them are better left for later.

    `is_last` says that there is nothing new to evaluate.
    """
    running = [trial for trial in trials if trial.state == TrialState.RUNNING]
    if innocent := [trial for trial in waiting if not read_crash_count(trial)]:
        return innocent[0]
    suspects = [trial for trial in waiting if read_crash_count(trial) == 1]
    in_flight = sum(read_crash_count(trial) > 0 for trial in running)
    if suspects:
        return suspects[0] if in_flight < math.isqrt(len(suspects) + in_flight) else None
    return waiting[0] if is_last and not running else None


def read_crash_count(trial: FrozenTrial) -> int:
    """Return how often in a row the job has died while this was evaluated."""
    deaths = trial.user_attrs.get("crash_count", 0)
    return deaths if is_whole_number(deaths) else 0


def has_progressed(trial: FrozenTrial) -> bool:
    """Tell whether an evaluation has saved a later state than it began with: a death before was not its own.

    One that kills the job does so at some epoch, which it reaches without saving a state any more, sooner or later.
    """
    saved, began = (trial.user_attrs.get(name, 0) for name in ("checkpoint_step", "resumed_from_step"))
    return is_whole_number(saved) and is_whole_number(began) and saved > began
