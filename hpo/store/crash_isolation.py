"""Find the individual that crashes the job, by retrying the individuals in small groups.

This is group testing in two stages (Dorfman, "The detection of defective members of large
populations", 1943). All individuals that were running at a crash are suspects. In the first stage,
sqrt(n) of n suspects are retried at the same time, next to new individuals. The second stage is for
individuals that were running at two crashes in a row. They are retried at the end of the run, one
at a time. If the job then crashes again, the only running individual is the cause, and fails. A
suspect is cleared when it saves a checkpoint at a later step than it started from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hpo.store.evaluations import Evaluation

MAX_CRASHES = 3  # Crashes in a row after which an individual fails. It runs alone at the last one.


def select_next_waiting(
    waiting: Sequence[Evaluation], running: Collection[Evaluation], is_last: bool
) -> Evaluation | None:
    """Return the waiting trial to start next; None if no waiting trial may start yet.

    Args:
        running: Running trials of the study, including tests of workers.
        is_last: Whether the run will start no new individuals.
    """
    if cleared := [trial for trial in waiting if not trial.crash_count]:
        return cleared[0]
    suspects = [trial for trial in waiting if trial.crash_count == 1]
    running_suspects = sum(trial.crash_count > 0 for trial in running)
    if suspects and running_suspects < math.isqrt(len(suspects) + running_suspects):
        return suspects[0]
    if not suspects and is_last and not running:
        return waiting[0]
    return None


def has_progressed(evaluation: Evaluation) -> bool:
    """Return whether an evaluation has saved a checkpoint at a later step than it started from.

    If it has, its individual stops being a suspect. If the individual crashes the job at a later
    step, its retries make no further progress. So it becomes a suspect again.
    """
    return evaluation.checkpoint_step > evaluation.resumed_from_step
