"""Evaluate one individual several times, as a run does, and trace each training."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpo.evaluation.attempt import Attempt, EvaluationContext
from hpo.evaluation.evaluator import Evaluator
from hpo.evaluation.leader import Checkpointer, Leader, Limits
from hpo.evaluation.program import Program
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_client import run_test_in_trainer
from hpo.evaluation.verdict import State, Verdict
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.process.linux import find_output_files
from hpo.process.messages import Report
from hpo.process.trace import Trace
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.rank_watch import RankWatch
from hpo.run.prepare_rank import RankState
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.output_log import OutputLog
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.study_client import StudyClient
from hpo.store.study_writer import StudyWriter
from hpo.store.weights import BestWeights, read_weights

MAX_LOSSES = 3

_MAX_FILES = 20_000  # in a snapshot
# Another process than an ancestor of a rank writes it, by its default name.
_SLURM_OUTPUT = re.compile(r"slurm-\d+.*\.out")
_EXCLUDED_FOLDERS = ("__pycache__", ".git")

# Size and modification time of each file, by its relative path.
FileSnapshot = Mapping[str, tuple[int, int]]

# torch's check of collectives (`hpo.trainer.trainer_group`) also rejects some correct collectives.
# It compares shapes, though only the number of elements matters. It also counts each send and recv
# as a collective (torch 2.15), as between the stages of a pipeline.
_MISMATCH = "mismatch between collectives"
# A message names the collective of its own rank first. The other rank's collective in it is wrong
# (torch 2.15).
_COLLECTIVE_PATTERN = re.compile(
    r"is running collective: CollectiveFingerPrint\(SequenceNumber=\d+,? ?OpType=(\w+)"
    r"(?:, TensorShape=(\[[^\]]*\]))?(?:, TensorDtypes=(\w+))?"
)


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one evaluation of a check."""

    evaluation: Evaluation
    """The evaluation as it is recorded, with its losses or its failure."""
    traces: list[Trace]
    """The trace of the training on each rank, in the order of ranks."""
    has_offered_weights: bool
    """Whether the objective has offered weights."""
    is_false_alarm: bool
    """Whether it failed only since torch's check of collectives rejected correct ones."""
    rejection: str
    """Why the evaluation could not resume from its checkpoint; empty unless it tried and failed."""

    reports: int
    """The number of losses that a program has reported, also after the last that counts."""
    remarks: Sequence[str]
    """The warnings that a search would print about the evaluation."""

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

    has_test: bool
    """Whether the search file has a function `test`."""
    weight_names: list[str] | None = None
    """The names of the kept weights; None if no weights were kept."""
    failure: str = ""
    """The reason why `test` failed; empty if it succeeded."""
    seconds: float | None = None
    """The duration of `test`; None if it was not called or failed."""


class _FirstLossCheckpointer(Checkpointer):
    """Keeps the checkpoint of the first loss of an evaluation, also after its end."""

    rejection = ""
    _is_first = True

    def is_copy_due(self) -> bool:
        """Return True at the first call, so that only the checkpoint of the first loss is copied.

        The leader calls this after each loss for which the objective has saved a checkpoint.
        """
        is_first = self._is_first
        self._is_first = False
        return is_first

    def reject_checkpoint(self, assignment: Assignment, reason: str) -> None:
        """Record why an evaluation cannot resume, and discard its checkpoint: it restarts."""
        self.rejection = reason
        super().discard_checkpoint(assignment)

    def discard_checkpoint(self, assignment: Assignment) -> None:
        """Do nothing, so that the checkpoint of an ended evaluation is kept."""


