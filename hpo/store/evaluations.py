"""The evaluations of a run, as the record knows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INTERRUPTED = "interrupted"
CONFIRMATION_PREFIX = "confirm-"  # before the numbers of trials of the study that confirms the best

# What leaders are told of an evaluation: what breeding needs, and no more, since there may be many of both.
SHARED_FIELDS = (
    *("trial", "state", "loss", "other_values", "params", "island", "worker", "generation"),
    *("seconds", "ended", "imported_from", "retry_of", "inherits", "checkpoint_step"),
)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation as the record knows it.

    `state` is running, waiting (to be repeated), complete, pruned, paused, failed, or one of two after which another
    trial repeats it: interrupted, and promoted, which it was from being paused. `loss` is infinite unless the
    evaluation is complete, pruned, paused or promoted; `seconds` is how long one that has ended took, NaN where that is
    not known; `started` and `ended` are seconds since the epoch, by clocks that may have been set in between; `curve`
    holds the loss after each epoch, counted from 1. `origin` says where it was taken over from, if another run has made
    it; `seed` is its own, None before it starts; `confirms` is the trial that it confirms. `immigrants` counts, by the
    island that bred them, the individuals of other islands that lived on its own island when it began. `retry_of` is
    the interrupted or paused trial that it evaluates again, or goes on with, and `crash_count` how often in a row the
    job has died while one of them was evaluated. `resumed_from_step` is the number of losses that it took over from
    that trial, whose state it went on from, and `checkpoint_step` that of its own last state; `seconds_before` are
    those of its `seconds` that were that trial's. `others` are the values of the objectives behind the loss, empty
    where there are none or it has no loss. `at_rungs` are the values of all objectives at its rungs, by the number of
    losses; empty with one objective. `paused_after` is the number of losses with which it was paused, and `cut_after`
    that with which a complete one was ended at the target loss. `inherits` is the trial whose state it began with.
    `worker_groups` are the workers that it went on with, the first of which is its own: each a dict of `workers`,
    `after` how many losses, and `at` what time.
    """

    trial: int
    state: str
    loss: float
    params: dict[str, Any]
    island: int
    worker: int
    generation: int
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    traceback: str = ""
    propagator: str = ""
    started: float = math.nan
    ended: float = math.nan
    curve: Mapping[int, float] = field(default_factory=dict)
    imported_from: str = ""
    confirms: int | None = None
    seed: int | None = None
    immigrants: Mapping[str, int] = field(default_factory=dict)
    retry_of: int | None = None
    crash_count: int = 0
    resumed_from_step: int = 0
    checkpoint_step: int = 0
    seconds_before: float = 0.0
    paused_after: int = 0
    cut_after: int = 0
    inherits: int | None = None
    worker_groups: Sequence[Mapping[str, Any]] = ()
    other_values: tuple[float, ...] = ()
    at_rungs: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Compare fields as tuples do, of which NaN equals itself: since Python 3.13, it differs in data classes."""
        if not isinstance(other, Evaluation):
            return NotImplemented
        return tuple(vars(self).values()) == tuple(vars(other).values())

    @property
    def values(self) -> tuple[float, ...]:
        """The values of all objectives, of which the loss is the first."""
        return (self.loss, *self.other_values)

    @property
    def workers(self) -> Sequence[int]:
        """The workers that are at it now, or were at its end."""
        return self.worker_groups[-1]["workers"] if self.worker_groups else [self.worker]

    @property
    def label(self) -> str:
        """The name of its trial, where evaluations of the search and those that confirm the best are shown together."""
        return format_label(self.trial, self.confirms is not None)

    @property
    def is_finished(self) -> bool:
        """Whether it ended by itself, and this is the last that is known of its individual."""
        return self.state in ("complete", "pruned", "paused", "failed")

    @property
    def has_ended(self) -> bool:
        """Whether it ended by itself, also where its individual has gone on since."""
        return self.is_finished or self.state == "promoted"

    @property
    def has_succeeded(self) -> bool:
        """Whether it ended by itself, with a loss."""
        return self.has_ended and self.state != "failed"

    @property
    def has_ended_in_run(self) -> bool:
        """Whether it ended by itself in this run, also where its individual has gone on since."""
        return self.has_ended and not self.imported_from

    @property
    def end_state(self) -> str:
        """The state that it ended with, also where its individual has gone on since."""
        return "paused" if self.state == "promoted" else self.state

    @property
    def counts_for_budget(self) -> bool:
        """Whether it is finished, and counts for the run's budget."""
        return self.is_finished and not self.imported_from


@dataclass(frozen=True)
class Assignment:
    """A trial that has been started: its number in the study, its hyperparameters, its seed (None for the run's).

    `root` is the first of the trials that repeat each other, of which this may be one, and `parent` that of the
    individual whose state it begins with, if there is one. `confirms` is the trial of the search that it confirms.
    """

    trial_id: int
    number: int
    params: dict[str, Any]
    root: int
    seed: int | None = None
    parent: int | None = None
    confirms: int | None = None


def format_label(trial: int, confirms: bool) -> str:
    """Return the name of a trial of the search, or of the study that confirms the best, which has its own numbers."""
    return f"{CONFIRMATION_PREFIX}{trial}" if confirms else str(trial)


def group_by_individual(evaluations: Iterable[Evaluation]) -> dict[int, list[Evaluation]]:
    """Return the evaluations of each individual, by the first of them."""
    roots: dict[int, int] = {}
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        groups.setdefault(find_root(evaluation, roots), []).append(evaluation)
    return groups


def find_root(evaluation: Evaluation, roots: dict[int, int]) -> int:
    """Return the first trial of an evaluation's individual, which is added to those that are known, by trial."""
    before = evaluation.retry_of
    roots[evaluation.trial] = evaluation.trial if before is None else roots.get(before, evaluation.trial)
    return roots[evaluation.trial]


def rank_evaluations(evaluations: Sequence[Evaluation], n: int) -> list[Evaluation]:
    """Return the n complete evaluations with the lowest losses, the lowest first."""
    return sorted((e for e in evaluations if e.state == "complete"), key=lambda e: (e.loss, e.trial))[:n]


def find_best(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """Return the complete evaluation with the lowest loss; None while none is complete."""
    return min((one for one in evaluations if one.state == "complete"), key=lambda e: (e.loss, e.trial), default=None)
