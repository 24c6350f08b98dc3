"""Make the writer of a study and a leader in one process, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hpo import SearchSpace
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.cached_storage import CachedStorage
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Assignment
from hpo.store.output_log import OutputLog
from hpo.store.pruning import HalvingSchedule, Pruner
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import open_storage
from hpo.store.study_client import StudyClient
from hpo.store.study_writer import Claims, StudyWriter
from hpo.store.weights import BestWeights
from tests.support.checkpoints import make_drafts
from tests.support.runs import SPACE


def make_writer(
    record: Record,
    folder: Path,
    budget: int = 999,
    *,
    space: SearchSpace = SPACE,
    cached_storage: CachedStorage | None = None,
    halving: HalvingSchedule | None = None,
    pruner: Pruner | None = None,
) -> StudyWriter:
    """Return a writer of the study of a search. `folder` is the run directory."""
    files = RunDir(folder)
    writer = StudyWriter(
        cached_storage or record._storage,
        record.study.study_name,
        OutputLog(files.get_log_path),
        CheckpointStore(files.checkpoints),
        pruner,
        BestWeights(files, record.objectives),
    )
    writer.claims = Claims(writer, space.make_distributions(), budget, halving=halving)
    return writer


def make_client(writer: StudyWriter, objectives: Objectives = ONLY_LOSS) -> StudyClient:
    """Return a client whose calls are durable at once."""
    return StudyClient(writer.answer_durably, writer.answer_durably, objectives)


def open_cached(storage: str | Path, study: str = "run") -> tuple[Record, CachedStorage]:
    """Open a study as the writer of a run does, and return its record and its cached storage."""
    opened = open_storage(storage)
    cached_storage = CachedStorage(opened, opened.get_study_id_from_name(study))
    return Record(cached_storage, study), cached_storage


class DelayedClient(StudyClient):
    """A client that behaves as over MPI.

    Notifications reach the writer only with the next call. The writer decides when it commits.
    """

    def __init__(
        self,
        writer: StudyWriter,
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(self._send_call, self._queue, objectives, is_stopping)
        self._writer = writer
        self._notifications: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def _queue(self, name: str, *arguments: Any, **options: Any) -> None:
        self._notifications.append((name, arguments, options))

    def _send_call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.deliver()
        result = self._writer.answer(name, *arguments, **options)
        if name == "claim":  # As before each answer, but other changes wait for the next commit.
            self._writer.commit_if_due()
        return result

    def deliver(self) -> None:
        """Deliver all queued notifications to the writer."""
        notifications, self._notifications = self._notifications, []
        for name, arguments, options in notifications:
            self._writer.answer(name, *arguments, **options)


class LeaderStub:
    """A stub of a leader, which claims and records evaluations, and saves the best weights.

    It does not make the decisions of a leader, such as to prune an evaluation.
    """

    def __init__(
        self,
        writer: StudyWriter,
        client: StudyClient | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.recorder = client or make_client(writer, writer.objectives)
        self.keeper = WeightsSaver(self.recorder, settings or {})

    def begin(self, params: Mapping[str, Any]) -> Assignment:
        """Read all changes of the study, then claim an evaluation of `params`.

        No other trial may be waiting.
        """
        self.recorder.read_changes()
        assignment = self.recorder.claim(params, island=0, worker=0, generation=0)
        assert assignment is not None
        return assignment

    def is_wanted(
        self, assignment: Assignment, loss: float, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Read all changes, and return whether the weights of this evaluation would be kept."""
        self.recorder.read_changes()
        return self.keeper.is_wanted(assignment, loss, metrics or {})

    def complete(
        self,
        assignment: Assignment,
        loss: float,
        weights: Mapping[str, Tensor],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Complete an evaluation with its lowest loss, and return if its weights were wanted."""
        is_wanted = self.is_wanted(assignment, loss, metrics)
        self.recorder.notify.complete(assignment, loss, 1.0, metrics or {})
        if is_wanted:
            self.keeper.save_weights(assignment, make_drafts(weights))
        return is_wanted
