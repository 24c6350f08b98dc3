"""Write the study of a run for the leaders of all workers, and answer their calls."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from hpo.errors import DuplicateError
from hpo.process import clock
from hpo.store.crash_isolation import select_next_waiting
from hpo.store.evaluations import SHARED_FIELDS, Assignment, Evaluation
from hpo.store.pruning import HalvingSchedule, SuccessiveHalving
from hpo.store.record import Record

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from hpo.store.cached_storage import CachedStorage
    from hpo.store.changes import Follower
    from hpo.store.checkpoints import CheckpointStore
    from hpo.store.inheritance import InheritancePolicy
    from hpo.store.output_log import OutputLog
    from hpo.store.pruning import Pruner, PruningDecision
    from hpo.store.weights import BestWeights, ConfirmedWeights
    from hpo.store.worker_health import Claim, HealthGate


class Claims:
    """Start the trials of a run for its workers.

    No other process may start trials of the study. The budget limits the number of individuals that
    are trained. An individual counts once, even if it is retried or promoted. Imported individuals
    do not count.

    Args:
        distributions: Distributions of all parameters of the search space.
        budget: Maximum number of individuals to train.
        is_stopping: Function that returns whether the run is stopping. If it is, no trial starts.
        halving: Schedule by which paused trials are promoted; None if the pruner never pauses.

    Attributes:
        budget: Maximum number of individuals to train.
    """

    def __init__(
        self,
        record: Record,
        distributions: Mapping[str, BaseDistribution],
        budget: int,
        is_stopping: Callable[[], bool] = lambda: False,
        halving: HalvingSchedule | None = None,
    ) -> None:
        self.record = record
        self._distributions = dict(distributions)
        self.budget = budget
        self._is_stopping = is_stopping
        self._successive_halving = (
            SuccessiveHalving(halving, record.objectives) if halving else None
        )
        self._changes = record.follow()
        self._tried_params: set[frozenset[tuple[str, Any]]] = set()
        self._ended: set[int] = set()  # Trials that count against the budget.
        self._unfinished: dict[int, Evaluation] = {}

    def claim(
        self, params: Mapping[str, Any], inherits: int | None = None, **attributes: Any
    ) -> Assignment | None:
        """Start the next trial of a worker, and return its assignment.

        A waiting trial comes first. Next comes the promotion of a paused trial, whose individual is
        then trained further. If there is neither, a new individual starts.

        Args:
            params: Hyperparameters of the new individual.
            inherits: Trial from whose checkpoint the new individual starts; None to start without a
                checkpoint.
            attributes: Attributes to record for the trial that starts, such as its worker.

        Returns:
            The assignment (the trial to run); None if the run is stopping, or if the budget allows
            no new individual.

        Raises:
            DuplicateError: If the study already has a trial with these hyperparameters.
        """
        return self._claim(params, attributes, {} if inherits is None else {"inherits": inherits})

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start a waiting trial.

        If no waiting trial may start, promote a paused one (train it further). Waiting trials whose
        individual has not crashed start first. Of the paused trials to promote, the best at the
        highest rung is promoted.

        Args:
            attributes: Attributes to record for the trial that starts, such as its worker.

        Returns:
            The assignment (the trial to run); None if neither is possible.
        """
        return self._claim(None, attributes, {})

    def _claim(
        self,
        params: Mapping[str, Any] | None,
        attributes: Mapping[str, Any],
        new_attributes: Mapping[str, Any],
    ) -> Assignment | None:
        if self._is_stopping():
            return None
        self._update()
        unfinished = self._unfinished.values()
        waiting = [evaluation for evaluation in unfinished if evaluation.state == "waiting"]
        running = [evaluation for evaluation in unfinished if evaluation.state == "running"]
        started = len(self._ended) + sum(evaluation.tests is None for evaluation in running)
        is_last = params is None or started + len(waiting) >= self.budget
        paused = self._find_promotable()
        if waiting and started < self.budget:
            trial = select_next_waiting(waiting, running, is_last and not paused)
            if trial is not None:
                return self.record.start_waiting(trial, attributes)
        if paused:
            return self.record.promote(paused[0], attributes)
        if params is None or is_last:
            return None
        if frozenset(params.items()) in self._tried_params:
            raise DuplicateError
        return self.record.start_trial(
            params, self._distributions, {**attributes, **new_attributes}
        )

    def _find_promotable(self) -> list[Evaluation]:
        if self._successive_halving is None:
            return []
        return self._successive_halving.update(self.record.read_evaluations()).find_promotable()

    def _update(self) -> None:
        for evaluation in self._changes.read():
            self._unfinished.pop(evaluation.trial, None)
            self._ended.discard(evaluation.trial)
            if evaluation.state in ("running", "waiting"):
                self._unfinished[evaluation.trial] = evaluation
            elif evaluation.counts_for_budget:
                self._ended.add(evaluation.trial)
            if evaluation.tests is None:
                self._tried_params.add(frozenset(evaluation.params.items()))


