"""What is new in a study since one has looked last."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from hpo.store.evaluations import Evaluation
from hpo.store.trials import find_retried_trial, is_paused, make_evaluation


class StudyChanges:
    """Remembers what has been told of a study's trials; those that have ended are not looked at again."""

    def __init__(self) -> None:
        self._unfinished: dict[int, TrialState] = {}
        self._seen_count = 0

    def find_changes(self, trials: Sequence[FrozenTrial]) -> list[Evaluation]:
        """Return what has started, ended, or been promoted since the last call; `trials` are all of the study."""
        fresh = trials[self._seen_count :]
        changed = [
            trial
            for trial in [*(trials[number] for number in self._unfinished), *fresh]
            if self._unfinished.get(trial.number) != trial.state
        ]
        repeated = set(map(find_retried_trial, fresh))
        known = [trials[number] for number in repeated if number is not None and number < self._seen_count]
        self._unfinished.update((trial.number, trial.state) for trial in changed)
        for trial in changed:
            if trial.state.is_finished():
                del self._unfinished[trial.number]
        self._seen_count = len(trials)
        news = {trial.number: trial for trial in [*filter(is_paused, known), *changed]}
        return [make_evaluation(trial, trial.number in repeated) for trial in news.values()]
