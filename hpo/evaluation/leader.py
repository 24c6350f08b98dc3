"""What the leader of a worker does for its evaluations: it decides on each loss, and writes down how they end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpo.errors import Exit, Stop
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.verdict import Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

    from hpo.ranks.watched import Watched
    from hpo.store.log import Log
    from hpo.store.record import Record
    from hpo.store.weights import WeightsKeeper


@dataclass(frozen=True)
class Limits:
    """When to end an evaluation, a run in which nothing succeeds, or one that is good enough.

    `evaluation_timeout` is in seconds; `max_failures` counts failed evaluations before any success.
    """

    evaluation_timeout: float = math.inf
    max_failures: int | None = None
    target_loss: float = -math.inf


def target_reached(target_loss: float) -> Stop:
    """Return the stop of a run that has reached its target loss."""
    return Stop(f"the loss of --target-loss {target_loss:g} is reached", Exit.BUDGET_SPENT)


class Leader:
    """Decides on losses, and writes to the record and to the log of what objectives print.

    `stop` is called to stop the run; `keeper` keeps the weights of the best, None where they are not to be kept.
    """

    def __init__(
        self,
        record: Record,
        log: Log,
        limits: Limits,
        stop: Callable[[Stop], None],
        pruner: BasePruner | None = None,
        keeper: WeightsKeeper | None = None,
    ) -> None:
        self.limits = limits
        self._record = record
        self._log = log
        self._stop = stop
        self._pruner = pruner
        self._keeper = keeper

    def decide(self, attempt: Attempt, watched: Watched, verdict: Verdict, printed: str) -> Verdict:
        """Record what all ranks have said of a step, and return the final verdict: how the evaluation goes on.

        The time that this takes is not counted as the evaluation's: a database may be away, and is waited for.
        """
        since, seconds = clock.now(), attempt.seconds
        with watched.paused():
            self._log.add(attempt.assignment.number, printed)
            if verdict.loss is not None:
                self._record.report(attempt.assignment, attempt.epochs + 1, verdict.loss)
                verdict = self._decided(attempt, verdict, verdict.loss, seconds)
                verdict = replace(verdict, keep=self._is_to_be_kept(attempt, verdict))
        attempt.began += clock.now() - since
        return verdict

    def _is_to_be_kept(self, attempt: Attempt, verdict: Verdict) -> bool:
        if self._keeper is None or attempt.offered is None or verdict.state not in ("going", "complete"):
            return False
        assert verdict.loss is not None
        return verdict.loss < attempt.loss and self._keeper.wants(attempt.assignment, verdict.loss)

    def _decided(self, attempt: Attempt, verdict: Verdict, loss: float, seconds: float) -> Verdict:
        limits = self.limits
        if loss <= limits.target_loss:
            return replace(verdict, state="complete")
        if seconds > limits.evaluation_timeout:
            reason = f"timeout: still going on after {limits.evaluation_timeout:g} s (--evaluation-timeout)"
            return replace(verdict, state="failed", failure=reason)
        if self._pruner and self._record.is_hopeless(attempt.assignment, self._pruner):
            return replace(verdict, state="pruned")
        return verdict

    def copy_weights(self, attempt: Attempt) -> None:
        """Copy the weights that the objective has offered, before the objective trains on."""
        if self._keeper and isinstance(attempt.offered, Mapping):
            attempt.weights = self._keeper.copy(attempt.offered)

    def give_up(self, attempt: Attempt, failure: str, stack: str) -> None:
        """Record that an evaluation has ended a rank's process, and so the job; may be called from any thread."""
        self._record.fail(attempt.assignment, failure, stack, attempt.seconds, killed=True)

    def finish(self, attempt: Attempt, seconds: float) -> None:
        """Record how an evaluation has ended; stop the run where it has reached its target, or seems to be in vain."""
        assignment, verdict, record = attempt.assignment, attempt.verdict, self._record
        if verdict.state == "stopped":
            record.interrupt(assignment)
        elif verdict.state == "complete":
            record.complete(assignment, attempt.loss, seconds, attempt.metrics)
            if self._keeper:
                self._keeper.keep(assignment, attempt.weights)
            if attempt.loss <= self.limits.target_loss:
                self._stop(target_reached(self.limits.target_loss))
        elif verdict.state == "pruned":
            record.prune(assignment, attempt.loss, seconds, attempt.metrics)
        else:
            record.fail(assignment, verdict.failure, verdict.traceback, seconds)
            most = self.limits.max_failures
            if most is not None and record.failures_before_any_success() >= most:
                reason = f"{most} evaluations failed and none succeeded (--max-failures)"
                self._stop(Stop(reason, Exit.NOTHING_SUCCEEDED))
