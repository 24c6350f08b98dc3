"""An individual as trackers show it: one run, however many trials have evaluated it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from hpo.store.evaluations import Evaluation, find_root


class Individuals:
    """The individuals of a study, each with its trials, of which a later one repeats an earlier one."""

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}
        self._trials: dict[int, dict[int, Evaluation]] = {}

    def add_trials(self, changed_trials: Collection[Evaluation]) -> list[int]:
        """Learn of new and changed trials, and return the first trials of their individuals."""
        changed = {}
        for evaluation in sorted(changed_trials, key=lambda evaluation: evaluation.trial):
            root = find_root(evaluation, self._roots)
            self._trials.setdefault(root, {})[evaluation.trial] = evaluation
            changed[root] = True
        return list(changed)

    def find_latest(self, root: int) -> Evaluation | None:
        """Return the last trial of an individual that has begun; None if none has."""
        # A trial that was withdrawn while it waited has never begun.
        begun = [
            evaluation
            for evaluation in self._trials[root].values()
            if evaluation.state != "waiting" and math.isfinite(evaluation.started)
        ]
        return max(begun, key=lambda evaluation: evaluation.trial, default=None)

    def merge_trials(self, root: int) -> Evaluation:
        """Return an individual as one evaluation: begun as its first trial, and ended as its latest.

        Its curve is of the latest trial with a loss: a trial that continues has the losses of the earlier ones, too.
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
