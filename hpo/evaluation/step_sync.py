"""Synchronize the ranks of a worker after each step of an objective, and agree on a verdict."""

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

_SECONDS_TO_END_TRAINER = 30.0  # time in which a supervisor can end its trainer on busy cores

# Called on the leader with the verdict of all ranks on a step, and the lines printed in it; returns the final verdict.
Decider = Callable[[Verdict, str], Verdict]


class StepSync:
    """Synchronizes one rank of a worker with its peers after each step.

    Args:
        group: The ranks of the worker.
        watch: The watch over this rank: a thread that handles signals and messages.
        watched: The evaluation, which the watch can cancel.
        decide: Returns the final verdict on a step, on the leader. None on other ranks.
    """

    def __init__(self, group: RankGroup, watch: RankWatch, watched: WatchedEvaluation, decide: Decider | None) -> None:
        self._group = group
        self._watch = watch
        self._watched = watched
        self._decide = decide

    def agree_on_verdict(self, step: Step) -> Verdict:
        """Exchange the steps of all ranks, and return the verdict on them.

        Collective: call on all ranks of the worker.
        """
        steps = self._gather_steps(step)
        verdict = None
        if self._decide is not None:
            verdict = self._decide(judge_steps(steps), "".join(step.printed for step in steps))
        final: Verdict = self._group.comm.bcast(verdict)
        return final

    def _gather_steps(self, step: Step) -> list[Step]:
        """Wait for the other ranks, and return the steps of all ranks. Cancel the evaluation if a rank is late.

        A rank may time out after it has sent its step. So if any rank has failed, all ranks send their steps again.
        """
        patience, comm, called_off = self._group.patience, self._group.comm, self._watched.cause is not None
        printed = self._group.slot.output.take_printed()
        own_step = replace(step, printed=printed, called_off=called_off)
        gathering = comm.begin_gather(own_step)
        if own_step.failure is None and not sleep_until(gathering.is_done, patience):
            waited = describe_timeout(patience)
            self._watched.cancel_on_all(f"a peer {waited}")
            own_step = replace(own_step, failure=waited, timeout=True, at=time.time())
        if not sleep_until(gathering.is_done, patience + _SECONDS_TO_END_TRAINER):
            raise RunError(
                f"{self._watch.control_channel.name} gets no answer from {self._watch.peer_names}: their evaluation "
                f"was cancelled {patience:g} s ago (--collective-timeout), and one of them has ended"
            )
        steps: list[Step] = gathering.unpack_objects()
        if any(step.called_off or step.failure is not None for step in steps):
            return comm.gather(own_step) or []
        return steps


def describe_timeout(patience: float) -> str:
    """Return the failure of a rank that has waited for its peers for `patience` seconds."""
    return f"waited {patience:g} s (--collective-timeout)"
