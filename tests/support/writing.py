"""The one writer of a run that is made up, and what each leader has of it; in one process, without MPI."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hpo import SearchSpace
from hpo.evaluation.keeper import WeightsKeeper
from hpo.process.channel import Message
from hpo.store.claims import Claims
from hpo.store.evaluations import Assignment
from hpo.store.log import Log
from hpo.store.mirror import Mirror
from hpo.store.pruning import Pruner
from hpo.store.record import Record
from hpo.store.recorder import Direct, Line, Recorder
from hpo.store.run_dir import RunDir
from hpo.store.rungs import Halving
from hpo.store.states import States
from hpo.store.storage import open_storage
from hpo.store.weights import BestWeights
from hpo.store.writer import Writer
from hpo.trainer.keeper import Keeper
from tests.support.runs import SPACE


def writer_of(
    record: Record,
    folder: Path,
    budget: int = 999,
    *,
    space: SearchSpace = SPACE,
    mirror: Mirror | None = None,
    halving: Halving | None = None,
    pruner: Pruner | None = None,
) -> Writer:
    """Return what writes the record of a search in a run directory."""
    files = RunDir(folder)
    claims = Claims(record, space.distributions(), budget, halving=halving)
    weights = BestWeights(files, record.objectives)
    return Writer(
        record, claims, Log(files.printed), States(files.checkpoints), mirror, pruner, halving, weights=weights
    )


def mirrored(storage: str | Path, study: str = "run") -> tuple[Record, Mirror]:
    """Open a record as a run's writer does, and return it with the mirror that shows it."""
    opened = open_storage(storage)
    mirror = Mirror(opened, opened.get_study_id_from_name(study))
    return Record(mirror, study), mirror


class Posted:
    """The line to a writer that commits when it likes, as over MPI; what is told arrives with the next question."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._posted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something, later."""
        self._posted.append((name, arguments, options))

    def ask(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Let the writer do something after all that it was told, and return its answer."""
        assert limit > 0
        self.arrive()
        return self._writer(name, *arguments, **options)

    def arrive(self) -> None:
        """Let what was told arrive."""
        posted, self._posted = self._posted, []
        for name, arguments, options in posted:
            self._writer(name, *arguments, **options)


def holding(weights: Mapping[str, Tensor]) -> Any:
    """Return what stands for a trainer that has copied these weights, and writes them when it is asked to."""
    keeper = Keeper({}, True, None, None)
    keeper.offer(weights)
    kept = keeper.settle(Message("verdict", {"has_loss": True, "is_best": True, "keep": True, "save": False}))
    assert kept is not None
    assert kept["has_weights"]

    def write_weights(path: str, about: Mapping[str, str]) -> str:
        return str(keeper.write_weights(path, about)["error"])

    return SimpleNamespace(write_weights=write_weights)


class Leading:
    """What the leader of a worker does but for decisions: it claims, records, and keeps the weights of the best."""

    def __init__(self, writer: Writer, line: Line | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.recorder = Recorder(line or Direct(writer), writer.record.objectives)
        self.keeper = WeightsKeeper(self.recorder, settings or {})

    def begin(self, params: Mapping[str, Any]) -> Assignment:
        """Claim these hyperparameters, and nothing else waits; news are heard before, by which leaders breed."""
        self.recorder.news()
        assignment = self.recorder.claim(params, island=0, worker=0, generation=0)
        assert assignment is not None
        return assignment

    def wants(self, assignment: Assignment, loss: float, metrics: Mapping[str, float] | None = None) -> bool:
        """Tell whether weights would be kept, by the latest news."""
        self.recorder.news()
        return self.keeper.wants(assignment, loss, metrics or {})

    def complete(
        self,
        assignment: Assignment,
        loss: float,
        weights: Mapping[str, Tensor],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Complete an evaluation whose last loss is its lowest, and return whether its weights were wanted then."""
        is_wanted = self.wants(assignment, loss, metrics)
        trainer = holding(weights) if is_wanted else None
        self.recorder.complete(assignment, loss, 1.0, metrics or {})
        if trainer is not None:
            self.keeper.keep(assignment, trainer)
        return is_wanted