# The time between two commits is at least a tenth of a second, since file systems write many lines
# as fast as one. It is also four times the duration of the last commit, so that leaders are
# answered at once most of the time.
_MIN_COMMIT_INTERVAL = 0.1
_COMMIT_TIME_FACTOR = 4.0


@dataclass
class StudyWriter:
    """Write the record of a run, and answer the calls of leaders, in one thread.

    Calls are answered at once. A change is durable when it is on disk. Without a cached storage,
    each change is durable at once. With a cached storage, changes become durable at the next
    commit: in `commit`, in `commit_if_due`, or when an evaluation starts. `take_committed` returns
    only durable changes.

    Attributes:
        record: Record of the run; it uses `cached_storage` if there is one.
        claims: Starts trials within the budget of the run.
        log: Output of the evaluations.
        checkpoints: Checkpoints of the evaluations.
        cached_storage: Storage that collects changes for the next commit; None to write each change
            at once.
        pruner: Pruner of the run; None without one.
        inheritance: Selects the checkpoints from which individuals start; None without population
            based training.
        weights: Selects the evaluations whose weights are kept; None if no weights are kept.
        health_gate: Keeps broken workers from claiming trials; None if no worker is suspected.
    """

    record: Record
    claims: Claims
    log: OutputLog
    checkpoints: CheckpointStore
    cached_storage: CachedStorage | None = None
    pruner: Pruner | None = None
    inheritance: InheritancePolicy | None = None
    weights: BestWeights | ConfirmedWeights | None = None
    health_gate: HealthGate | None = None
    _follower: Follower = field(init=False)
    _unpublished: list[Evaluation] = field(default_factory=list, init=False)
    """Changes that are not yet durable."""
    _committed: deque[Evaluation] = field(default_factory=deque, init=False)
    """Durable changes that `take_committed` has not returned."""
    _pickled_changes: list[bytes] = field(default_factory=list, init=False)
    _has_changed: bool = field(default=False, init=False)
    _next_commit_at: float = field(default=0.0, init=False)
    _known_warnings: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._follower = self.record.follow()
        self._collect_changes()
        self._publish_changes()

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Inside ``with``, collect changes until the next commit.

        The end of the block commits, too.
        """
        with self.cached_storage.batch_writes() if self.cached_storage else nullcontext():
            yield
            self.commit()

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method for a leader, such as "claim" or "record.complete". Return its result."""
        self._has_changed = True
        return attrgetter(name)(self)(*arguments, **options)

    def commit_if_due(self) -> None:
        """Commit all changes, unless the previous commit was only a moment ago."""
        if clock.now() >= self._next_commit_at:
            self.commit()

    def commit(self) -> None:
        """Make all changes durable (on disk)."""
        began = clock.now()
        if self.cached_storage and self.cached_storage.commit():
            now = clock.now()
            self._next_commit_at = now + max(
                _MIN_COMMIT_INTERVAL, _COMMIT_TIME_FACTOR * (now - began)
            )
        self.log.write()
        # Changes are published after the flush, so that progress never shows an end that a crash
        # could undo.
        if self._has_changed:
            self._has_changed = False
            self._collect_changes()
            self._publish_changes()

    def take_committed(self) -> list[Evaluation]:
        """Return the evaluations whose change of state became durable since the previous call.

        Only one thread may call this method. All other methods may be called in a different thread.
        """
        return [self._committed.popleft() for _ in range(len(self._committed))]

    # Leaders call the methods below.

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Claim:
        """Start an evaluation, see `Claims.claim`.

        A new individual may start from another individual's checkpoint.
        """
        parent = (
            self.inheritance.find_parent(params, attributes["island"]) if self.inheritance else None
        )
        return self._claim(partial(self.claims.claim, params, parent, **attributes), attributes)

    def claim_waiting(self, **attributes: Any) -> Claim:
        """Start a waiting evaluation, or promote a paused one, see `Claims.claim_waiting`."""
        return self._claim(partial(self.claims.claim_waiting, **attributes), attributes)

    def end_test(self, assignment: Assignment, failure: str) -> None:
        """Record the end of the test of a suspected worker, see `HealthGate.end_test`."""
        assert self.health_gate is not None
        self.health_gate.end_test(assignment, failure)

    def _claim(
        self, claim: Callable[[], Assignment | None], attributes: Mapping[str, Any]
    ) -> Claim:
        """Start an evaluation, and commit its start at once.

        If the evaluation crashes the job, the record must show that it was running.
        """
        claimed = self.health_gate.claim(claim, attributes) if self.health_gate else claim()
        if isinstance(claimed, Assignment):
            self.commit()
        return claimed

    def read_changes(self, since: int) -> tuple[bytes, int]:
        """Return the changes after the first `since`, as joined pickles, and their total number."""
        self._collect_changes()
        return b"".join(self._pickled_changes[since:]), len(self._pickled_changes)

    def decide_pruning(
        self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]
    ) -> PruningDecision:
        """Let the pruner decide whether an evaluation continues after this number of losses.

        `loss` is its lowest loss so far, and `metrics` were reported with this loss. Also remove
        the checkpoints of paused individuals that can no longer be promoted.
        """
        assert self.pruner is not None
        objectives = self.record.objectives
        values = (
            (loss, *objectives.select_metric_values(metrics))
            if objectives.is_multi_objective
            else ()
        )
        decision = self.pruner.decide_pruning(self.record, assignment, losses, values)
        self._drop_checkpoints(decision.eliminated)
        return decision

    def log_output(self, trial: int, text: str) -> None:
        """Store lines that an evaluation has printed."""
        self.log.add(trial, text)

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether to keep the weights of a confirmation with this loss."""
        self._collect_changes()
        return cast("ConfirmedWeights", self.weights).should_keep(trial, loss)

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files to which the weights of a complete evaluation should be written.

        An empty list discards them.
        """
        self._collect_changes()
        return [str(path) for path in self.weights.list_wanted_files(trial)] if self.weights else []

    def move_weights(self, trial: int) -> None:
        """Move the weights of a trial from drafts to their files, if they are still wanted."""
        if self.weights:
            # After a crash in between, no weights may exist of an evaluation without a recorded
            # end.
            self.commit()
            self.weights.move_draft(trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return any(evaluation.curve for evaluation in self.record.read_evaluations())

    def is_first_warning(self, text: str) -> bool:
        """Return whether no worker has called this method with this text before in this session."""
        is_first = text not in self._known_warnings
        self._known_warnings.add(text)
        return is_first

    def read_previous_losses(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that this trial retries or continues.

        Return no losses and 0 seconds for the first trial of an individual.
        """
        evaluations = self.record.read_evaluations()
        previous = evaluations[trial].retry_of
        if previous is None:
            return [], 0.0
        curve, seconds = evaluations[previous].curve, evaluations[previous].seconds
        return [curve[step] for step in sorted(curve)], 0.0 if math.isnan(seconds) else seconds

    def read_checkpoint_step(self, trial: int) -> int:
        """Return the number of losses at the latest checkpoint of an evaluation.

        It is 0 without a checkpoint.
        """
        return self.record.read_evaluations()[trial].checkpoint_step

    def is_parent_candidate(self, trial: int, loss: float) -> bool:
        """Return whether individuals may start from an evaluation that ends with this loss."""
        return self.inheritance is not None and self.inheritance.is_parent_candidate(trial, loss)

    def drop_superseded(self, trial: int) -> None:
        """Remove the checkpoints that this trial displaces from the best of its island."""
        if self.inheritance:
            self._drop_checkpoints(self.inheritance.find_superseded(trial))

    def _drop_checkpoints(self, roots: Sequence[int]) -> None:
        if roots:
            # After a crash in between, no evaluation may resume from a checkpoint that is gone.
            self.commit()
        for root in roots:
            self.checkpoints.remove_root(root)

    def _publish_changes(self) -> None:
        self._committed.extend(self._unpublished)
        self._unpublished.clear()

    def _collect_changes(self) -> None:
        for evaluation in self._follower.read():
            self._unpublished.append(evaluation)
            self._pickled_changes.append(
                pickle.dumps(tuple(getattr(evaluation, name) for name in SHARED_FIELDS))
            )
            if self.weights:
                self.weights.update(evaluation)
