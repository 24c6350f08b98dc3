"""Group the trials of a study by individual. Trackers show each individual as a run."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from hpo.store.evaluations import Evaluation, find_root


class Individuals:
    """The individuals of a study, each with all its trials.

    An individual has several trials if it was retried after an interruption, or promoted after a pause.
    """

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}
        self._trials: dict[int, dict[int, Evaluation]] = {}

    def add_trials(self, changed_trials: Collection[Evaluation]) -> list[int]:
        """Add or replace trials, and return the number of the first trial of each individual that has changed."""
        changed = {}
        for evaluation in sorted(changed_trials, key=lambda evaluation: evaluation.trial):
            root = find_root(evaluation, self._roots)
            self._trials.setdefault(root, {})[evaluation.trial] = evaluation
            changed[root] = True
        return list(changed)

    def find_latest(self, root: int) -> Evaluation | None:
        """Return the latest trial of an individual that has started; None if no trial has started.

        Args:
            root: Number of the first trial of the individual.
        """
        # A trial that was withdrawn while it waited has no start time.
        started = [
            evaluation
            for evaluation in self._trials[root].values()
            if evaluation.state != "waiting" and math.isfinite(evaluation.started)
        ]
        return max(started, key=lambda evaluation: evaluation.trial, default=None)

    def merge_trials(self, root: int) -> Evaluation:
        """Merge all trials of an individual into one, from the start of its first trial to the end of its latest trial.

        The losses are those of the latest trial that has any. If this trial has resumed an earlier trial, it already
        includes the losses of that trial.

        Args:
            root: Number of the first trial of the individual.
        """
        trials = self._trials[root]
        first, latest = trials[min(trials)], self.find_latest(root)
        assert latest is not None
        with_loss = [evaluation for evaluation in trials.values() if evaluation.curve]
        return replace(
            latest,
            trial=root,
            curve=max(with_loss, key=lambda evaluation: evaluation.trial).curve if with_loss else {},
            started=first.started,
            island=first.island,
            worker=first.worker,
            generation=first.generation,
            propagator=first.propagator,
        )
