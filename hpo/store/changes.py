"""Convert the trials of a study to evaluations, and find the evaluations that have changed."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from hpo.store.evaluations import Evaluation
from hpo.store.trials import find_retried_trial, is_counted, make_evaluation


class EvaluationCache:
    """Cache the evaluations of a study, so that only new and changed trials are converted."""

    def __init__(self) -> None:
        self._evaluations: list[Evaluation] = []
        self._unfinished: dict[int, FrozenTrial] = {}  # As they were read last.

    def update(self, trials: Sequence[FrozenTrial]) -> list[Evaluation]:
        """Return the evaluation of each trial, ordered by trial number. `trials` must be all trials of the study."""
        known = self._evaluations
        new = range(len(known), len(trials))
        repeated = {find_retried_trial(trials[number]) for number in new} - {None}
        known += [make_evaluation(trials[number], number in repeated) for number in new]
        # A trial that has ended changes only when another trial continues it. A changed trial is another object.
        changed = {number for number, trial in self._unfinished.items() if trials[number] is not trial}
        for number in repeated.union(changed) - set(new):
            assert number is not None
            known[number] = make_evaluation(trials[number], number in repeated)
        for number in (*changed, *new):
            self._unfinished[number] = trials[number]
            if trials[number].state.is_finished():
                del self._unfinished[number]
        return list(known)


class StudyChanges:
    """Find the evaluations that were added, or changed their state, since the previous call."""

    def __init__(self) -> None:
        self._unfinished: dict[int, TrialState] = {}
        self._seen_count = 0

    def find_changes(self, trials: Sequence[FrozenTrial]) -> list[Evaluation]:
        """Return the evaluations that were added, or changed their state, since the previous call.

        `trials` must be all trials of the study.
        """
        new = trials[self._seen_count :]
        changed = [
            trial
            for trial in [*(trials[number] for number in self._unfinished), *new]
            if self._unfinished.get(trial.number) != trial.state
        ]
        repeated = set(map(find_retried_trial, new))
        known = [trials[number] for number in repeated if number is not None and number < self._seen_count]
        self._unfinished.update((trial.number, trial.state) for trial in changed)
        for trial in changed:
            if trial.state.is_finished():
                del self._unfinished[trial.number]
        self._seen_count = len(trials)
        found = {trial.number: trial for trial in [*filter(is_counted, known), *changed]}
        return [make_evaluation(trial, trial.number in repeated) for trial in found.values()]
