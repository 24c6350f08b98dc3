"""Define evaluations and assignments (trials to run)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

INTERRUPTED = "interrupted"
CONFIRMATION_PREFIX = "confirm-"  # Prefix of trial numbers in the confirmation study.

# Fields that are sent to all leaders: only the fields that propagators need, to keep messages
# small.
SHARED_FIELDS = (
    *("trial", "state", "loss", "other_values", "params", "island", "worker", "generation"),
    *("seconds", "ended", "imported_from", "retry_of", "inherits", "checkpoint_step"),
)


@dataclass(frozen=True, slots=True)  # A run may have millions, and slots save memory.
class Evaluation:
    """Represent one trial of the study with the fields that the program reads.

    Attributes:
        trial: Number of the trial in its study.
        state: "running", "waiting", "complete", "pruned", "paused", "failed", "interrupted" or
            "promoted". An interrupted trial does not count: its job has ended, or its worker was
            broken, and another trial retries it; or it was the test of a worker. A promoted trial
            was paused at a rung, and another trial trains its individual further.
        loss: Lowest loss; infinite unless the state is complete, pruned, paused or promoted.
        params: Values of the active hyperparameters.
        island: Island that the individual belongs to.
        worker: Worker that started the evaluation.
        generation: Generation of the individual, counted by its worker.
        seconds: Duration of the evaluation; 0 before it ends, NaN if it is unknown.
        metrics: Metrics reported with the lowest loss.
        failure: Reason of a failure in one line.
        traceback: Traceback of a failure.
        propagator: Name of the propagator that made the individual.
        started: Start, in seconds since the epoch. The host's clock may have been changed since.
        ended: End, in seconds since the epoch.
        curve: Loss of each step; steps count from 1.
        imported_from: Run that the evaluation was imported from; empty for the run's own
            evaluations.
        confirms: Trial of the search that this evaluation confirms; None for a trial of the search.
        seed: Seed of the evaluation; None before it starts.
        immigrants: Number of individuals that the island had received when the evaluation started,
            by source island.
        tests: Trial that this one repeats on a suspected worker; None if it is not such a test.
        retry_of: Interrupted or paused trial that this evaluation continues; None for an
            individual's first trial.
        crash_count: Number of times in a row that the job crashed while this individual was
            running.
        resumed_from_step: Number of losses taken over from the trial `retry_of`.
        checkpoint_step: Step of the latest checkpoint; 0 without one.
        seconds_before: Part of `seconds` that was spent in the trial `retry_of`.
        epoch: Number of the last epoch in the lines of a script, by ``--step``; None if not known.
        paused_after: Number of losses after which the evaluation was paused; 0 if it was not
            paused.
        cut_after: Number of losses after which the evaluation ended at the target loss; 0 if it did
            not end there.
        inherits: Trial from whose checkpoint the evaluation started (population based training);
            None without one.
        other_values: Values of all objectives except the loss; empty if there are none.
        hosts: Number of ranks that have evaluated it, by the name of the host; empty before it
            starts.
        gpus: Identifiers of the GPUs on which they computed, by the name of the host; empty without
            GPUs.
        at_rungs: Values of all objectives at each rung, by number of losses; empty if the loss is
            the only objective.
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
    tests: int | None = None
    retry_of: int | None = None
    crash_count: int = 0
    resumed_from_step: int = 0
    checkpoint_step: int = 0
    seconds_before: float = 0.0
    epoch: int | None = None
    paused_after: int = 0
    cut_after: int = 0
    inherits: int | None = None
    other_values: tuple[float, ...] = ()
    hosts: Mapping[str, int] = field(default_factory=dict)
    gpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    at_rungs: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        # All fields would fill a page of a notebook.
        shown = ("trial", "state", "loss", "params", "metrics")
        return f"Evaluation({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __eq__(self, other: object) -> bool:
        """Compare all fields as one tuple, so that an evaluation with a NaN equals itself.

        Since Python 3.13, dataclasses compare field by field, and a NaN does not equal itself.
        """
        if not isinstance(other, Evaluation):
            return NotImplemented
        return bool(_get_all_fields(self) == _get_all_fields(other))

    @property
    def ranks(self) -> int:
        """Number of ranks that have evaluated it; 0 if it is not known."""
        return sum(self.hosts.values())

    @property
    def gpu_count(self) -> int:
        """Number of GPUs on which its ranks have computed."""
        return sum(map(len, self.gpus.values()))

    @property
    def values(self) -> tuple[float, ...]:
        """Values of all objectives, first the loss."""
        return (self.loss, *self.other_values)

    @property
    def label(self) -> str:
        """Name of the trial, unique in the run: confirmations have a prefix."""
        return format_label(self.trial, self.confirms is not None)

    @property
    def is_finished(self) -> bool:
        """Whether the state is complete, pruned, paused or failed."""
        return self.state in ("complete", "pruned", "paused", "failed")

    @property
    def has_ended(self) -> bool:
        """Whether the trial has ended without an interruption."""
        return self.is_finished or self.state == "promoted"

    @property
    def has_succeeded(self) -> bool:
        """Whether the state is complete, pruned, paused or promoted, so that there is a loss."""
        return self.has_ended and self.state != "failed"

    @property
    def has_ended_in_run(self) -> bool:
        """Whether `has_ended` is true and the evaluation was not imported from another run."""
        return self.has_ended and not self.imported_from

    @property
    def end_state(self) -> str:
        """State at the end of the trial: "paused" for a promoted trial, `state` otherwise."""
        return "paused" if self.state == "promoted" else self.state

    @property
    def counts_for_budget(self) -> bool:
        """Whether `is_finished` is true and the evaluation was not imported from another run."""
        return self.is_finished and not self.imported_from


