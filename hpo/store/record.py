"""The record of a run: an Optuna study with one trial per evaluation.

Every evaluation is in it, durably, from the moment it starts; what else a run knows is rebuilt from it. Pure: Optuna
only, no MPI, no torch. Several processes may read one study at the same time; one writes to it
(`hpo.store.study_writer`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.changes import StudyChanges
from hpo.store.crash_isolation import MAX_CRASHES, has_progressed, read_crash_count
from hpo.store.evaluations import INTERRUPTED, Assignment, Evaluation
from hpo.store.storage import open_storage
from hpo.store.study_objectives import LossOnlyStudy, make_study, read_objectives
from hpo.store.trials import (
    copy_retry_attributes,
    find_retried_trial,
    find_root_trial,
    make_assignment,
    make_evaluation,
    make_imported_trial,
    make_metrics_attribute,
    make_trial,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.storages import BaseStorage

    from hpo.store.storage_retry import StorageRetry


class Record:
    """An open study: `storage` is the path of a journal file, or the URL of any Optuna storage.

    With `patience`, a database that is away is waited for. ``objectives`` are those of the study.
    """

    def __init__(self, storage: str | Path | BaseStorage, study_name: str, retry: StorageRetry | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = open_storage(storage, retry)
        self._study_id = self._storage.get_study_id_from_name(study_name)
        self._study = optuna.load_study(study_name=study_name, storage=self._storage)
        self.objectives = read_objectives(self._study)
        self._initially_finished = {trial.number for trial in self.read_trials() if trial.state.is_finished()}
        self._evaluations: list[Evaluation] = []
        self._unfinished: dict[int, FrozenTrial] = {}  # trials that have not ended, as they were read last
        self._changes = StudyChanges()

    @classmethod
    def create(
        cls,
        storage: str | Path,
        study_name: str,
        space: Mapping[str, str],
        confirms: str = "",
        objectives: Objectives = ONLY_LOSS,
    ) -> Record:
        """Make a new study that remembers its search space, a text per parameter, and which study it confirms.

        Raises ValueError if the name is taken.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        opened = open_storage(storage)
        study_id = make_study(opened, study_name, objectives)
        if confirms:
            opened.set_study_user_attr(study_id, "confirms", confirms)
        opened.set_study_user_attr(study_id, "space", dict(space))
        return cls(storage, study_name)

    @property
    def study(self) -> optuna.Study:
        """The study, for Optuna's own analyses."""
        return self._study

    def read_attributes(self) -> dict[str, Any]:
        """Return the study's attributes: its `space`, the study it `confirms`, the runs that it has `taken_over`."""
        return self._storage.get_study_user_attrs(self._study_id)

    def open_sibling(self, study_name: str) -> Record | None:
        """Open another study of the same storage, without reading the storage again; None if there is no such study."""
        try:
            return Record(self._storage, study_name)
        except KeyError:
            return None

    def remember_source(self, source: str) -> None:
        """Remember that everything of another run has been taken over."""
        sources = {*self.read_attributes().get("taken_over", []), source}
        self._storage.set_study_user_attr(self._study_id, "taken_over", sorted(sources))

    def read_trials(self) -> Sequence[FrozenTrial]:
        """Return all trials in the order of their numbers; not to be changed."""
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def start_trial(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], attributes: Mapping[str, Any]
    ) -> Assignment:
        """Start a trial; the caller (`hpo.store.claims`) has made sure that it is new, and that there is budget."""
        template = make_trial(TrialState.RUNNING, params, distributions, attributes)
        trial_id = self._storage.create_new_trial(self._study_id, template_trial=template)
        return self._make_assignment(self._storage.get_trial(trial_id))

    def start_waiting(self, trial: FrozenTrial, attributes: Mapping[str, Any]) -> Assignment:
        """Start a trial that has waited; attributes that it has already stay as they are."""
        for name in attributes.keys() - trial.user_attrs.keys():
            self._storage.set_trial_user_attr(trial._trial_id, name, attributes[name])
        self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        return self._make_assignment(trial)

    def _make_assignment(self, trial: FrozenTrial) -> Assignment:
        """Return a trial that has started; the others are read only where it has to do with one of them."""
        return make_assignment(trial, self.read_trials() if {"retry_of", "inherits"} & trial.user_attrs.keys() else ())

    def promote(self, paused: Evaluation, attributes: Mapping[str, Any]) -> Assignment:
        """Start a trial that goes on where a paused one was; it keeps what that was bred by."""
        trial = self.read_trials()[paused.trial]
        repeats = {**copy_retry_attributes(trial), "retry_of": trial.number}
        return self.start_trial(trial.params, trial.distributions, {**attributes, **repeats})

    def find_resumable_roots(self) -> set[int]:
        """Return the first trials of the individuals that wait to go on, or are paused."""
        return self.find_roots(one.trial for one in self.read_evaluations() if one.state in ("waiting", "paused"))

    def record_resume(self, assignment: Assignment, losses: Sequence[float], seconds: float) -> None:
        """Record the losses that an evaluation had when it went on where it was interrupted, and how long they took."""
        for step, loss in enumerate(losses, 1):
            self.report(assignment, step, loss)
        self._storage.set_trial_user_attr(assignment.trial_id, "seconds_before", seconds)
        self._storage.set_trial_user_attr(assignment.trial_id, "resumed_from_step", len(losses))
        self.record_checkpoint(assignment, len(losses))

    def find_roots(self, numbers: Iterable[int]) -> set[int]:
        """Return the first trials of the individuals that these trials evaluate."""
        trials = self.read_trials()
        return {find_root_trial(trials[number], trials) for number in numbers}

    def clear_inheritance(self, assignment: Assignment) -> None:
        """Record that an evaluation has begun without what it was to inherit."""
        self._storage.set_trial_user_attr(assignment.trial_id, "inherits", None)

    def record_checkpoint(self, assignment: Assignment, losses: int) -> None:
        """Record that an evaluation goes on after so many losses if it is interrupted now."""
        self._storage.set_trial_user_attr(assignment.trial_id, "checkpoint_step", losses)

    def record_worker_group(self, assignment: Assignment, losses: int, workers: Sequence[int]) -> None:
        """Record that an evaluation goes on after so many losses with these workers, from now."""
        before = self._storage.get_trial(assignment.trial_id).user_attrs.get("worker_groups", [])
        team = {"workers": list(workers), "after": losses, "at": time.time()}
        self._storage.set_trial_user_attr(assignment.trial_id, "worker_groups", [*before, team])

    def report(self, assignment: Assignment, step: int, loss: float) -> None:
        """Record an intermediate value."""
        self._storage.set_trial_intermediate_value(assignment.trial_id, step, loss)

    def record_rung_values(self, assignment: Assignment, losses: int, values: Sequence[float]) -> None:
        """Record the values of all objectives that an evaluation has after so many losses, at a rung."""
        before = self._storage.get_trial(assignment.trial_id).user_attrs.get("at_rungs", {})
        self._storage.set_trial_user_attr(assignment.trial_id, "at_rungs", {**before, str(losses): list(values)})

    def complete(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation succeeded, or that it was `cut_after` some losses; durable when this returns."""
        values = [loss, *self.objectives.select_metric_values(metrics)]
        self._end_trial(
            assignment, TrialState.COMPLETE, values, seconds=seconds, **make_metrics_attribute(metrics), **attributes
        )

    def prune(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation was pruned, or `paused_after` some losses, with its lowest loss; it is durable."""
        values = [loss, *self.objectives.select_metric_values(metrics)]
        self._end_trial(
            assignment, TrialState.PRUNED, values, seconds=seconds, **make_metrics_attribute(metrics), **attributes
        )

    def should_prune(self, assignment: Assignment, pruner: BasePruner) -> bool:
        """Tell whether a pruner ends an evaluation, by the intermediate values of this one and of the others."""
        return pruner.prune(LossOnlyStudy(self._study), self._storage.get_trial(assignment.trial_id))

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed, with the reason in one line; durable when this returns."""
        self._end_trial(assignment, TrialState.FAIL, None, seconds=seconds, failure=reason, traceback=traceback)

    def enqueue(
        self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution], **attributes: Any
    ) -> None:
        """Let an evaluation wait for the next worker that is free, before anything that is bred."""
        template = make_trial(TrialState.WAITING, params, distributions, attributes)
        self._storage.create_new_trial(self._study_id, template_trial=template)

    def import_evaluations(
        self,
        evaluations: Iterable[Evaluation],
        distributions: Mapping[str, BaseDistribution],
        make_attributes: Callable[[Evaluation, int], Mapping[str, Any]],
    ) -> int:
        """Add the complete, pruned and paused evaluations of another run that are not known here, and return how many.

        They are outside of the budget. Only while no process starts trials. `attributes` returns the attributes for
        an evaluation, given how many were added before it.
        """
        taken, known = 0, {frozenset(trial.params.items()) for trial in self.read_trials()}
        for evaluation in evaluations:
            if (params := frozenset(evaluation.params.items())) in known:
                continue
            trial = make_imported_trial(evaluation, distributions, make_attributes(evaluation, taken))
            self._storage.create_new_trial(self._study_id, template_trial=trial)
            known.add(params)
            taken += 1
        return taken

    def cancel_waiting(self, waiting: Evaluation) -> None:
        """End a waiting evaluation, so that it is never evaluated; only while no process starts trials."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, waiting.trial)
        assignment = Assignment(trial_id, waiting.trial, waiting.params, waiting.trial)
        self._end_trial(assignment, TrialState.FAIL, None, failure=INTERRUPTED)

    def interrupt(self, assignment: Assignment, crashed: bool = False) -> None:
        """End a trial that could not end by itself, perhaps since the job died; let its repeat wait to be evaluated.

        The repeat is recorded before the end of the trial, so that a crash in between loses nothing.
        """
        trial = self._storage.get_trial(assignment.trial_id)
        deaths = 0 if has_progressed(trial) else read_crash_count(trial) + crashed
        if assignment.number not in {waiting.user_attrs.get("retry_of") for waiting in self._read_waiting()}:
            kept = copy_retry_attributes(trial)
            self.enqueue(trial.params, trial.distributions, retry_of=trial.number, crash_count=deaths, **kept)
        self._end_trial(assignment, TrialState.FAIL, None, failure=INTERRUPTED)

    def requeue_interrupted(self, crashed: bool = True) -> int:
        """Interrupt all trials that were running when a run ended, or died; return how many. Only while no run goes on.

        If the job died, one of them may have killed it. They are then evaluated again until this one is found
        (`hpo.store.crash_isolation`), and it fails.
        """
        running = [trial for trial in self.read_trials() if trial.state == TrialState.RUNNING]
        for trial in running:
            assignment = Assignment(trial._trial_id, trial.number, trial.params, trial.number)
            suspected = crashed and not has_progressed(trial)
            deaths = read_crash_count(trial) + suspected
            if suspected and deaths >= MAX_CRASHES:
                reason = f"the job died {deaths} times while this was evaluated, the last time while nothing else was"
                self._end_trial(assignment, TrialState.FAIL, None, failure=reason)
            else:
                self.interrupt(assignment, suspected)
        return len(running)

    def count_initial_failures(self) -> int:
        """Return how many evaluations failed since this record was opened; 0 if any evaluation has ever succeeded."""
        evaluations = self.read_evaluations()
        if any(evaluation.counts_for_budget and evaluation.state != "failed" for evaluation in evaluations):
            return 0
        return sum(e.state == "failed" and e.trial not in self._initially_finished for e in evaluations)

    def read_evaluations(self) -> list[Evaluation]:
        """Return all evaluations in the order in which they were started."""
        trials, known = self.read_trials(), self._evaluations
        new = range(len(known), len(trials))
        repeated = {find_retried_trial(trials[number]) for number in new} - {None}
        known += [make_evaluation(trials[number], number in repeated) for number in new]
        # What has ended changes no more, but that it may be repeated; what changes is another object of the storage.
        changed = {number for number, trial in self._unfinished.items() if trials[number] is not trial}
        for number in repeated.union(changed) - set(new):
            assert number is not None
            known[number] = make_evaluation(trials[number], number in repeated)
        for number in (*changed, *new):
            self._unfinished[number] = trials[number]
            if trials[number].state.is_finished():
                del self._unfinished[number]
        return list(known)

    def read_changes(self) -> list[Evaluation]:
        """Return the evaluations that have started, ended, or been promoted since the last call."""
        return self._changes.find_changes(self.read_trials())

    def read_running(self) -> list[Evaluation]:
        """Return the evaluations that go on now, each with its losses so far."""
        trials = self._storage.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.RUNNING,))
        return [make_evaluation(trial) for trial in trials]

    def _read_waiting(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.WAITING,))

    def _end_trial(
        self, assignment: Assignment, state: TrialState, values: Sequence[float] | None, **attributes: Any
    ) -> None:
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(assignment.trial_id, name, value)
        self._storage.set_trial_state_values(assignment.trial_id, state, values)
