"""What is new in a study since one has looked last."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from hpo.store.evaluations import Evaluation
from hpo.store.trials import evaluation_of, is_paused, repeated_by


class News:
    """Remembers what has been told of a study's trials; those that have ended are not looked at again."""

    def __init__(self) -> None:
        self._going: dict[int, TrialState] = {}
        self._seen = 0

    def of(self, trials: Sequence[FrozenTrial]) -> list[Evaluation]:
        """Return what has started, ended, or been promoted since the last call; `trials` are all of the study."""
        fresh = trials[self._seen :]
        changed = [
            trial
            for trial in [*(trials[number] for number in self._going), *fresh]
            if self._going.get(trial.number) != trial.state
        ]
        repeated = set(map(repeated_by, fresh))
        known = [trials[number] for number in repeated if number is not None and number < self._seen]
        self._going.update((trial.number, trial.state) for trial in changed)
        for trial in changed:
            if trial.state.is_finished():
                del self._going[trial.number]
        self._seen = len(trials)
        news = {trial.number: trial for trial in [*filter(is_paused, known), *changed]}
        return [evaluation_of(trial, trial.number in repeated) for trial in news.values()]
