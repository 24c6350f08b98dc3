"""Where the ranks of a worker meet after each step of an objective: they judge together, and the leader decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hpo.errors import RunError
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.step_verdict import Step, Verdict, judge_steps
from hpo.ranks.communicator import sleep_until
from hpo.ranks.rank_watch import RankWatch
from hpo.ranks.watched_evaluation import WatchedEvaluation

_SECONDS_TO_END_TRAINER = 30.0  # in which a supervisor ends its trainer, on busy cores

# Called on the leader with the verdict of all ranks on a step, and what they have printed in it; returns the final one.
Decider = Callable[[Verdict, str], Verdict]


class StepSync:
    """The worker's ranks after a step, as one of them sees it; `decide` is None on all ranks but the leader."""

    def __init__(self, group: RankGroup, watch: RankWatch, watched: WatchedEvaluation, decide: Decider | None) -> None:
        self._group = group
        self._watch = watch
        self._watched = watched
        self._decide = decide

    def agree_on_verdict(self, step: Step) -> Verdict:
        """Return the verdict on the steps of all ranks, the same on all of them."""
        steps = self._gather_steps(step)
        verdict = None
        if self._decide is not None:
            verdict = self._decide(judge_steps(steps), "".join(step.printed for step in steps))
        told: Verdict = self._group.own_comm.bcast(verdict)
        return told

    def _gather_steps(self, step: Step) -> list[Step]:
        """Wait for the worker's other ranks, call off late ones, and return the steps of all ranks.

        A rank that has waited in vain says so after the others have come, which is worth a second round only then.
        """
        patience, comm, called_off = self._group.patience, self._group.own_comm, self._watched.cause is not None
        step = replace(step, printed=self._group.slot.output.take_printed(), called_off=called_off)
        gathering = comm.begin_gather(step)
        if step.failure is None and not sleep_until(gathering.is_done, patience):
            waited = describe_timeout(patience)
            self._watched.cancel_on_all(f"a peer {waited}")
            step = replace(step, failure=waited, timeout=True, at=time.time())
        if not sleep_until(gathering.is_done, patience + _SECONDS_TO_END_TRAINER):
            raise RunError(
                f"{self._watch.control_channel.name} waits in vain for {self._watch.peer_names}: their evaluation was "
                f"called off {patience:g} s ago (--collective-timeout), and one of them is gone"
            )
        steps: list[Step] = gathering.unpack_objects()
        if any(one.called_off or one.failure is not None for one in steps):
            return comm.gather(step) or []
        return steps


def describe_timeout(patience: float) -> str:
    """Return the failure of a rank that has waited for its peers for as long as it may."""
    return f"waited {patience:g} s (--collective-timeout)"
