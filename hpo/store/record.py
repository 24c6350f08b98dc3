"""Read and write the record of a run: an Optuna study with one trial for each evaluation.

An evaluation is recorded durably before it starts. Several processes may read the
study, but only one process writes it (`hpo.store.study_writer`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.space import make_key
from hpo.store.cached_storage import CachedStorage
from hpo.store.changes import ChangeLog, Follower
from hpo.store.crash_isolation import MAX_CRASHES, has_progressed
from hpo.store.evaluations import INTERRUPTED, Assignment, Evaluation
from hpo.store.storage import open_storage
from hpo.store.trials import (
    copy_retry_attributes,
    find_root_trial,
    is_interrupted,
    make_assignment,
    make_evaluation,
    make_imported_trial,
    make_metrics_attribute,
    make_trial,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner

    from hpo.store.storage import StorageRetry


class Record:
    """Read and write the Optuna study in which a run or its confirmations are recorded.

    The attribute `objectives` holds the objectives of the study.

    Args:
        storage: Path of a journal file, URL of an Optuna storage, or an open storage.
        retry: Repeats storage calls while a database is unavailable; None to raise the error at
            once.
    """

    def __init__(
        self, storage: str | Path | BaseStorage, study_name: str, retry: StorageRetry | None = None
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = open_storage(storage, retry)
        self._study_id = self._storage.get_study_id_from_name(study_name)
        self._study = optuna.load_study(study_name=study_name, storage=self._storage)
        self.objectives = read_objectives(self._study)
        self._initially_finished = {
            trial.number for trial in self.read_trials() if trial.state.is_finished()
        }
        noted = self._storage.note_changes() if isinstance(self._storage, CachedStorage) else None
        self._log = ChangeLog(self.read_trials, noted)

    @classmethod
    def create(
        cls,
        storage: str | Path,
        study_name: str,
        space: Mapping[str, str],
        confirms: str = "",
        objectives: Objectives = ONLY_LOSS,
    ) -> Record:
        """Create a study; `space` describes its parameters, `confirms` names a confirmed study."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        opened = open_storage(storage)
        study_id = make_study(opened, study_name, objectives)
        if confirms:
            opened.set_study_user_attr(study_id, "confirms", confirms)
        opened.set_study_user_attr(study_id, "space", dict(space))
        return cls(storage, study_name)

    @property
    def study(self) -> optuna.Study:
        """Optuna study, for use with Optuna's plots and analyses."""
        return self._study

    def read_attributes(self) -> dict[str, Any]:
        """Return the study's attributes, such as `space`, `confirms` and `taken_over`."""
        return self._storage.get_study_user_attrs(self._study_id)

    def open_sibling(self, study_name: str) -> Record | None:
        """Open another study of the same open storage; None if it is missing."""
        try:
            return Record(self._storage, study_name)
        except KeyError:
            return None

    def remember_source(self, source: str) -> None:
        """Record that the evaluations of the run `source` have been imported."""
        sources = {*self.read_attributes().get("taken_over", []), source}
        self._storage.set_study_user_attr(self._study_id, "taken_over", sorted(sources))

    def read_trials(self) -> Sequence[FrozenTrial]:
        """Return all trials, ordered by number. The caller must not change them."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def start_trial(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        attributes: Mapping[str, Any],
    ) -> Assignment:
        """Create a running trial. The caller checks the budget, and rejects duplicates."""
        template = make_trial(TrialState.RUNNING, params, distributions, attributes)
        trial_id = self._storage.create_new_trial(self._study_id, template_trial=template)
        return self._make_assignment(self._storage.get_trial(trial_id))

    def start_waiting(self, waiting: Evaluation, attributes: Mapping[str, Any]) -> Assignment:
        """Start a waiting trial, and add attributes whose names the trial does not have yet."""
        trial = self.read_trials()[waiting.trial]
        for name in attributes.keys() - trial.user_attrs.keys():
            self._storage.set_trial_user_attr(trial._trial_id, name, attributes[name])
        self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        return self._make_assignment(trial)

    def _make_assignment(self, trial: FrozenTrial) -> Assignment:
        refers_to_others = {"retry_of", "inherits"} & trial.user_attrs.keys()
        return make_assignment(trial, self.read_trials() if refers_to_others else ())

    def promote(self, paused: Evaluation, attributes: Mapping[str, Any]) -> Assignment:
        """Start a trial that continues a paused one, with the attributes of its individual."""
        trial = self.read_trials()[paused.trial]
        copied = {**copy_retry_attributes(trial), "retry_of": trial.number}
        return self.start_trial(trial.params, trial.distributions, {**attributes, **copied})

    def start_test(self, repeated: Evaluation, attributes: Mapping[str, Any]) -> Assignment:
        """Start a trial that only tests a suspected worker: it repeats an evaluation."""
        trial = self.read_trials()[repeated.trial]
        own = {**attributes, "seed": repeated.seed, "tests": repeated.trial}
        return self.start_trial(trial.params, trial.distributions, own)

    def end_test(self, assignment: Assignment, failure: str, seconds: float) -> None:
        """Record the end of a test of a worker; `failure` is empty if the worker has passed."""
        ended = {"failure": INTERRUPTED, "test_failure": failure, "seconds": seconds}
        self._end_trial(assignment, TrialState.FAIL, None, **ended)

    def retry_failed(self, evaluation: Evaluation) -> None:
        """Retry an evaluation that a broken worker has failed, unless it is such a retry itself."""
        trials = self.read_trials()
        before = None if evaluation.retry_of is None else trials[evaluation.retry_of]
        if before is None or before.state != TrialState.FAIL or is_interrupted(before):
            trial = trials[evaluation.trial]
            copied = copy_retry_attributes(trial)
            self.enqueue(trial.params, trial.distributions, retry_of=trial.number, **copied)

    def record_broken_worker(self, description: str) -> None:
        """Record that a broken worker has left the run."""
        known = self.read_attributes().get("broken_workers", [])
        left = {"at": time.time(), "description": description}
        self._storage.set_study_user_attr(self._study_id, "broken_workers", [*known, left])

    def read_broken_workers(self, since: float) -> list[str]:
        """Return the descriptions of the workers that have left the run after the time `since`."""
        left = self.read_attributes().get("broken_workers", [])
        return [str(one["description"]) for one in left if one["at"] >= since]

    def find_resumable_roots(self) -> set[int]:
        """Return the numbers of the first trials of all individuals that are waiting or paused."""
        return self.find_roots(
            e.trial for e in self.read_evaluations() if e.state in ("waiting", "paused")
        )

    def record_resume(
        self,
        assignment: Assignment,
        losses: Sequence[float],
        seconds: float,
        epoch: int | None = None,
    ) -> None:
        """Record what a resumed evaluation takes over from its last trial.

        The losses of some epochs may be missing, which are infinite.
        """
        for step, loss in enumerate(losses, 1):
            if math.isfinite(loss):
                self.report(assignment, step, loss)
        if epoch is not None:
            self._storage.set_trial_user_attr(assignment.trial_id, "epoch", epoch)
        self._storage.set_trial_user_attr(assignment.trial_id, "seconds_before", seconds)
        self._storage.set_trial_user_attr(assignment.trial_id, "resumed_from_step", len(losses))
        self.record_checkpoint(assignment, len(losses))

    def find_roots(self, numbers: Iterable[int]) -> set[int]:
        """Return the first trials of the individuals to which these trials belong."""
        trials = self.read_trials()
        return {find_root_trial(trials[number], trials) for number in numbers}

    def clear_inheritance(self, assignment: Assignment) -> None:
        """Record that an evaluation started without the checkpoint of its parent."""
        # Not null: with such an attribute, Optuna's browser app cannot read a journal.
        self._storage.set_trial_user_attr(assignment.trial_id, "inherits", "nothing")

    def record_checkpoint(self, assignment: Assignment, losses: int) -> None:
        """Record that a checkpoint was saved after this number of losses."""
        self._storage.set_trial_user_attr(assignment.trial_id, "checkpoint_step", losses)

    def report(
        self, assignment: Assignment, step: int, loss: float, epoch: int | None = None
    ) -> None:
        """Record the loss of a step, and the number of its epoch in a script, if it is known."""
        self._storage.set_trial_intermediate_value(assignment.trial_id, step, loss)
        if epoch is not None:
            self._storage.set_trial_user_attr(assignment.trial_id, "epoch", epoch)

    def record_rung_values(
        self, assignment: Assignment, losses: int, values: Sequence[float]
    ) -> None:
        """Record the values of all objectives at the rung after this number of losses."""
        before = self._storage.get_trial(assignment.trial_id).user_attrs.get("at_rungs", {})
        self._storage.set_trial_user_attr(
            assignment.trial_id, "at_rungs", {**before, str(losses): list(values)}
        )

    def complete(
        self,
        assignment: Assignment,
        loss: float,
        seconds: float,
        metrics: Mapping[str, float],
        **attributes: int,
    ) -> None:
        """Record that an evaluation is complete; `attributes` may contain `cut_after`."""
        self._end_with_loss(
            assignment, TrialState.COMPLETE, loss, metrics, seconds=seconds, **attributes
        )

    def prune(
        self,
        assignment: Assignment,
        loss: float,
        seconds: float,
        metrics: Mapping[str, float],
        **attributes: int,
    ) -> None:
        """Record that an evaluation was pruned, or paused if `attributes` have `paused_after`."""
        self._end_with_loss(
            assignment, TrialState.PRUNED, loss, metrics, seconds=seconds, **attributes
        )

    def should_prune(self, assignment: Assignment, pruner: BasePruner) -> bool:
        """Return whether one of Optuna's pruners stops an evaluation, given all losses."""
        return pruner.prune(
            LossOnlyStudy(self._study), self._storage.get_trial(assignment.trial_id)
        )

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed; `reason` must be one line."""
        self._end_trial(
            assignment, TrialState.FAIL, None, seconds=seconds, failure=reason, traceback=traceback
        )

    def enqueue(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        **attributes: Any,
    ) -> None:
        """Add a waiting trial. Workers start waiting trials before they start new individuals."""
        template = make_trial(TrialState.WAITING, params, distributions, attributes)
        self._storage.create_new_trial(self._study_id, template_trial=template)

    def import_evaluations(
        self,
        evaluations: Iterable[Evaluation],
        distributions: Mapping[str, BaseDistribution],
        make_attributes: Callable[[Evaluation, int], Mapping[str, Any]],
    ) -> int:
        """Import complete, pruned and paused evaluations of another run, and return their number.

        Skip hyperparameters that this study has already. Imported evaluations do not count against
        the budget. No other process may start trials during this call.

        Args:
            make_attributes: Function that returns the attributes to record for an evaluation. Its
                second argument is the number of evaluations that this call has imported before.
        """
        count = 0
        known = {make_key(trial.params, distributions) for trial in self.read_trials()}
        for evaluation in evaluations:
            if (key := make_key(evaluation.params, distributions)) in known:
                continue
            trial = make_imported_trial(
                evaluation, distributions, make_attributes(evaluation, count)
            )
            self._storage.create_new_trial(self._study_id, template_trial=trial)
            known.add(key)
            count += 1
        return count

    def cancel_waiting(self, waiting: Evaluation) -> None:
        """End a waiting trial that is not to be evaluated, while no process starts trials."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(
            self._study_id, waiting.trial
        )
        assignment = Assignment(trial_id, waiting.trial, waiting.params, waiting.trial)
        self._end_trial(assignment, TrialState.FAIL, None, failure=INTERRUPTED)

    def interrupt(
        self, assignment: Assignment, seconds: float = math.nan, crashed: bool = False
    ) -> None:
        """Record that a trial was interrupted, and enqueue a new trial that retries it.

        The retry is recorded before the end of the trial, so that a crash between the two steps
        loses nothing.

        Args:
            seconds: Duration of the evaluation; NaN if it is not known, since the job has ended.
            crashed: Whether the job crashed, and the trial may be the cause.
        """
        trial = self._storage.get_trial(assignment.trial_id)
        evaluation = make_evaluation(trial)
        crash_count = 0 if has_progressed(evaluation) else evaluation.crash_count + crashed
        all_waiting = self._storage.get_all_trials(
            self._study_id, deepcopy=False, states=(TrialState.WAITING,)
        )
        retried = {waiting.user_attrs.get("retry_of") for waiting in all_waiting}
        if evaluation.tests is None and assignment.number not in retried:
            copied = copy_retry_attributes(trial)
            self.enqueue(
                trial.params,
                trial.distributions,
                retry_of=trial.number,
                crash_count=crash_count,
                **copied,
            )
        known = {} if math.isnan(seconds) else {"seconds": seconds}
        self._end_trial(assignment, TrialState.FAIL, None, failure=INTERRUPTED, **known)

    def requeue_interrupted(self, crashed: bool = True) -> int:
        """Interrupt all trials that an ended run has left running, and return their number.

        No process may run the study. If the job crashed (`crashed`), one of these trials may be the
        cause. Crash isolation (`hpo.store.crash_isolation`) finds this trial after repeated
        crashes. Then it fails, without a retry.
        """
        running = [trial for trial in self.read_trials() if trial.state == TrialState.RUNNING]
        for trial in running:
            self.requeue_trial(trial, crashed)
        return len(running)

    def requeue_trial(self, trial: FrozenTrial, crashed: bool) -> None:
        """Interrupt a trial that no process runs any longer, see `requeue_interrupted`."""
        assignment = Assignment(trial._trial_id, trial.number, trial.params, trial.number)
        evaluation = make_evaluation(trial)
        suspected = crashed and not has_progressed(evaluation) and evaluation.tests is None
        crash_count = evaluation.crash_count + suspected
        if suspected and crash_count >= MAX_CRASHES:
            reason = (
                f"the job crashed {crash_count} times during this evaluation, the last time "
                "with no other running"
            )
            self._end_trial(assignment, TrialState.FAIL, None, failure=reason)
        else:
            self.interrupt(assignment, crashed=suspected)

    def count_initial_failures(self) -> int:
        """Return how many failed since this record was opened; 0 after a success."""
        evaluations = self.read_evaluations()
        if any(e.counts_for_budget and e.state != "failed" for e in evaluations):
            return 0
        return sum(
            e.state == "failed" and e.trial not in self._initially_finished for e in evaluations
        )

    def read_evaluations(self) -> list[Evaluation]:
        """Return all evaluations, ordered by trial number."""
        self._log.update()
        return self._log.list_evaluations()

    def follow(self, with_losses: bool = False) -> Follower:
        """Return a follower of the changes; with `with_losses`, new losses are changes, too."""
        return Follower(self._log, with_losses)

    def _end_with_loss(
        self,
        assignment: Assignment,
        state: TrialState,
        loss: float,
        metrics: Mapping[str, float],
        **attributes: float,
    ) -> None:
        values = [loss, *self.objectives.select_metric_values(metrics)]
        self._end_trial(assignment, state, values, **attributes, **make_metrics_attribute(metrics))

    def _end_trial(
        self,
        assignment: Assignment,
        state: TrialState,
        values: Sequence[float] | None,
        **attributes: Any,
    ) -> None:
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(assignment.trial_id, name, value)
        self._storage.set_trial_state_values(assignment.trial_id, state, values)


