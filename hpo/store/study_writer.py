"""The one that writes a run's record: what the leaders of all workers ask it and tell it, and what is new to them."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hpo.process import clock
from hpo.store.changes import StudyChanges
from hpo.store.elastic_candidates import ExpandableEvaluation, estimate_losses_left, find_expandable
from hpo.store.evaluations import SHARED_FIELDS

if TYPE_CHECKING:
    from hpo.store.cached_storage import CachedStorage
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.claims import Claims
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.inheritance import InheritancePolicy
    from hpo.store.output_log import OutputLog
    from hpo.store.pruning import Pruner, PruningDecision
    from hpo.store.record import Record
    from hpo.store.successive_halving import HalvingSchedule
    from hpo.store.weights import BestWeights, ConfirmedWeights

_RECORD_METHODS = frozenset(
    (
        *(
            "report",
            "record_resume",
            "record_checkpoint",
            "record_worker_group",
            "clear_inheritance",
            "complete",
            "prune",
            "fail",
            "interrupt",
        ),
        "count_initial_failures",
    )
)
# The next commit is waited for a tenth of a second, since file systems take the same time for many lines as for one,
# and four times as long as the last one took: who asks meanwhile is answered at once.
_MIN_COMMIT_INTERVAL = 0.1
_COMMIT_TIME_FACTOR = 4.0


@dataclass
class StudyWriter:
    """Writes to the record, and answers leaders; in one thread, which nobody else may be in.

    Every question is answered at once. With a `mirror`, which the record is then of, what was told is durable once it
    is committed, by `settle` or with the next claim, and without one at once. It is not in `settled` before it is.
    """

    record: Record
    claims: Claims
    log: OutputLog
    checkpoints: CheckpointStore
    cached_storage: CachedStorage | None = None
    pruner: Pruner | None = None
    halving: HalvingSchedule | None = None
    inheritance: InheritancePolicy | None = None
    weights: BestWeights | ConfirmedWeights | None = None
    _changes: StudyChanges = field(default_factory=StudyChanges, init=False)
    _pickled_changes: list[bytes] = field(default_factory=list, init=False)
    _uncommitted: list[Evaluation] = field(default_factory=list, init=False)
    _committed: deque[Evaluation] = field(default_factory=deque, init=False)
    _has_changed: bool = field(default=False, init=False)
    _next_commit_at: float = field(default=0.0, init=False)
    _known_warnings: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._collect_changes()
        self._publish()

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Collect what is told inside ``with``, and commit it together."""
        with self.cached_storage.batch_writes() if self.cached_storage else nullcontext():
            yield
            self.commit()

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Do what a leader says by the name of a method, and return the answer."""
        self._has_changed = True
        method: Callable[..., Any] = getattr(self.record if name in _RECORD_METHODS else self, name)
        return method(*arguments, **options)

    def commit_if_due(self) -> None:
        """Commit what was told, unless the last commit was just now."""
        if clock.now() >= self._next_commit_at:
            self.commit()

    def commit(self) -> None:
        """Make durable what was told so far."""
        began = clock.now()
        if self.cached_storage and self.cached_storage.commit():
            now = clock.now()
            self._next_commit_at = now + max(_MIN_COMMIT_INTERVAL, _COMMIT_TIME_FACTOR * (now - began))
        self.log.write()
        if self._has_changed:
            self._has_changed = False
            self._collect_changes()
            self._publish()

    def take_committed(self) -> list[Evaluation]:
        """Return what has started, ended or been promoted, durably, since the last call; for one other thread."""
        news = []
        while self._committed:
            news.append(self._committed.popleft())
        return news

    # What leaders ask, and tell

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start an evaluation as `Claims.claim` does; a new one may inherit from one of the best of its island."""
        parent = self.inheritance.find_parent(params, attributes["island"]) if self.inheritance else None
        return self._commit_start(self.claims.claim(params, parent, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start an evaluation that has waited, or was paused, as `Claims.claim_waiting` does."""
        return self._commit_start(self.claims.claim_waiting(**attributes))

    def _commit_start(self, assignment: Assignment | None) -> Assignment | None:
        """Commit the start of an evaluation: if it kills the job at once, it has to be known that it was in flight."""
        if assignment is not None:
            self.commit()
        return assignment

    def read_changes(self, since: int) -> tuple[bytes, int]:
        """Return what is new behind the first so many news, pickled one by one, and how many there are by now."""
        self._collect_changes()
        return b"".join(self._pickled_changes[since:]), len(self._pickled_changes)

    def decide_pruning(self, assignment: Assignment, losses: int, values: Sequence[float] = ()) -> PruningDecision:
        """Let the pruner judge an evaluation by its losses, and forget the states of those that fall out by that."""
        assert self.pruner is not None
        judgement = self.pruner.decide_pruning(self.record, assignment, losses, values)
        self._drop_checkpoints(judgement.eliminated)
        return judgement

    def log_output(self, trial: int, text: str) -> None:
        """Keep what an evaluation has printed."""
        self.log.add(trial, text)

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether weights of this loss are to be kept, of an evaluation that confirms the best."""
        self._collect_changes()
        return cast("ConfirmedWeights", self.weights).should_keep(trial, loss)

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files that are to hold the weights of an evaluation which is complete."""
        self._collect_changes()
        return [str(path) for path in self.weights.list_wanted_files(trial)] if self.weights else []

    def move_weights(self, trial: int) -> None:
        """Put weights that a leader has written in their place, if they are still wanted there."""
        if self.weights:
            self.commit()  # the best on disk has its weights, also after a death in between
            self.weights.move_draft(trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return any(one.curve for one in self.record.read_evaluations())

    def is_first_warning(self, text: str) -> bool:
        """Return whether no worker has asked this about the same text before."""
        is_first = text not in self._known_warnings
        self._known_warnings.add(text)
        return is_first

    def read_previous_losses(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that a trial repeats; none if it repeats none."""
        evaluations = self.record.read_evaluations()
        earlier = evaluations[trial].retry_of
        if earlier is None:
            return [], 0.0
        curve, seconds = evaluations[earlier].curve, evaluations[earlier].seconds
        return [curve[step] for step in sorted(curve)], 0.0 if math.isnan(seconds) else seconds

    def read_checkpoint_step(self, trial: int) -> int:
        """Return after how many losses an evaluation was saved last."""
        return self.record.read_evaluations()[trial].checkpoint_step

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Tell whether others may inherit from an evaluation that ends with this loss."""
        return self.inheritance is not None and self.inheritance.is_parent_candidate(trial, loss)

    def drop_superseded(self, trial: int) -> None:
        """Forget the states of those of whom nobody will inherit any more, on the island of an evaluation."""
        if self.inheritance:
            self._drop_checkpoints(self.inheritance.find_superseded(trial))

    def find_expandable(self) -> list[ExpandableEvaluation]:
        """Return the evaluations that others may help."""
        return find_expandable(self.halving, self.record.read_evaluations(), time.time()) if self.halving else []

    def estimate_losses_left(self, losses: int) -> int:
        """Return how many losses an evaluation will still have after so many."""
        return estimate_losses_left(self.record.read_evaluations(), losses)

    def _drop_checkpoints(self, roots: Sequence[int]) -> None:
        if roots:
            self.commit()  # nobody goes on from them any more, also after a death in between
        for root in roots:
            self.checkpoints.remove_root(root)

    def _collect_changes(self) -> None:
        for one in self._changes.find_changes(self.record.read_trials()):
            self._pickled_changes.append(pickle.dumps(tuple(getattr(one, name) for name in SHARED_FIELDS)))
            self._uncommitted.append(one)
            if self.weights:
                self.weights.update(one)

    def _publish(self) -> None:
        self._committed.extend(self._uncommitted)
        self._uncommitted.clear()