_get_all_fields = attrgetter(*(each.name for each in fields(Evaluation)))


@dataclass(frozen=True)
class Assignment:
    """Describe a trial that a worker has to run."""

    trial_id: int
    """Id of the trial in the storage."""
    number: int
    """Number of the trial in its study."""
    params: dict[str, Any]
    root: int
    """Number of the individual's first trial, which identifies the checkpoint."""
    seed: int | None = None
    """None for the seed of the run."""
    parent: int | None = None
    """First trial of the individual from whose checkpoint this trial starts; None without one."""
    confirms: int | None = None
    """Trial of the search that this one confirms with another seed; None in the search."""
    tests: int | None = None
    """Trial that this one repeats on a suspected worker; None if it is not such a test."""

    @property
    def label(self) -> str:
        """Name of the trial, unique in the run: confirmations have a prefix."""
        return format_label(self.number, self.confirms is not None)


@dataclass(frozen=True)
class Progress:
    """The progress of a trial that another trial continues."""

    losses: Sequence[float] = ()
    """The loss of each step; infinite if it is missing."""
    seconds: float = 0.0
    """Seconds of training until the last of the losses."""
    epoch: int | None = None
    """Number of the epoch of the last loss in the lines of a script; None if it is not known."""


def format_label(trial: int, confirms: bool) -> str:
    """Return the label of a trial: its number, with a prefix in the confirmation study."""
    return f"{CONFIRMATION_PREFIX}{trial}" if confirms else str(trial)


def group_by_individual(evaluations: Iterable[Evaluation]) -> dict[int, list[Evaluation]]:
    """Group evaluations by individual. The keys are the numbers of first trials."""
    roots: dict[int, int] = {}
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        groups.setdefault(find_root(evaluation, roots), []).append(evaluation)
    return groups


def find_root(evaluation: Evaluation, roots: dict[int, int]) -> int:
    """Return the number of the first trial of an evaluation's individual, and store it in `roots`.

    `roots` maps trials to the first trials of their individuals. If `roots` lacks the previous
    trial of the individual, the given trial counts as the first.
    """
    before = evaluation.retry_of
    roots[evaluation.trial] = (
        evaluation.trial if before is None else roots.get(before, evaluation.trial)
    )
    return roots[evaluation.trial]


def rank_evaluations(evaluations: Sequence[Evaluation], n: int) -> list[Evaluation]:
    """Return the `n` complete evaluations with the lowest losses, lowest first."""
    return sorted(
        (e for e in evaluations if e.state == "complete"), key=lambda e: (e.loss, e.trial)
    )[:n]


def find_best(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """Return the complete evaluation with the lowest loss; None if there is none."""
    return min(
        (one for one in evaluations if one.state == "complete"),
        key=lambda e: (e.loss, e.trial),
        default=None,
    )


def sort_by_end(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the finished evaluations of this run, without imported ones, ordered by their ends."""
    return sorted(
        (evaluation for evaluation in evaluations if evaluation.counts_for_budget),
        key=lambda evaluation: (evaluation.ended, evaluation.trial),
    )
