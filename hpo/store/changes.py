"""Follow the changes of a study. This is the only way in which a process learns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optuna.trial import FrozenTrial

from hpo.store.evaluations import Evaluation
from hpo.store.trials import find_retried_trial, make_evaluation


class ChangeLog:
    """Convert the trials of a study to evaluations, and log each change of a state.

    A trial that has ended changes only when another trial continues it, and a changed trial is
    another object. So an update compares only the trials that have not ended.

    Args:
        read_trials: Returns all trials of the study, ordered by number.
        noted: The numbers of the trials that have changed, to which the storage adds, and which an
            update clears. Then an update takes no longer if more trials are running. None if the
            storage notes no changes.
    """

    def __init__(
        self, read_trials: Callable[[], Sequence[FrozenTrial]], noted: set[int] | None = None
    ) -> None:
        self._read_trials = read_trials
        self._noted = noted
        self._evaluations: list[Evaluation] = []
        self._unfinished: dict[int, FrozenTrial] = {}  # As they were read last.
        # Their trials have new losses or attributes. They are converted when they are read, because
        # conversions are slow, and most of these evaluations change again before.
        self._outdated: set[int] = set()
        # The trials that changed, in this order. Superseded evaluations are forgotten.
        self.entries: list[int] = []

    def update(self) -> None:
        """Read the trials, and log the evaluations that were added, or changed their state."""
        trials = self._read_trials()
        new = range(len(self._evaluations), len(trials))
        retried = (find_retried_trial(trials[number]) for number in new)
        repeated = {number for number in retried if number is not None}
        changed = self._find_changed(trials)
        moved = [
            number for number in changed if trials[number].state != self._unfinished[number].state
        ]
        self._outdated.update(changed)
        for number in (*changed, *new):
            self._unfinished[number] = trials[number]
        for number in (*sorted(repeated.difference(moved, new)), *moved, *new):
            self._log(make_evaluation(trials[number], number in repeated))
            if trials[number].state.is_finished():
                self._unfinished.pop(number, None)

    def _find_changed(self, trials: Sequence[FrozenTrial]) -> list[int]:
        """Return the numbers of the trials that had not ended and have changed, in their order."""
        unfinished = self._unfinished
        candidates = sorted(unfinished if self._noted is None else self._noted & unfinished.keys())
        if self._noted is not None:
            self._noted.clear()
        return [number for number in candidates if trials[number] is not unfinished[number]]

    def _log(self, evaluation: Evaluation) -> None:
        number = evaluation.trial
        self._outdated.discard(number)
        if number == len(self._evaluations):
            self._evaluations.append(evaluation)
        else:
            has_changed = evaluation.state != self._evaluations[number].state
            self._evaluations[number] = evaluation
            if not has_changed:
                return
        self.entries.append(number)

    def list_changed(self, first: int) -> list[Evaluation]:
        """Return the evaluations of the entries from `first` on, each once, in its present state.

        Newer losses are not converted: leaders ask for changes often, and need no losses of running
        evaluations.
        """
        return [self._evaluations[number] for number in dict.fromkeys(self.entries[first:])]

    def list_evaluations(self) -> list[Evaluation]:
        """Return all evaluations as of the latest update, ordered by trial number."""
        self._convert_outdated()
        return list(self._evaluations)

    def list_running(self) -> list[Evaluation]:
        """Return the running evaluations as of the latest update, each with its losses so far."""
        self._convert_outdated()
        unfinished = [self._evaluations[number] for number in self._unfinished]
        return [evaluation for evaluation in unfinished if evaluation.state == "running"]

    def _convert_outdated(self) -> None:
        for number in self._outdated:
            self._evaluations[number] = make_evaluation(self._unfinished[number])
        self._outdated.clear()


class Follower:
    """Read the changes of a study, each once.

    Args:
        with_losses: Whether running evaluations with new losses are changes, too.
    """

    def __init__(self, log: ChangeLog, with_losses: bool = False) -> None:
        self._log = log
        self._with_losses = with_losses
        self._count: int | None = None  # Entries of the log that were read.
        self._running: dict[int, Evaluation] = {}  # As they were read last.

    def read(self) -> list[Evaluation]:
        """Return the evaluations that were added or changed since the previous call, each once."""
        self._log.update()
        first = self._count
        self._count = len(self._log.entries)
        changes = self._log.list_evaluations() if first is None else self._log.list_changed(first)
        if not self._with_losses:
            return changes
        before = self._running
        self._running = {evaluation.trial: evaluation for evaluation in self._log.list_running()}
        for trial, evaluation in self._running.items():
            if evaluation is not before.get(trial):
                changes.append(evaluation)
        return list({evaluation.trial: evaluation for evaluation in changes}.values())
