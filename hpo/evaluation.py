"""One individual, one loss: the objective run on all ranks of a worker, which agree after each step how it goes on."""

from __future__ import annotations

import inspect
import logging
import math
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from hpo.communicator import sleep_until
from hpo.errors import Exit, KnownError, RunError, Stop
from hpo.failure import message, showable, where
from hpo.search_file import SearchFile
from hpo.verdict import Step, Verdict, judge
from hpo.watch import STOPPED, Watch
from hpo.worker import Worker

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from torch import Tensor

    from hpo.record import Assignment, Record
    from hpo.weights import WeightsKeeper

# What gloo says where a peer has ended the connection, or has died.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

_SECONDS_TO_SAY_WHY = 5.0  # for a rank that is stuck, before its peers say so

Steps = Generator[tuple[float, dict[str, float]], None, None]


@dataclass(frozen=True)
class Limits:
    """When to end: waiting for a rank, an evaluation, a run in which nothing succeeds, or one that is good enough."""

    collective_timeout: float
    evaluation_timeout: float
    max_failures: int | None
    target_loss: float = -math.inf


def target_reached(target_loss: float) -> Stop:
    """Say why a run stops that has found what it was to find."""
    return Stop(f"the loss of --target-loss {target_loss:g} is reached", Exit.BUDGET_SPENT)


@dataclass
class _Outcome:
    """How an evaluation ended; the lowest loss and its metrics if it is complete."""

    verdict: Verdict
    loss: float = math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] | None = None


