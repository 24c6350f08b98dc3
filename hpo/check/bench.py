"""The bench on which one individual is evaluated several times, as a run evaluates it, and looked at."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.check.collectives import find_mismatch
from hpo.check.files import Files, list_files
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.evaluator import Evaluator, Terms
from hpo.evaluation.group import Group
from hpo.evaluation.keeper import WeightsKeeper
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.program import Program
from hpo.evaluation.saver import Saver
from hpo.evaluation.testing import test_in_trainer
from hpo.evaluation.trainer import TrainerSlot
from hpo.evaluation.verdict import Verdict
from hpo.process.seen import Seen
from hpo.ranks.watch import Watch
from hpo.run.ready import Ready
from hpo.store.claims import Claims
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.log import Log
from hpo.store.record import Record
from hpo.store.recorder import Direct, Recorder
from hpo.store.run_dir import RunDir
from hpo.store.states import States
from hpo.store.weights import BestWeights, read_about
from hpo.store.writer import Writer

MOST_LOSSES = 3


@dataclass(frozen=True)
class Outcome:
    """An evaluation on some ranks: the record's entry, what each rank has `seen`, and whether weights were `offered`.

    `is_fine` says that only torch's check of collectives failed it, which is stricter than collectives are. `rejected`
    is why it could not continue from the state that it was given; empty if it could, or was given none.
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
        """Why it failed; empty if it did not."""
        return self.evaluation.failure or ""

    @property
    def losses(self) -> list[float]:
        """The losses, in their order."""
        return list(self.evaluation.curve.values())


@dataclass(frozen=True)
class Handed:
    """What a run would hand over: the names of the weights that were kept, None without any, and how `test` ended.

    `failure` is why `test` failed, empty if it did not; `seconds` is how long it took, None if it was not called.
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
        """Remember why an evaluation cannot continue, and let it begin again."""
        self.rejected = reason
        super().discard(assignment)

    def discard(self, assignment: Assignment) -> None:
        """Keep the state of an evaluation that has ended."""


class _Brief(Leader):
    """A leader that ends each evaluation after some losses; all else is as in a run."""

    def __init__(self, recorder: Recorder, slot: TrainerSlot, keeper: WeightsKeeper | None, saver: _FirstState) -> None:
        super().__init__(recorder, slot, Limits(), lambda _: None, keeper, saver)
        self.saver = saver
        self.has_offered = False

    def decide(self, attempt: Attempt, verdict: Verdict, printed: str) -> Verdict:
        """Record what all ranks have reported of a step, as a leader does; the last loss that is wanted is the end."""
        self.has_offered |= attempt.offers
        decided = super().decide(attempt, verdict, printed)
        is_last = decided.loss is not None and len(attempt.losses) + 1 >= MOST_LOSSES
        return replace(decided, is_last=True) if is_last else decided


@dataclass
class Bench:
    """Evaluates one individual on a worker, whose leader is the job's first rank.

    Only that rank has `params`, the hyperparameters; in `folder`, weights that are offered are kept once.
    """

    ready: Ready
    watch: Watch
    folder: Path
    params: Mapping[str, Any] | None
    _record: Record | None = field(default=None, init=False)
    files: list[Files] = field(default_factory=list, init=False)
    """The files below the working directory, before the first evaluation and after each, on the first rank."""

    def __post_init__(self) -> None:
        if self.params is not None:
            self._files = RunDir(self.folder)
            problem = self.ready.problem
            self._record = Record.create(
                self._files.journal, "check", problem.space.describe(), objectives=problem.file.objectives
            )

    def evaluate(self, group: Group, keeps: bool = False, went_before: Outcome | None = None) -> Outcome | None:
        """Evaluate the individual on all ranks of a worker, and return the outcome on the job's first rank.

        If it `keeps`, the weights that are offered are kept. The evaluation may continue from the state that the
        evaluation `went_before` has saved with its first loss. The worker is this rank's, as its watch knows it.
        """
        leader, assignment = None, None
        if self._record is not None and self.params is not None:
            problem, slot = self.ready.problem, self.ready.slot
            recorder = Recorder(Direct(self._writer(self._record)), self._record.objectives)
            keeper = WeightsKeeper(recorder, problem.values) if keeps else None
            leader = _Brief(recorder, slot, keeper, _FirstState(States(self._files.checkpoints)))
            place = {"island": 0, "worker": 0, "generation": 0}
            assignment = self._record.start(self.params, problem.space.distributions(), place)
            if went_before is not None:
                assignment = replace(assignment, root=went_before.evaluation.trial)
        program = Program.of(self.ready.problem)
        states = self.folder / "checkpoints"
        terms = Terms(self.ready.places, 0, self.folder / "trials", program=program, states=states)
        evaluator = Evaluator(terms, group, self.watch, leader, is_watched=True)
        if leader is not None and program is not None and not self.files:
            self.files.append(list_files(Path()))
        evaluator(None if leader is None else lambda: assignment)
        if leader is not None and program is not None:
            self.files.append(list_files(Path()))
        seen = group.own_comm.gather(Seen.from_data(evaluator.seen))
        if leader is None or self._record is None or seen is None:
            return None
        evaluation = self._record.evaluations()[-1]
        mismatch = find_mismatch(evaluation.failure or "", seen)
        if mismatch is not None:
            evaluation = replace(evaluation, failure=mismatch.text)
        is_fine = mismatch is not None and mismatch.is_right
        return Outcome(evaluation, seen, leader.has_offered, is_fine, leader.saver.rejected)

    def _writer(self, record: Record) -> Writer:
        """Return a writer of the record, in this thread."""
        claims = Claims(record, self.ready.problem.space.distributions(), budget=0)  # nothing is claimed
        log, states = Log(self._files.printed), States(self._files.checkpoints)
        return Writer(record, claims, log, states, weights=BestWeights(self._files, record.objectives))

    def hand_over(self) -> Handed:
        """Hand the weights that were kept to `test`, if there is one, as a run does at its end; on the first rank.

        The result of `test` is not shown: test data are for the winner of a search.
        """
        problem, path = self.ready.problem, self._files.weights
        about = read_about(path)
        if about is None:
            return Handed()
        if not problem.file.has_test:
            return Handed(about.names)
        began, failure, has_metrics = time.monotonic(), "", False
        for part in test_in_trainer(self.ready.slot.fork, about.params, path):
            has_metrics |= part["kind"] == "metrics"
            failure = part["text"] if part["kind"] == "failure" else failure
        if failure or not has_metrics:
            return Handed(about.names, failure or "it gave no metrics")
        return Handed(about.names, seconds=time.monotonic() - began)