@dataclass
class _ShortLeader(Leader):
    """A leader that ends each evaluation after at most `MAX_LOSSES` losses."""

    has_offered: bool = False
    pauses: bool = False
    """Whether it pauses the evaluation after the first loss."""
    reports: int = 0
    remarks: list[str] = field(default_factory=list)

    def warn_once(self, assignment: Assignment, text: str, kind: str = "") -> None:  # noqa: ARG002
        """Keep a warning, which becomes a finding."""
        self.remarks.append(text)

    def finish_evaluation(self, attempt: Attempt, seconds: float) -> None:
        """Record an ended evaluation, and the number of its reports."""
        self.reports = attempt.reports
        super().finish_evaluation(attempt, seconds)

    def decide(self, attempt: Attempt, report: Report, printed: str) -> Verdict:
        """Return the verdict of `Leader.decide`, but end after `MAX_LOSSES` losses, or pause."""
        self.has_offered |= report.offers_weights
        decided = super().decide(attempt, report, printed)
        if self.pauses and decided.state == State.RUNNING:
            return replace(decided, state=State.PAUSED)
        is_last = decided.loss is not None and len(attempt.losses) + 1 >= MAX_LOSSES
        return replace(decided, is_last=True) if is_last else decided


@dataclass
class CheckEvaluator:
    """Evaluates one individual several times, on ranks that form one worker each time."""

    ready: RankState
    watch: RankWatch
    folder: Path
    """Where the evaluations are recorded."""
    params: Mapping[str, Any] | None
    """The hyperparameters on the leader; None on its other ranks."""
    patience: float
    """Maximum seconds for which a rank waits for its peers."""
    limits: Limits = field(default_factory=Limits)
    worker: int = 0
    """Index of the worker that the ranks form."""
    file_snapshots: list[FileSnapshot] = field(default_factory=list, init=False)
    """On the first rank, of a program: the working directory first, and after each evaluation."""

    def __post_init__(self) -> None:
        self._run_dir = RunDir(self.folder)
        self._program = Program.from_problem(self.ready.problem)
        self._context = EvaluationContext(
            self.ready.user_frames, 0, self._run_dir, program=self._program, is_traced=True
        )
        self.has_own_files = self._program is not None and self._program.script.can_resume
        if self.params is not None:
            space = self.ready.problem.space.describe()
            objectives = self.ready.problem.file.objectives
            Record.create(self._run_dir.journal, "check", space, objectives=objectives)

    def form_worker(self, comm: SleepingComm) -> RankGroup:
        """Make the ranks of `comm` one worker. Collective: call on all of them."""
        self.watch.join_worker(comm, self.worker, self.patience)
        return RankGroup(comm, self.ready.place, self.worker, self.patience, self.ready.slot)

    def evaluate(
        self,
        group: RankGroup,
        keeps_weights: bool = False,
        pauses: bool = False,
        previous: CheckOutcome | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> CheckOutcome | None:
        """Evaluate the individual. Collective: call on all ranks of the worker.

        Args:
            pauses: Whether to pause the evaluation after its first loss.
            previous: The evaluation resumes from the checkpoint of the first loss of this outcome.
                None starts from the beginning.
            params: Other hyperparameters than those of this object.

        Returns:
            The outcome on the leader; None on other ranks.
        """
        if self.params is None:
            evaluator = Evaluator(self._context, group, self.watch)
            evaluator.follow()
            group.comm.gather(Trace(**evaluator.trace))
            return None
        if not self.file_snapshots:
            self._take_file_snapshot()
        problem = self.ready.problem
        objectives = problem.file.objectives
        checkpoints = CheckpointStore(self._run_dir.checkpoints)
        # A check claims nothing, so the writer needs no `claims`.
        writer = StudyWriter(
            self._run_dir.journal,
            "check",
            OutputLog(self._run_dir.get_log_path),
            checkpoints,
            weights=BestWeights(self._run_dir, objectives),
        )
        send = writer.answer_durably
        study = StudyClient(send, send, objectives)
        saver = WeightsSaver(study, problem.setting_values) if keeps_weights else None
        checkpointer = _FirstLossCheckpointer(checkpoints, every=0.0)
        leader = _ShortLeader(study, self.limits, lambda _: None, checkpointer, saver)
        leader.pauses = pauses
        evaluator = Evaluator(self._context, group, self.watch, leader)
        origin = {"island": 0, "worker": 0, "generation": 0}
        if previous is not None:
            origin["retry_of"] = previous.evaluation.trial
        distributions = problem.space.make_distributions()
        assignment = writer.start_trial(params or self.params, distributions, origin)
        evaluator.evaluate(assignment)
        evaluator.end()
        self._take_file_snapshot()
        traces: list[Trace] = group.comm.gather(Trace(**evaluator.trace)) or []
        evaluation = writer.read_evaluations()[-1]
        mismatch, is_false_alarm = find_mismatch(evaluation.failure or "", traces)
        if mismatch:
            evaluation = replace(evaluation, failure=mismatch)
        return CheckOutcome(
            evaluation,
            traces,
            leader.has_offered,
            is_false_alarm,
            checkpointer.rejection,
            leader.reports,
            leader.remarks,
        )

    def _take_file_snapshot(self) -> None:
        if self._program is not None:
            self.file_snapshots.append(read_file_snapshot(Path()))

    def test_weights(self) -> WeightsTest:
        """On the first rank, call the user's `test` with the kept weights, as a run does.

        The result does not contain the metrics, since test data are for the winner of a search.
        """
        has_test = self.ready.problem.file.has_test
        path = self._run_dir.best_weights
        info = read_weights(path, with_tensors=False)
        if info is None:
            return WeightsTest(has_test)
        if not has_test:
            return WeightsTest(has_test, info.names)
        began = time.monotonic()
        messages = list(run_test_in_trainer(self.ready.slot.fork_other, info.params, path))
        failures = [message["text"] for message in messages if message["kind"] == "failure"]
        if not any(message["kind"] == "metrics" for message in messages):
            failures.append("it gave no metrics")
        if failures:
            return WeightsTest(has_test, info.names, failures[0])
        return WeightsTest(has_test, info.names, seconds=time.monotonic() - began)


def read_file_snapshot(folder: Path) -> FileSnapshot:
    """Return the size and the modification time of the first 20,000 files below a folder.

    The output of this job, which a shell may have redirected to a file, is left out.
    """
    outputs = find_output_files()
    snapshot: dict[str, tuple[int, int]] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _EXCLUDED_FOLDERS)
        for name in sorted(names):
            path = Path(parent, name)
            try:
                status = path.lstat()
            except OSError:  # The file was removed in the meantime.
                continue
            if (status.st_dev, status.st_ino) in outputs or _SLURM_OUTPUT.fullmatch(name):
                continue
            snapshot[str(path.relative_to(folder))] = status.st_size, status.st_mtime_ns
            if len(snapshot) == _MAX_FILES:
                return snapshot
    return snapshot


