"""One individual, one loss: the objective run on all ranks of a worker, which agree after each step how it goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpo.errors import Exit, KnownError, Stop
from hpo.evaluation.group import Group
from hpo.evaluation.lockstep import Lockstep
from hpo.evaluation.objective import Objective
from hpo.evaluation.surroundings import as_before
from hpo.evaluation.verdict import Step, Verdict
from hpo.problem import SearchFile
from hpo.process import clock
from hpo.process.place import Places
from hpo.process.printed import Printed
from hpo.ranks.sharing import Shared
from hpo.ranks.watch import Watch
from hpo.text import named

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from torch import Tensor

    from hpo.evaluation.worker import Worker
    from hpo.store.log import Log
    from hpo.store.record import Assignment, Record
    from hpo.store.weights import WeightsKeeper


_MOST_SUSPENSIONS = 20  # in which ranks of one evaluation have waited in vain


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

    What objectives are called with is `settings`, `data` and, unless an individual has one of its own, `seed`.
    `record`, the `log` of what objectives print and, where the weights of the best are to be kept, `keeper` are needed
    on the leader alone; `budget` is the number of evaluations in the whole run. Where the record `may_be_away`, ranks
    wait for the leader to write down a loss, and for as long as that takes.
    """

    def __init__(
        self,
        search: SearchFile,
        settings: Any,
        data: Shared,
        seed: int,
        *,
        group: Group,
        watch: Watch,
        printed: Printed,
        record: Record | None,
        budget: int,
        limits: Limits,
        pruner: BasePruner | None = None,
        keeper: WeightsKeeper | None = None,
        log: Log | None = None,
        may_be_away: bool = False,
    ) -> None:
        self._search = search
        self._settings = settings
        self._data = data
        self._seed = seed
        self._group = group
        self._watch = watch
        self._printed = printed
        self._record = record
        self._budget = budget
        self._limits = limits
        self._pruner = pruner
        self._keeper = keeper
        self._log = log
        self._may_be_away = may_be_away
        self._began = 0.0
        self._places = Places(search.location)
        self._distributions = search.space.distributions() if record else {}
        watch.join(group.own_comm, group.index, self._places)
        printed.join(group.index, group.rank)
        # A rank whose evaluation is called off has as long to come out of it as ranks wait for each other anyway.
        watch.patience = limits.collective_timeout

    def __call__(
        self, params: Mapping[str, Any] | None, breed_again: Callable[[], Mapping[str, Any] | None], **attributes: Any
    ) -> tuple[dict[str, Any], float] | None:
        """Evaluate these hyperparameters, or others that have waited for longer; None where the run ends.

        Where they are known, the leader asks for others, until there are none that are new: None, which goes on with
        what waits.

        Returns what was evaluated and its loss: the lowest that the objective yielded or returned, infinite if the
        evaluation failed on any rank.
        """
        assignment = None
        if self._record and not self._watch.stopping:
            assignment = self._start(self._record, params, breed_again, attributes)
        told = (assignment.params, assignment.seed, assignment.number) if assignment else None
        assigned = self._group.own_comm.bcast(told)
        if assigned is None:
            return None
        evaluated, seed, number = assigned
        started, about = clock.now(), f"trial {number} ({named(evaluated)})"
        evaluate = partial(self._evaluate, evaluated, self._seed if seed is None else seed, about, assignment)
        outcome = self._judged(evaluate)
        if self._record and assignment:
            self._finish(self._record, assignment, outcome, clock.now() - started)
        return None if outcome.verdict.state == "stopped" else (evaluated, outcome.loss)

    def _judged(self, evaluate: Callable[[], _Outcome]) -> _Outcome:
        """Evaluate, and again where what went wrong was nobody's mistake."""
        checked = True
        for _ in range(_MOST_SUSPENSIONS):
            outcome = evaluate()
            if outcome.verdict.state == "again" and checked:
                checked = False
                self._group.trust()
            elif outcome.verdict.state != "suspended":
                return outcome
        reason = f"timeout: the job was suspended in each of {_MOST_SUSPENSIONS} attempts"
        outcome.verdict = Verdict("failed", failure=reason)
        return outcome

    def _start(
        self,
        record: Record,
        params: Mapping[str, Any] | None,
        breed_again: Callable[[], Mapping[str, Any] | None],
        attributes: dict[str, Any],
    ) -> Assignment | None:
        while True:
            with suppress(KnownError):
                return record.start(params, self._distributions, self._budget, **attributes)
            params = breed_again()

    def _evaluate(self, params: Mapping[str, Any], seed: int, about: str, assignment: Assignment | None) -> _Outcome:
        """Take the objective from loss to loss on this rank, for as long as all ranks agree that it goes on."""
        self._group.connect(self._watch.post.alone)
        worker = self._group.worker(seed, self._data.load)
        outcome, self._began = _Outcome(Verdict("going")), clock.now()
        objective = Objective(self._search, params, worker, self._settings)
        keep = partial(self._log.add, assignment.number) if self._log and assignment else lambda _: None
        patience = self._limits.collective_timeout
        lockstep = Lockstep(objective, self._group, self._watch, self._places, self._printed, patience, keep)
        overdue_after = self._limits.evaluation_timeout + patience if self._group.rank == 0 else math.inf
        give_up = partial(self._give_up, assignment) if assignment else None
        self._watch.begin(self._group.cut, overdue_after, about, give_up)
        reported = 0
        with as_before(), self._printed.marked():
            while outcome.verdict.state == "going":
                outcome.verdict = verdict = lockstep.step(self._decide)
                if verdict.loss is None:
                    continue
                reported += 1
                self._group.trust()
                self._take(outcome, verdict.loss, reported, worker, assignment)
                if verdict.state == "going" and self._is_hopeless(assignment):
                    outcome.verdict = Verdict("pruned")
            worker.take_offer()  # it holds the model
            self._end(outcome, lockstep)
        self._watch.end()
        return outcome

    def _take(self, outcome: _Outcome, loss: float, epoch: int, worker: Worker, assignment: Assignment | None) -> None:
        """Record a loss that all ranks agree on, and keep the best so far."""
        offered = worker.take_offer()
        with self._waiting():
            if self._record and assignment:
                self._record.report(assignment, epoch, loss)
            if loss < outcome.loss:
                outcome.loss, outcome.metrics = loss, outcome.verdict.metrics
                if self._keeper and assignment:
                    outcome.weights = self._keeper.copy(assignment, offered, loss)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let ranks wait for the leader; an evaluation is not to take its time from this."""
        if not self._may_be_away:
            yield
            return
        since = clock.now()
        with self._watch.paused():
            yield
            self._group.own_comm.barrier()
        self._began += clock.now() - since

    def _end(self, outcome: _Outcome, lockstep: Lockstep) -> None:
        """Leave nothing of an objective that has not ended by itself."""
        if outcome.verdict.state in ("failed", "again", "suspended", "stopped"):
            outcome.loss = math.inf
            lockstep.abandon()
        elif outcome.verdict.state == "pruned" or outcome.loss <= self._limits.target_loss:
            lockstep.close(patient=True)
            self._group.renew_comm()
        elif lockstep.leaves_messages:
            self._group.renew_comm()
        self._group.tidy()

    def _decide(self, step: Step, loss: float) -> Step:
        """End an evaluation that has reached the target, or has had its time; what the leader decides holds."""
        limits = self._limits
        if loss <= limits.target_loss:
            return replace(step, ending="complete")
        if clock.now() - self._began > limits.evaluation_timeout:
            reason = f"timeout: still going on after {limits.evaluation_timeout:g} s (--evaluation-timeout)"
            return replace(step, ending="failed", reason=reason)
        return step

    def _give_up(self, assignment: Assignment, failure: str, stack: str) -> None:
        """Record that an evaluation has ended the process of one of its ranks, which ends the job; from any thread."""
        self._group.descriptors.take_back()
        if self._record:
            self._record.fail(assignment, failure, stack, clock.now() - self._began, killed=True)

    def _is_hopeless(self, assignment: Assignment | None) -> bool:
        """Let the leader ask the pruner, and tell its peers."""
        if self._pruner is None:
            return False
        with self._waiting():
            hopeless = self._record and assignment and self._record.is_hopeless(assignment, self._pruner)
        return bool(self._group.own_comm.bcast(hopeless))

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