class Evaluator:
    """Evaluates individuals on one worker; made and called by all of the worker's ranks at the same time.

    `record` and, where the weights of the best are to be kept, `keeper` are needed on the leader alone; `budget` is the
    number of evaluations in the whole run.
    """

    def __init__(
        self,
        search: SearchFile,
        settings: Any,
        worker: Worker,
        watch: Watch,
        record: Record | None,
        budget: int,
        limits: Limits,
        pruner: BasePruner | None = None,
        keeper: WeightsKeeper | None = None,
    ) -> None:
        self._search = search
        self._settings = settings
        self._worker = worker
        self._watch = watch
        self._record = record
        self._budget = budget
        self._limits = limits
        self._pruner = pruner
        self._keeper = keeper
        self._distributions = search.space.distributions() if record else {}
        self._seed = worker.seed
        watch.join(worker.own_comm)
        # A rank whose evaluation is called off has as long to come out of it as ranks wait for each other anyway.
        watch.patience = limits.collective_timeout

    def __call__(
        self, params: Mapping[str, Any], breed_again: Callable[[], Mapping[str, Any] | None], **attributes: Any
    ) -> tuple[dict[str, Any], float] | None:
        """Evaluate these hyperparameters, or others that have waited for longer; None where the run ends.

        Where they are known, the leader asks for others, until there are none that are new.

        Returns what was evaluated and its loss: the lowest that the objective yielded or returned, infinite if the
        evaluation failed on any rank.
        """
        assignment = None
        if self._record and not self._watch.stopping:
            assignment = self._start(self._record, params, breed_again, attributes)
        assigned = self._worker.own_comm.bcast((assignment.params, assignment.seed) if assignment else None)
        if assigned is None:
            return None
        evaluated, seed = assigned
        self._worker.seed = self._seed if seed is None else seed
        self._worker.connect(self._watch.post.alone)
        started = time.monotonic()
        outcome = self._evaluate(evaluated, assignment)
        if self._record and assignment:
            self._finish(self._record, assignment, outcome, time.monotonic() - started)
        return None if outcome.verdict.state == "stopped" else (evaluated, outcome.loss)

    def _start(
        self,
        record: Record,
        params: Mapping[str, Any] | None,
        breed_again: Callable[[], Mapping[str, Any] | None],
        attributes: dict[str, Any],
    ) -> Assignment | None:
        while params is not None:
            with suppress(KnownError):
                return record.start(params, self._distributions, self._budget, **attributes)
            params = breed_again()
        return None

    def _evaluate(self, params: dict[str, Any], assignment: Assignment | None) -> _Outcome:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        outcome, limit = _Outcome(Verdict("going")), self._limits.evaluation_timeout
        leads = self._worker.rank == 0
        self._watch.begin(self._worker.cut, limit + self._limits.collective_timeout if leads else math.inf)
        steps = self._steps(params)
        started, reported = time.monotonic(), 0
        while outcome.verdict.state == "going":
            step = self._advance(steps)
            if step.loss is not None:
                step = self._decide(step, step.loss, time.monotonic() - started)
            outcome.verdict = verdict = self._meet(step)
            if verdict.loss is None:
                continue
            reported += 1
            if self._record and assignment:
                self._record.report(assignment, reported, verdict.loss)
            if verdict.loss < outcome.loss:
                outcome.loss, outcome.metrics = verdict.loss, verdict.metrics
                if self._keeper and assignment:
                    outcome.weights = self._keeper.copy(assignment, self._worker.offered, verdict.loss)
            self._worker.offered = None
            if verdict.state == "going" and self._is_hopeless(assignment):
                outcome.verdict = Verdict("pruned")
        self._worker.offered = None  # it holds the model
        if outcome.verdict.state in ("failed", "stopped"):
            outcome.loss = math.inf
            self._abandon(steps)
        elif outcome.verdict.state == "pruned" or outcome.loss <= self._limits.target_loss:
            self._close(steps, patient=True)
            self._worker.renew_comm()
        self._watch.end()
        return outcome

    def _decide(self, step: Step, loss: float, seconds: float) -> Step:
        """End an evaluation that has reached the target, or has had its time; what the leader decides holds."""
        limits = self._limits
        if loss <= limits.target_loss:
            return replace(step, ending="complete")
        if seconds > limits.evaluation_timeout:
            reason = f"timeout: still going on after {limits.evaluation_timeout:g} s (--evaluation-timeout)"
            return replace(step, ending="failed", reason=reason)
        return step

    def _advance(self, steps: Steps) -> Step:
        """Run the objective on this rank up to its next loss; nothing that it raises gets past this."""
        rank, began = self._worker.rank, time.monotonic()
        try:
            with self._watch.interruptible():
                yielded = next(steps, None)
        except BaseException as error:
            return self._failed(error, time.monotonic() - began)
        return Step(rank, *yielded) if yielded else Step(rank)

    def _meet(self, step: Step) -> Verdict:
        """Wait for the other ranks of the worker, and judge together; those that do not come are called off."""
        limit = self._limits.collective_timeout
        here = self._worker.own_comm.arrive()
        if step.failure is None and not sleep_until(here, limit):
            waited = f"waited {limit:g} s for it to yield (--collective-timeout)"
            self._watch.call_off(f"a peer {waited}")
            step = Step(step.rank, failure=waited, timeout=True, at=time.time())
        if not sleep_until(here, limit + _SECONDS_TO_SAY_WHY):
            raise RunError(
                f"{self._watch.post.name} waits in vain for {self._watch.names_of_peers}: their evaluation was "
                f"called off {limit:g} s ago (--collective-timeout), and one of them is gone"
            )
        return judge(self._worker.own_comm.allgather(step))

    def _steps(self, params: dict[str, Any]) -> Steps:
        """Yield each validation loss of the objective, with its metrics."""
        self._worker.seed_everything()
        self._worker.offered = None
        result = self._search.call(self._search.objective, params, self._worker, settings=self._settings)
        if not inspect.isgenerator(result):
            yield _checked(result)
            return
        empty = True
        with closing(result):
            for value in result:
                empty = False
                yield _checked(value)
        if empty:
            raise ValueError("the objective yielded no loss")

    def _failed(self, error: BaseException, waited: float) -> Step:
        """Make a failure of what the objective raised, and let the peers know, which may wait for this rank."""
        cause, reason = self._watch.cause, message(error)
        if cause is None:
            self._watch.call_off(f"a peer failed: {type(error).__name__}: {reason}")
        self._worker.cut()
        echo = any(text in reason for text in _ECHOES)
        step = Step(
            self._worker.rank,
            failure=f"{type(error).__name__}: {reason}" if cause is None else cause,
            own=cause is None,
            echo=echo,
            timeout=waited >= self._limits.collective_timeout and ("timeout" in reason or "Timed out" in reason),
            stopped=cause == STOPPED,
            at=time.time(),
            where=where(error, self._search.path),
            traceback=showable("".join(traceback.format_exception(error))),
        )
        traceback.clear_frames(error.__traceback__)  # they hold the model
        error.__traceback__ = None
        return step

    def _abandon(self, steps: Steps) -> None:
        """Close an objective in whose process group ranks may wait, and the group."""
        self._worker.cut()
        self._close(steps)
        self._worker.renew_comm()  # the ranks wait for each other in it: all are cut when the first one disconnects
        self._worker.disconnect()

    def _is_hopeless(self, assignment: Assignment | None) -> bool:
        """Let the leader ask the pruner, and tell its peers."""
        if self._pruner is None:
            return False
        hopeless = self._record and assignment and self._record.is_hopeless(assignment, self._pruner)
        return bool(self._worker.own_comm.bcast(hopeless))

    def _close(self, steps: Steps, patient: bool = False) -> None:
        """Close an objective that has not ended by itself."""
        try:
            with self._watch.closing(patient):
                steps.close()
        except BaseException:
            logging.getLogger(__name__).info("while an objective was closed:\n%s", traceback.format_exc())

    def _finish(self, record: Record, assignment: Assignment, outcome: _Outcome, seconds: float) -> None:
        verdict = outcome.verdict
        if verdict.state == "stopped":
            record.interrupt(assignment)
        elif verdict.state == "complete":
            record.complete(assignment, outcome.loss, seconds, outcome.metrics)
            if self._keeper:
                self._keeper.keep(assignment, outcome.weights)
            if outcome.loss <= self._limits.target_loss:
                self._watch.stop(target_reached(self._limits.target_loss))
        elif verdict.state == "pruned":
            record.prune(assignment, outcome.loss, seconds, outcome.metrics)
        else:
            record.fail(assignment, verdict.failure, verdict.traceback, seconds)
            most = self._limits.max_failures
            if most is not None and record.failures_before_any_success() >= most:
                reason = f"{most} evaluations failed and none succeeded (--max-failures)"
                self._watch.stop(Stop(reason, Exit.NOTHING_SUCCEEDED))


def _checked(value: Any) -> tuple[float, dict[str, float]]:
    """Take apart what an objective yielded: a loss, or a loss and metrics, of which those are kept that are finite."""
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if hasattr(loss, "item"):  # a tensor or a numpy scalar
        loss = loss.item()
    if not isinstance(loss, Real):
        raise TypeError(f"an objective yields its validation loss, a number, not {value!r}")
    if not math.isfinite(loss):
        raise ValueError(f"the validation loss is {float(loss)}")
    numbers = {str(name): float(metric) for name, metric in dict(metrics).items()}
    return float(loss), {name: metric for name, metric in numbers.items() if math.isfinite(metric)}
