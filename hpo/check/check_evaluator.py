"""Evaluate one individual several times for `hpo check`, as a run does, and record a trace of each training.

A trace has numbers such as steps, norms of gradients, and memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.check.collective_mismatch import find_mismatch
from hpo.check.file_snapshot import FileSnapshot, take_file_snapshot
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.checkpointer import Checkpointer
from hpo.evaluation.evaluator import EvaluationContext, Evaluator
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.program_command import Program
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_tasks import run_test_in_trainer
from hpo.evaluation.verdict import Verdict
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.process.messages import Report
from hpo.process.trace import Trace
from hpo.ranks.rank_watch import RankWatch
from hpo.run.prepare_rank import RankState
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.output_log import OutputLog
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.study_client import DirectConnection, StudyClient
from hpo.store.study_writer import Claims, StudyWriter
from hpo.store.weights import BestWeights, read_weights_info

MAX_LOSSES = 3


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one evaluation of a check."""

    evaluation: Evaluation
    """The evaluation as it is recorded, with its losses or its failure."""
    traces: list[Trace]
    """The trace of the training on each rank, in the order of ranks."""
    has_offered_weights: bool
    """Whether the objective has offered weights."""
    is_false_alarm: bool = False
    """Whether the evaluation failed only because torch's check of collectives has rejected correct collectives."""
    rejection: str = ""
    """The reason why the evaluation could not resume from its checkpoint; empty if it resumed, or had no checkpoint."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.traces)

    @property
    def failure(self) -> str:
        """The reason why the evaluation failed; empty if it succeeded."""
        return self.evaluation.failure or ""

    @property
    def losses(self) -> list[float]:
        """The losses in their order."""
        return list(self.evaluation.curve.values())


@dataclass(frozen=True)
class WeightsTest:
    """The result of calling the user's `test` with the weights that a run would keep."""

    weight_names: list[str] | None = None
    """The names of the kept weights; None if no weights were kept."""
    failure: str = ""
    """The reason why `test` failed; empty if it succeeded."""
    seconds: float | None = None
    """The duration of `test`; None if it was not called or failed."""


class _FirstLossCheckpointer(Checkpointer):
    """Keeps the checkpoint that belongs to the first loss of an evaluation, also after the evaluation has ended."""

    def __init__(self, states: CheckpointStore) -> None:
        super().__init__(states, every=0.0)
        self.rejection = ""
        self._is_first = True

    def is_copy_due(self) -> bool:
        """Return True at the first call, so that only the checkpoint of the first loss is copied.

        The leader calls this after each loss for which the objective has saved a checkpoint.
        """
        is_first, self._is_first = self._is_first, False
        return is_first

    def reject_checkpoint(self, assignment: Assignment, reason: str) -> None:
        """Record why an evaluation cannot resume, and discard its checkpoint, so that it starts from the beginning."""
        self.rejection = reason
        super().discard_checkpoint(assignment)

    def discard_checkpoint(self, assignment: Assignment) -> None:
        """Do nothing, so that the checkpoint of an ended evaluation is kept."""


class _ShortLeader(Leader):
    """A leader that ends each evaluation after at most `MAX_LOSSES` losses."""

    def __init__(
        self,
        recorder: StudyClient,
        limits: Limits,
        keeper: WeightsSaver | None,
        saver: _FirstLossCheckpointer,
    ) -> None:
        super().__init__(recorder, limits, lambda _: None, saver, keeper)
        self.checkpointer = saver
        self.has_offered = False

    def decide(self, attempt: Attempt, report: Report, printed: str) -> Verdict:
        """Return the verdict of `Leader.decide` on a report, but end the evaluation after `MAX_LOSSES` losses."""
        self.has_offered |= report.offers_weights
        decided = super().decide(attempt, report, printed)
        is_last = decided.loss is not None and len(attempt.losses) + 1 >= MAX_LOSSES
        return replace(decided, is_last=True) if is_last else decided


