"""Group the trials of a study by individual, because trackers show one run per individual."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from hpo.store.evaluations import Evaluation, find_root


class Individuals:
    """The individuals of a study, each with its trials in order: a retry or a promotion adds a trial."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}
        self._trials: dict[int, dict[int, Evaluation]] = {}

    def add_trials(self, changed_trials: Collection[Evaluation]) -> list[int]:
        """Add new and changed trials, and return the first trial number of each affected individual."""
        changed = {}
        for evaluation in sorted(changed_trials, key=lambda evaluation: evaluation.trial):
            root = find_root(evaluation, self._roots)
            self._trials.setdefault(root, {})[evaluation.trial] = evaluation
            changed[root] = True
        return list(changed)

    def find_latest(self, root: int) -> Evaluation | None:
        """Return the last started trial of an individual, or None if no trial has started."""
        # A trial that was withdrawn while it waited has no start time.
        started = [
            evaluation
            for evaluation in self._trials[root].values()
            if evaluation.state != "waiting" and math.isfinite(evaluation.started)
        ]
        return max(started, key=lambda evaluation: evaluation.trial, default=None)

    def merge_trials(self, root: int) -> Evaluation:
        """Return an individual as one evaluation with the start of its first trial and the end of its latest trial.

        The curve is that of the latest trial with a loss. A trial that continues an earlier trial includes its losses.
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
