"""The bench on which one individual is evaluated several times, as a run evaluates it, and looked at meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.check.probe import Probe
from hpo.check.seen import Seen
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.evaluator import Evaluator, Task
from hpo.evaluation.group import Group
from hpo.evaluation.keeper import WeightsKeeper
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.saver import Saver
from hpo.evaluation.verdict import Verdict
from hpo.process.failure import with_hint
from hpo.process.place import Places, frames_of
from hpo.ranks.job import Job
from hpo.ranks.watched import Watched
from hpo.results.winner import tested
from hpo.store.claims import Claims
from hpo.store.log import Log
from hpo.store.record import Record
from hpo.store.recorder import Direct, Recorder
from hpo.store.run_dir import RunDir
from hpo.store.states import States
from hpo.store.trials import Assignment, Evaluation
from hpo.store.weights import BestWeights, read_weights
from hpo.store.writer import Writer

MOST_LOSSES = 3


@dataclass(frozen=True)
class Outcome:
    """What came of an evaluation on some ranks: what the record has, what each rank has seen, what was `offered`.

    `is_fine` says that only torch's check of collectives failed it, which is stricter than collectives are. `rejected`
    is why it could not go on from the state that it was given; empty where it could, or was given none.
    """

    evaluation: Evaluation
    seen: list[Seen]
    offered: bool
    is_fine: bool = False
    rejected: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.seen)

    @property
    def failure(self) -> str:
        """Why it failed; empty where it did not."""
        return self.evaluation.failure or ""

    @property
    def losses(self) -> list[float]:
        """The losses, in their order."""
        return list(self.evaluation.curve.values())


@dataclass(frozen=True)
class Handed:
    """What a run would hand over: the names of the weights that were kept, None without any, and what `test` did.

    `failure` is why `test` failed, empty where it did not; `seconds` is how long it took, None where it was not called.
    """

    names: list[str] | None = None
    failure: str = ""
    seconds: float | None = None


class _FirstState(Saver):
    """Keeps the state of an evaluation's first loss, also when the evaluation has ended."""

    def __init__(self, states: States) -> None:
        super().__init__(states, every=0.0)
        self.rejected = ""
        self._is_first = True

    def wants(self) -> bool:
        """Tell whether this is the first loss with a state."""
        is_first, self._is_first = self._is_first, False
        return is_first

    def reject(self, assignment: Assignment, reason: str) -> None:
        """Remember why an evaluation cannot go on, and let it begin again."""
        self.rejected = reason
        super().discard(assignment)

    def discard(self, assignment: Assignment) -> None:
        """Keep the state of an evaluation that has ended."""


class _Brief(Leader):
    """A leader that ends each evaluation after some losses, and tells of each; all else is as in a run."""

    def __init__(
        self, recorder: Recorder, keeper: WeightsKeeper | None, saver: _FirstState, told: Callable[[], None]
    ) -> None:
        super().__init__(recorder, Limits(), lambda _: None, keeper, saver)
        self.saver = saver
        self._told = told
        self.offered = False
        self.is_fine = False

    def decide(self, attempt: Attempt, watched: Watched, verdict: Verdict, printed: str) -> Verdict:
        """Record what all ranks have said of a step, as a leader does; the last loss that is wanted is the end."""
        if verdict.loss is not None:
            self._told()
        self.offered |= attempt.offered is not None
        self.is_fine |= verdict.state == "again"
        decided = super().decide(attempt, watched, verdict, printed)
        is_last = decided.loss is not None and len(attempt.losses) + 1 >= MOST_LOSSES
        return replace(decided, state="complete") if is_last and decided.state == "going" else decided


@dataclass
class Bench:
    """Evaluates one individual on a worker, whose leader is the job's first rank; `folder` and `params` are its alone.

    Weights that are offered are kept once, in `folder`.
    """

    task: Task
    job: Job
    places: Places
    folder: Path | None
    params: Mapping[str, Any] | None
    _record: Record | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.folder is not None:
            self._files = RunDir(self.folder)
            self._record = Record.create(
                self._files.journal,
                "check",
                self.task.problem.space.describe(),
                objectives=self.task.problem.file.objectives,
            )

    def evaluate(self, group: Group, keeps: bool = False, went_before: Outcome | None = None) -> Outcome | None:
        """Evaluate the individual on all ranks of a worker, and return what came of it, on the job's first rank.

        If it `keeps`, the weights that are offered are kept. It may go on from the state that the evaluation that
        `went_before` has saved with its first loss. The worker is this rank's, as its watch knows it.
        """
        probe, leader, assignment = Probe(self.places, group.device), None, None
        if self._record is not None and self.params is not None:
            problem = self.task.problem
            recorder = Recorder(Direct(self._writer(self._record)), self._record.objectives)
            keeper = WeightsKeeper(recorder, problem.values) if keeps else None
            leader = _Brief(recorder, keeper, _FirstState(States(self._files.states)), probe.mark)
            place = {"island": 0, "worker": 0, "generation": 0}
            assignment = self._record.start(self.params, problem.space.distributions(), place)
            if went_before is not None:
                assignment = replace(assignment, root=went_before.evaluation.trial)
        with probe:
            Evaluator(self.task, group, self.job, leader)(lambda: assignment)
        seen = group.own_comm.gather(probe.seen)
        if leader is None or self._record is None or seen is None:
            return None
        return Outcome(self._record.evaluations()[-1], seen, leader.offered, leader.is_fine, leader.saver.rejected)

    def _writer(self, record: Record) -> Writer:
        """Return what writes the record, in this thread."""
        claims = Claims(record, self.task.problem.space.distributions(), budget=0)  # nothing is claimed
        log, states = Log(self._files.printed), States(self._files.states)
        return Writer(record, claims, log, states, weights=BestWeights(self._files, record.objectives))

    def hand_over(self) -> Handed:
        """Hand the weights that were kept to `test`, where there is one, as a run does at its end; on the first rank.

        What `test` returns is not told: test data are for the winner of a search.
        """
        problem, weights = self.task.problem, read_weights(self._files.weights)
        if weights is None:
            return Handed()
        if problem.file.test is None:
            return Handed(list(weights.state))
        began = time.monotonic()
        try:
            tested(problem, weights.params, weights.state)
        except (Exception, SystemExit) as error:
            place = self.places.of(frames_of(error))
            return Handed(
                list(weights.state), f"{f'{place}: ' if place else ''}{type(error).__name__}: {with_hint(error)}"
            )
        return Handed(list(weights.state), seconds=time.monotonic() - began)
