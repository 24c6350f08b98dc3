"""The one writer of a run that is made up, and what each leader has of it; in one process, without MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hpo import SearchSpace
from hpo.evaluation.weights_saver import WeightsSaver
from hpo.process.channel import Message
from hpo.store.cached_storage import CachedStorage
from hpo.store.checkpoints import CheckpointStore
from hpo.store.claims import Claims
from hpo.store.evaluations import Assignment
from hpo.store.output_log import OutputLog
from hpo.store.pruning import Pruner
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import open_storage
from hpo.store.study_client import DirectConnection, StudyClient, WriterConnection
from hpo.store.study_writer import StudyWriter
from hpo.store.successive_halving import HalvingSchedule
from hpo.store.weights import BestWeights
from hpo.trainer.snapshot_buffer import SnapshotBuffer
from tests.support.runs import SPACE


def make_writer(
    record: Record,
    folder: Path,
    budget: int = 999,
    *,
    space: SearchSpace = SPACE,
    mirror: CachedStorage | None = None,
    halving: HalvingSchedule | None = None,
    pruner: Pruner | None = None,
) -> StudyWriter:
    """Return what writes the record of a search in a run directory."""
    files = RunDir(folder)
    claims = Claims(record, space.make_distributions(), budget, halving=halving)
    weights = BestWeights(files, record.objectives)
    return StudyWriter(
        record,
        claims,
        OutputLog(files.get_log_path),
        CheckpointStore(files.checkpoints),
        mirror,
        pruner,
        halving,
        weights=weights,
    )


def open_mirrored(storage: str | Path, study: str = "run") -> tuple[Record, CachedStorage]:
    """Open a record as a run's writer does, and return it with the mirror that shows it."""
    opened = open_storage(storage)
    mirror = CachedStorage(opened, opened.get_study_id_from_name(study))
    return Record(mirror, study), mirror


class DelayedLine:
    """The line to a writer that commits when it likes, as over MPI; what is told arrives with the next question."""

    def __init__(self, writer: StudyWriter) -> None:
        self._writer = writer
        self._posted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def notify(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something, later."""
        self._posted.append((name, arguments, options))

    def call(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Let the writer do something after all that it was told, and return its answer."""
        assert limit > 0
        self.deliver()
        return self._writer(name, *arguments, **options)

    def deliver(self) -> None:
        """Let what was told arrive."""
        posted, self._posted = self._posted, []
        for name, arguments, options in posted:
            self._writer(name, *arguments, **options)


def make_trainer_stub(weights: Mapping[str, Tensor]) -> Any:
    """Return what stands for a trainer that has copied these weights, and writes them when it is asked to."""
    keeper = SnapshotBuffer({}, True, None, None)
    keeper.offer_weights(weights)
    kept = keeper.copy_requested(Message("verdict", {"has_loss": True, "is_best": True, "keep": True, "save": False}))
    assert kept is not None
    assert kept["has_weights"]

    def write_weights(path: str, about: Mapping[str, str]) -> str:
        return str(keeper.write_weights(path, about)["error"])

    return SimpleNamespace(write_weights=write_weights)


class LeaderStub:
    """What the leader of a worker does but for decisions: it claims, records, and keeps the weights of the best."""

    def __init__(
        self, writer: StudyWriter, line: WriterConnection | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.recorder = StudyClient(line or DirectConnection(writer), writer.record.objectives)
        self.keeper = WeightsSaver(self.recorder, settings or {})

    def begin(self, params: Mapping[str, Any]) -> Assignment:
        """Claim these hyperparameters, and nothing else waits; news are heard before, by which leaders breed."""
        self.recorder.read_changes()
        assignment = self.recorder.claim(params, island=0, worker=0, generation=0)
        assert assignment is not None
        return assignment

    def is_wanted(self, assignment: Assignment, loss: float, metrics: Mapping[str, float] | None = None) -> bool:
        """Tell whether weights would be kept, by the latest news."""
        self.recorder.read_changes()
        return self.keeper.is_wanted(assignment, loss, metrics or {})

    def complete(
        self,
        assignment: Assignment,
        loss: float,
        weights: Mapping[str, Tensor],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Complete an evaluation whose last loss is its lowest, and return whether its weights were wanted then."""
        is_wanted = self.is_wanted(assignment, loss, metrics)
        trainer = make_trainer_stub(weights) if is_wanted else None
        self.recorder.complete(assignment, loss, 1.0, metrics or {})
        if trainer is not None:
            self.keeper.save_weights(assignment, trainer)
        return is_wanted