@dataclass
class CheckEvaluator:
    """Evaluates one individual several times on the ranks of a worker, and records the evaluations in `folder`.

    `params` has the hyperparameters on the leader, and is None on its other ranks.
    """

    ready: RankState
    watch: RankWatch
    folder: Path
    params: Mapping[str, Any] | None
    limits: Limits = field(default_factory=Limits)
    _record: Record | None = field(default=None, init=False)
    file_snapshots: list[FileSnapshot] = field(default_factory=list, init=False)
    """Snapshots of the files below the working directory, taken on the first rank if the objective is a program.

    The first snapshot is taken before the first evaluation, and a further one after each evaluation.
    """

    def __post_init__(self) -> None:
        if self.params is not None:
            self._run_dir = RunDir(self.folder)
            problem = self.ready.problem
            self._record = Record.create(
                self._run_dir.journal, "check", problem.space.describe(), objectives=problem.file.objectives
            )

    def evaluate(
        self, group: RankGroup, keeps_weights: bool = False, previous: CheckOutcome | None = None
    ) -> CheckOutcome | None:
        """Evaluate the individual, and return the outcome on the leader. Collective: call on all ranks of the worker.

        Args:
            group: The ranks of the worker. Call ``watch.join_worker`` with these ranks before.
            keeps_weights: Whether to keep the weights that the objective offers.
            previous: An earlier outcome. The evaluation resumes from the checkpoint of its first loss. None starts from
                the beginning.

        Returns:
            The outcome on the leader; None on other ranks.
        """
        leader, assignment = None, None
        if self._record is not None and self.params is not None:
            problem = self.ready.problem
            recorder = StudyClient(DirectConnection(self._make_writer(self._record)), self._record.objectives)
            keeper = WeightsSaver(recorder, problem.setting_values) if keeps_weights else None
            leader = _ShortLeader(
                recorder, self.limits, keeper, _FirstLossCheckpointer(CheckpointStore(self._run_dir.checkpoints))
            )
            origin = {"island": 0, "worker": 0, "generation": 0}
            assignment = self._record.start_trial(self.params, problem.space.make_distributions(), origin)
            if previous is not None:
                assignment = replace(assignment, root=previous.evaluation.trial)
        program = Program.from_problem(self.ready.problem)
        context = EvaluationContext(self.ready.user_frames, 0, RunDir(self.folder), program=program)
        evaluator = Evaluator(context, group, self.watch, leader, is_traced=True)
        if leader is not None and program is not None and not self.file_snapshots:
            self.file_snapshots.append(take_file_snapshot(Path()))
        if assignment is not None:
            evaluator.evaluate(assignment)
            evaluator.end()
        else:
            evaluator.follow()
        if leader is not None and program is not None:
            self.file_snapshots.append(take_file_snapshot(Path()))
        traces = group.comm.gather(Trace.from_data(evaluator.trace))
        if leader is None or self._record is None or traces is None:
            return None
        evaluation = self._record.read_evaluations()[-1]
        mismatch = find_mismatch(evaluation.failure or "", traces)
        if mismatch is not None:
            evaluation = replace(evaluation, failure=mismatch.text)
        is_false_alarm = mismatch is not None and mismatch.is_false_alarm
        return CheckOutcome(evaluation, traces, leader.has_offered, is_false_alarm, leader.checkpointer.rejection)

    def _make_writer(self, record: Record) -> StudyWriter:
        claims = Claims(record, self.ready.problem.space.make_distributions(), budget=0)  # A check claims nothing.
        log, states = OutputLog(self._run_dir.get_log_path), CheckpointStore(self._run_dir.checkpoints)
        return StudyWriter(record, claims, log, states, weights=BestWeights(self._run_dir, record.objectives))

    def test_weights(self) -> WeightsTest:
        """On the job's first rank, call the user's `test` with the kept weights, as a run does at its end.

        The result does not contain the metrics, since test data are for the winner of a search.
        """
        problem, path = self.ready.problem, self._run_dir.best_weights
        info = read_weights_info(path)
        if info is None:
            return WeightsTest()
        if not problem.file.has_test:
            return WeightsTest(info.names)
        began, failure, has_metrics = time.monotonic(), "", False
        for part in run_test_in_trainer(self.ready.slot.fork_other, info.params, path):
            has_metrics |= part["kind"] == "metrics"
            failure = part["text"] if part["kind"] == "failure" else failure
        if failure or not has_metrics:
            return WeightsTest(info.names, failure or "it gave no metrics")
        return WeightsTest(info.names, seconds=time.monotonic() - began)
