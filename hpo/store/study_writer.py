"""Write the study of a run for the leaders of all workers, and answer their calls."""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpo.errors import DuplicateError
from hpo.process import clock
from hpo.space import make_key
from hpo.store.cached_storage import CachedStorage
from hpo.store.crash_isolation import select_next_waiting
from hpo.store.evaluations import SHARED_FIELDS, Assignment, Evaluation, Progress
from hpo.store.pruning import HalvingSchedule, SuccessiveHalving
from hpo.store.record import Record

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage

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
    """

    def __init__(
        self,
        record: Record,
        distributions: Mapping[str, BaseDistribution],
        budget: int,
        is_stopping: Callable[[], bool] = lambda: False,
        halving: HalvingSchedule | None = None,
    ) -> None:
        self._record = record
        self._distributions = dict(distributions)
        self._budget = budget
        self._is_stopping = is_stopping
        self._successive_halving = (
            SuccessiveHalving(halving, record.objectives) if halving else None
        )
        self._changes = record.follow()
        self._tried: set[tuple[Any, ...]] = set()  # The keys of all individuals.
        self._ended: set[int] = set()  # Trials that count against the budget.
        self._waiting: dict[int, Evaluation] = {}
        self._running: dict[int, Evaluation] = {}
        self._tests: set[int] = set()  # Running trials that only test a worker.

    def claim(
        self, params: Mapping[str, Any] | None, inherits: int | None = None, **attributes: Any
    ) -> Assignment | None:
        """Start the next trial of a worker, and return its assignment.

        A waiting trial comes first; of these, trials whose individual has not crashed. Next comes
        the promotion of a paused trial, whose individual is then trained further: the best at the
        highest rung. If there is neither, a new individual starts.

        Args:
            params: Hyperparameters of the new individual; None to start no new individual.
            inherits: Trial from whose checkpoint the new individual starts; None to start without a
                checkpoint.
            attributes: Attributes to record for the trial that starts, such as its worker.

        Returns:
            The assignment (the trial to run); None if the run is stopping, or if the budget allows
            no new individual.

        Raises:
            DuplicateError: If the study already has a trial with these hyperparameters.
        """
        if self._is_stopping():
            return None
        self._update()
        waiting = list(self._waiting.values())
        started = len(self._ended) + len(self._running) - len(self._tests)
        is_last = params is None or started + len(waiting) >= self._budget
        paused: list[Evaluation] = []
        if self._successive_halving is not None:
            self._successive_halving.update(self._record.read_evaluations())
            paused = self._successive_halving.find_promotable()
        if waiting and started < self._budget:
            running = self._running.values()
            trial = select_next_waiting(waiting, running, is_last and not paused)
            if trial is not None:
                return self._record.start_waiting(trial, attributes)
        if paused:
            return self._record.promote(paused[0], attributes)
        if params is None or is_last:
            return None
        if make_key(params, self._distributions) in self._tried:
            raise DuplicateError
        if inherits is not None:
            attributes["inherits"] = inherits
        return self._record.start_trial(params, self._distributions, attributes)

    def _update(self) -> None:
        for evaluation in self._changes.read():
            trial = evaluation.trial
            self._waiting.pop(trial, None)
            self._running.pop(trial, None)
            self._tests.discard(trial)
            self._ended.discard(trial)
            if evaluation.state == "waiting":
                self._waiting[trial] = evaluation
            elif evaluation.state == "running":
                self._running[trial] = evaluation
                if evaluation.tests is not None:
                    self._tests.add(trial)
            elif evaluation.counts_for_budget:
                self._ended.add(trial)
            if evaluation.tests is None:
                self._tried.add(make_key(evaluation.params, self._distributions))


# The time between two commits is at least a tenth of a second, unless a trial starts, since file
# systems write many lines as fast as one. It is also four times the duration of the last commit, so
# that leaders are answered at once most of the time.
_MIN_COMMIT_INTERVAL = 0.1
_COMMIT_TIME_FACTOR = 4.0


class StudyWriter(Record):
    """Write the record of a run, and answer the calls of leaders, in one thread.

    Leaders call the methods of this class through `hpo.store.study_client.StudyClient`. Calls are
    answered after `commit_if_due`. A change is durable when it is on disk. Without a
    `CachedStorage`, each change is durable at once. With it, changes become durable at the next
    commit. `take_committed` returns only durable changes.

    Args:
        storage: A `CachedStorage` collects changes for the next commit.
        log: Output of the evaluations.
        checkpoints: Checkpoints of the evaluations.
        pruner: Pruner of the run; None without one.
        weights: Selects the evaluations whose weights are kept; None if no weights are kept.

    Attributes:
        claims: Starts trials within the budget of the run. The creator of the writer sets it, and
            the following attributes.
        inheritance: Selects the checkpoints from which individuals start; None without population
            based training.
        health_gate: Keeps broken workers from claiming trials; None to let all workers claim.
    """

    claims: Claims
    inheritance: InheritancePolicy | None = None
    health_gate: HealthGate | None = None

    def __init__(
        self,
        storage: str | Path | BaseStorage,
        study_name: str,
        log: OutputLog,
        checkpoints: CheckpointStore,
        pruner: Pruner | None = None,
        weights: BestWeights | ConfirmedWeights | None = None,
    ) -> None:
        super().__init__(storage, study_name)
        self._cached_storage = storage if isinstance(storage, CachedStorage) else None
        self._output_log = log
        self._checkpoints = checkpoints
        self._pruner = pruner
        self.weights = weights
        self._follower = self.follow()
        self._unpublished: list[Evaluation] = []  # Changes that are not yet durable.
        # Durable changes that `take_committed` has not returned.
        self._committed: deque[Evaluation] = deque()
        self._pickled_changes = bytearray()
        self._next_commit_at = 0.0
        self._has_claims = False  # Whether a trial has started since the last commit.
        self._known_warnings: set[str] = set()
        self._has_changed = True
        self.commit()

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Inside ``with``, collect changes until the next commit, or the end of the block."""
        with self._cached_storage.batch_writes() if self._cached_storage else nullcontext():
            yield
            self.commit()

    def answer(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method by its name for a leader, and return its result."""
        self._has_changed = True
        return getattr(self, name)(*arguments, **options)

    def answer_durably(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method by its name for a leader in this process, and commit its changes."""
        result = self.answer(name, *arguments, **options)
        self.commit()
        return result

    def commit_if_due(self) -> None:
        """Commit all changes if a trial has started, or the commit interval has passed.

        Call it before the answers of claims are sent. If an evaluation crashes the job, the record
        must show that it was running.
        """
        if self._has_claims or clock.now() >= self._next_commit_at:
            self.commit()

    def commit(self) -> None:
        """Make all changes durable (on disk)."""
        self._has_claims = False
        began = clock.now()
        if self._cached_storage and self._cached_storage.commit():
            now = clock.now()
            self._next_commit_at = now + max(
                _MIN_COMMIT_INTERVAL, _COMMIT_TIME_FACTOR * (now - began)
            )
        self._output_log.write()
        # Changes are published after the flush, so that progress never shows an end that a crash
        # could undo.
        if self._has_changed:
            self._has_changed = False
            self._collect_changes()
            self._committed.extend(self._unpublished)
            self._unpublished.clear()

    def take_committed(self) -> list[Evaluation]:
        """Return the evaluations whose change of state became durable since the previous call.

        Only one thread may call this method. All other methods may be called in a different thread.
        """
        return [self._committed.popleft() for _ in range(len(self._committed))]

    # Leaders call the methods below, and those of the record.

    def claim(self, params: Mapping[str, Any] | None, **attributes: Any) -> Claim:
        """Start an evaluation, see `Claims.claim`; `commit_if_due` then commits its start.

        A new individual may start from another individual's checkpoint.
        """
        parent = None
        if self.inheritance is not None and params is not None:
            parent = self.inheritance.find_parent(params, attributes["island"])
        claim = partial(self.claims.claim, params, parent, **attributes)
        claimed = self.health_gate.claim(claim, attributes) if self.health_gate else claim()
        self._has_claims |= isinstance(claimed, Assignment)
        return claimed

    def end_test(self, assignment: Assignment, failure: str, seconds: float) -> None:
        """Record the end of the test of a suspected worker; `failure` is empty if it has passed."""
        assert self.health_gate is not None
        self.health_gate.end_test(assignment, failure)
        super().end_test(assignment, failure, seconds)

    def read_changes(self, start: int) -> bytes:
        """Return all changes as joined pickles, without the first `start` bytes."""
        self._collect_changes()
        return bytes(memoryview(self._pickled_changes)[start:])

    def decide_pruning(
        self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]
    ) -> PruningDecision:
        """Let the pruner decide whether an evaluation continues after this number of losses.

        `loss` is its lowest loss so far, and `metrics` were reported with this loss. Also remove
        the checkpoints of paused individuals that can no longer be promoted.
        """
        assert self._pruner is not None
        values: tuple[float, ...] = ()
        if self.objectives.is_multi_objective:
            values = (loss, *self.objectives.select_metric_values(metrics))
        decision = self._pruner.decide_pruning(self, assignment, losses, values)
        self._drop_checkpoints(decision.eliminated)
        return decision

    def log_output(self, trial: int, text: str) -> None:
        """Store lines that an evaluation has printed."""
        self._output_log.add(trial, text)

    def should_keep_weights(self, trial: int, loss: float) -> bool:
        """Return whether to keep the weights of a confirmation with this loss."""
        self._collect_changes()
        return cast("ConfirmedWeights", self.weights).should_keep(trial, loss)

    def list_weight_files(self, trial: int) -> list[str]:
        """Return the files for the weights of a complete evaluation; [] discards them."""
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
        return any(evaluation.curve for evaluation in self.read_evaluations())

    def is_first_warning(self, text: str) -> bool:
        """Return whether no worker has called this method with this text before in this session."""
        is_first = text not in self._known_warnings
        self._known_warnings.add(text)
        return is_first

    def read_progress(self, trial: int) -> Progress:
        """Return what the trial that this one continues has reached, if there is one."""
        evaluations = self.read_evaluations()
        previous = evaluations[trial].retry_of
        if previous is None:
            return Progress()
        last = evaluations[previous]
        steps = range(1, max(last.curve, default=0) + 1)
        losses = [last.curve.get(step, math.inf) for step in steps]
        return Progress(losses, 0.0 if math.isnan(last.seconds) else last.seconds, last.epoch)

    def read_checkpoint_step(self, trial: int) -> int:
        """Return the number of losses at the latest checkpoint; 0 without one."""
        return self.read_evaluations()[trial].checkpoint_step

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
            self._checkpoints.remove_checkpoint(root)

    def _collect_changes(self) -> None:
        for evaluation in self._follower.read():
            self._unpublished.append(evaluation)
            shared = tuple(getattr(evaluation, name) for name in SHARED_FIELDS)
            self._pickled_changes += pickle.dumps(shared)
            if self.weights:
                self.weights.update(evaluation)