def make_directions(objectives: Objectives) -> list[StudyDirection]:
    """Return for each objective whether Optuna must minimize or maximize it."""
    return [
        StudyDirection.MAXIMIZE if name in objectives.maximized else StudyDirection.MINIMIZE
        for name in objectives.names
    ]


def make_study(storage: BaseStorage, name: str, objectives: Objectives) -> int:
    """Create a study with these objectives, and return its id, or that of an interrupted creation.

    Raise ValueError if another study has this name.
    """
    try:
        study_id = storage.create_new_study(make_directions(objectives), name)
    except optuna.exceptions.DuplicatedStudyError as error:
        study_id = storage.get_study_id_from_name(name)
        is_same = storage.get_study_directions(study_id) == make_directions(objectives)
        if (
            not is_same
            or "space" in storage.get_study_user_attrs(study_id)
            or storage.get_n_trials(study_id)
        ):
            raise ValueError(f"the storage already holds a study named {name!r}") from error
    if objectives.is_multi_objective:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.load_study(study_name=name, storage=storage).set_metric_names(
                list(objectives.names)
            )
    return study_id


def read_objectives(study: optuna.Study) -> Objectives:
    """Return the objectives of a study: "loss" first; objectives without names are numbered."""
    stored_names = study.metric_names or [str(index) for index in range(len(study.directions))]
    names = (LOSS, *stored_names[1:])
    pairs = zip(names, study.directions, strict=True)
    maximized = [name for name, direction in pairs if direction == StudyDirection.MAXIMIZE]
    return Objectives(names, tuple(maximized))


class LossOnlyStudy(optuna.Study):
    """Present a study to Optuna's pruners as if the loss were its only objective.

    Optuna's pruners refuse studies with several objectives, although they compare only intermediate
    values. Here, intermediate values are losses.
    """

    def __init__(self, study: optuna.Study) -> None:
        # The constructor of optuna.Study would read the storage again.
        self.__dict__.update(study.__dict__)

    @property
    def direction(self) -> StudyDirection:
        """Direction of the loss, which is always minimized."""
        return StudyDirection.MINIMIZE
