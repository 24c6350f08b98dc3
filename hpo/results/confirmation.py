"""Confirm the winner: train the best individuals again with other seeds, and compare their losses.

The loss that selected an individual is too optimistic, because it is the lowest of many. The
confirmations are recorded in a separate study. They do not count
against the budget.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.results.comparison import ROUNDING, LossSample, compare_with_lowest, pool_variances
from hpo.store.evaluations import INTERRUPTED, Evaluation

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.manifest import Manifest
    from hpo.store.record import Record


@dataclass(frozen=True)
class ConfirmationPlan:
    """The number of seeds with which each of the best individuals is confirmed, and how the seeds are drawn.

    Seeds are large random numbers, so that they differ from the seeds of runs. Individuals have
    different seeds, so that their losses are independent. Other settings give other seeds, so that
    losses under different settings are never compared.
    """

    count: int
    """The number of seeds for each individual."""
    seed_basis: str
    """The seed and the settings of the run, as text. All confirmation seeds follow from it."""
    min_count: int = 0
    """The number of seeds that is enough for an individual of an earlier session to stay confirmed. 0 means `count`."""

    def draw_seeds(self, trial: int) -> list[int]:
        """Return the seeds for confirming the individual with this trial number."""
        rng = random.Random(f"confirm/{self.seed_basis}/{trial}")
        return [rng.getrandbits(31) for _ in range(self.count)]

    def select_planned(self, confirmations: Sequence[Evaluation]) -> list[Evaluation]:
        """Return the confirmations with a seed of this plan, whether they have ended or not.

        If an individual has fewer than `min_count` of them, all its confirmations are left out.
        """
        chosen: dict[int, list[Evaluation]] = {}
        for evaluation in filter(_is_counted, confirmations):
            trial = evaluation.confirms
            if trial is not None and evaluation.seed in self.draw_seeds(trial):
                chosen.setdefault(trial, []).append(evaluation)
        return [
            evaluation
            for group in chosen.values()
            if len(group) >= (self.min_count or self.count)
            for evaluation in group
        ]

    def count_remaining(
        self, best: Sequence[Evaluation], confirmations: Sequence[Evaluation]
    ) -> int:
        """Return how many planned confirmations of the individuals in `best` have not finished yet."""
        return len(
            self._pair_with_seeds(best).keys()
            - {(e.confirms, e.seed) for e in confirmations if e.is_finished}
        )

    def enqueue_planned(
        self, record: Record, best: Sequence[Evaluation], space: SearchSpace
    ) -> int:
        """Enqueue the planned confirmations that the record lacks, and cancel waiting ones that are not planned.

        Args:
            best: The individuals to confirm.

        Returns:
            The number of confirmations in the record, without interrupted ones.
        """
        planned, distributions = self._pair_with_seeds(best), space.make_distributions()
        for waiting in [
            evaluation for evaluation in record.read_evaluations() if evaluation.state == "waiting"
        ]:
            if (waiting.confirms, waiting.seed) not in planned:
                record.cancel_waiting(waiting)
        recorded = {(e.confirms, e.seed) for e in record.read_evaluations() if _is_counted(e)}
        for (trial, seed), params in planned.items():
            if (trial, seed) not in recorded:
                record.enqueue(
                    params, distributions, confirms=trial, seed=seed, propagator="--confirm-seeds"
                )
        return sum(map(_is_counted, record.read_evaluations()))

    def _pair_with_seeds(
        self, best: Sequence[Evaluation]
    ) -> dict[tuple[int | None, int | None], dict[str, Any]]:
        """Return the hyperparameters to train, by pairs of a trial number and a seed."""
        return {
            (evaluation.trial, seed): evaluation.params
            for evaluation in best
            for seed in self.draw_seeds(evaluation.trial)
        }


def make_plan(run: Manifest) -> ConfirmationPlan:
    """Return the confirmation plan of the latest session of a run."""
    basis = _format_seed_basis(run.seed, run.settings)
    counts = [
        session.options.get("confirm_seeds", 0)
        for session in run.sessions
        if _format_seed_basis(session.options.get("seed"), session.settings) == basis
    ]
    return ConfirmationPlan(
        run.confirm_seeds,
        basis,
        min(
            (count for count in counts if 0 < count <= run.confirm_seeds), default=run.confirm_seeds
        ),
    )


def _format_seed_basis(seed: object, settings: Mapping[str, Any]) -> str:
    return f"{seed}/{json.dumps(settings, sort_keys=True)}"


def _is_counted(confirmation: Evaluation) -> bool:
    return confirmation.state != INTERRUPTED


@dataclass(frozen=True)
class ConfirmedIndividual:
    """An individual that was trained again with other seeds, compared with the others."""

    trial: int
    """The trial number of the individual in the search."""
    losses: list[float]
    """The losses of the evaluations that succeeded, one for each seed."""
    failed: int = 0
    """The number of evaluations that failed."""
    mean: float | None = None
    """The mean of the losses; None without losses."""
    deviation: float | None = None
    """The standard deviation of the losses; None for fewer than two losses."""
    may_be_best: bool | None = None
    """Whether the true mean, over all possible seeds, may be the lowest; None without a comparison."""
    worse_by_at_most: float | None = None
    """The upper bound of the difference to the lowest true mean; None without a comparison."""
    as_good: bool = False
    """Whether `worse_by_at_most` is at most the margin, see `compute_margin`."""


@dataclass(frozen=True)
class SeedNoise:
    """How much the seed changes the loss."""

    deviation: float
    """The standard deviation of the losses of one individual over seeds."""
    share: float
    """The share of the variance of all losses that the seeds cause, from 0 to 1."""


def compare_confirmed(confirmations: Sequence[Evaluation]) -> list[ConfirmedIndividual]:
    """Compare the confirmed individuals, and sort them by the number of failures and then by the mean loss.

    Individuals with fewer seeds than others come last, because few losses may be low by luck. The
    mean losses are compared by `hpo.results.comparison`. Only individuals with as many failures as
    the first one take part.

    Args:
        confirmations: The planned confirmations. Unfinished ones are ignored.

    Returns:
        The individuals, best first.
    """
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in confirmations:
        if evaluation.confirms is not None and evaluation.is_finished:
            groups.setdefault(evaluation.confirms, []).append(evaluation)
    entries = [_make_entry(trial, group) for trial, group in groups.items()]
    most = max(map(len, groups.values()), default=0)
    entries.sort(key=lambda entry: _make_sort_key(entry, most))
    rivals = select_comparable(entries)
    samples, scale = _make_samples(rivals)
    margin = _compute_scaled_margin(samples)
    compared = {}
    for entry, bound in zip(rivals, compare_with_lowest(samples) if samples else [], strict=True):
        excess = max(0.0, scale * bound.excess)
        compared[entry.trial] = replace(
            entry,
            may_be_best=bound.may_be_lowest,
            worse_by_at_most=excess if math.isfinite(excess) else None,
            as_good=bound.excess <= margin + ROUNDING,
        )
    return [compared.get(entry.trial, entry) for entry in entries]


def _make_sort_key(entry: ConfirmedIndividual, most: int) -> tuple[bool, int, float]:
    is_short = len(entry.losses) + entry.failed < most
    return is_short, entry.failed, math.inf if entry.mean is None else entry.mean


def select_comparable(entries: Sequence[ConfirmedIndividual]) -> list[ConfirmedIndividual]:
    """Return the first entry and the entries that can be compared with it; empty if there are none.

    Entries can be compared if they have as many failures as the first entry, and at least two
    losses.
    """
    failed = entries[0].failed if entries else 0
    rivals = [entry for entry in entries if entry.failed == failed and len(entry.losses) > 1]
    return rivals if len(rivals) > 1 and rivals[0] is entries[0] else []


def compute_margin(entries: Sequence[ConfirmedIndividual]) -> float | None:
    """Return the largest difference to the best mean loss that counts as equally good; None without a comparison.

    The margin is a standard deviation of losses over seeds: the first individual's own, or the
    pooled one if it is smaller.
    """
    samples, scale = _make_samples(select_comparable(entries))
    return scale * _compute_scaled_margin(samples) if samples else None


def count_seeds_needed(entries: Sequence[ConfirmedIndividual], most: int) -> int | None:
    """Estimate how many seeds each individual needs to show that the first one is as good as the best.

    The first individual has the lowest mean loss so far, but the true mean of another individual
    may be lower.

    Args:
        entries: The result of `compare_confirmed`.
        most: The largest number of seeds to try.

    Returns:
        The number of seeds; None if more than `most` are needed.
    """
    samples, _ = _make_samples(select_comparable(entries))
    margin = _compute_scaled_margin(samples)
    for count in range(samples[0].size + 1, most + 1):
        if (
            compare_with_lowest([replace(sample, size=count) for sample in samples])[0].excess
            <= margin + ROUNDING
        ):
            return count
    return None


def _make_samples(entries: Sequence[ConfirmedIndividual]) -> tuple[list[LossSample], float]:
    """Return the losses of each individual as a sample, divided by a common scale, and this scale."""
    scale = _find_scale([loss for entry in entries for loss in entry.losses])
    return [
        LossSample.from_losses([loss / scale for loss in entry.losses]) for entry in entries
    ], scale


def _compute_scaled_margin(samples: Sequence[LossSample]) -> float:
    return math.sqrt(min(samples[0].variance, pool_variances(samples))) if samples else 0.0


def estimate_seed_noise(groups: Sequence[Sequence[float]]) -> SeedNoise | None:
    """Estimate how much the seed changes the loss, by an analysis of variance with random effects.

    The method is described by Searle, Casella and McCulloch, Variance components, 1992, section
    3.6. A negative variance between individuals counts as 0.

    Args:
        groups: The losses of each individual, one for each seed.

    Returns:
        The noise; None if there are too few losses.
    """
    groups = [losses for losses in groups if losses]
    sizes = [len(losses) for losses in groups]
    count, freedom = sum(sizes), sum(sizes) - len(groups)
    if len(groups) < 2 or not freedom:
        return None
    scale = _find_scale([loss for losses in groups for loss in losses])
    scaled = [[loss / scale for loss in losses] for losses in groups]
    means, overall = list(map(statistics.fmean, scaled)), statistics.fmean(itertools.chain(*scaled))
    within = (
        sum(
            (loss - mean) ** 2
            for losses, mean in zip(scaled, means, strict=True)
            for loss in losses
        )
        / freedom
    )
    between = sum(size * (mean - overall) ** 2 for size, mean in zip(sizes, means, strict=True)) / (
        len(groups) - 1
    )
    size = (count - sum(size**2 for size in sizes) / count) / (len(groups) - 1)
    total = within + max(between - within, 0.0) / size
    if math.sqrt(total) <= ROUNDING:
        return None
    return SeedNoise(scale * math.sqrt(within), within / total)


def _make_entry(trial: int, group: Sequence[Evaluation]) -> ConfirmedIndividual:
    losses = [evaluation.loss for evaluation in group if evaluation.state == "complete"]
    scale = _find_scale(losses)
    scaled = [loss / scale for loss in losses]
    return ConfirmedIndividual(
        trial,
        losses,
        failed=len(group) - len(losses),
        mean=scale * statistics.fmean(scaled) if losses else None,
        deviation=scale * statistics.stdev(scaled) if len(losses) > 1 else None,
    )


def _find_scale(losses: Sequence[float]) -> float:
    """Return a divisor for losses, so that their squares do not overflow. Diverged networks have huge losses."""
    return max(map(abs, losses), default=0.0) or 1.0