def find_mismatch(failure: str, traces: Sequence[Trace]) -> tuple[str, bool]:
    """Return the ranks' collectives in words, and whether they are correct nevertheless.

    The text is empty unless torch's check of collectives has failed.
    """
    if _MISMATCH not in failure:
        return "", False
    collectives = [_find_collective(trace.failures) for trace in traces]
    descriptions = ", ".join(
        f"rank {rank} {collective}{f' at {traces[rank].place}' if traces[rank].place else ''}"
        for rank, collective in enumerate(collectives)
        if collective
    )
    signatures = {_compute_signature(collective) for collective in collectives if collective}
    return f"the ranks are in different collectives: {descriptions}", len(signatures) == 1


def _find_collective(messages: Sequence[str]) -> str:
    """Return the collective that a rank's exceptions name; an empty text if none does."""
    for message in messages:
        match = _COLLECTIVE_PATTERN.search(message) if _MISMATCH in message else None
        if match is not None:
            kind, shape, dtype = match.groups()
            # Only a barrier has no tensor.
            return f"{kind.lower()} of {dtype.lower()} {shape}" if shape and dtype else "barrier"
    return ""


def _compute_signature(collective: str) -> tuple[str, int]:
    """Return the kind and data type of a collective as a text, and its number of elements."""
    kind, _, shape = collective.rpartition(" [")
    return kind or collective, math.prod(map(int, re.findall(r"\d+", shape))) if kind else 0
