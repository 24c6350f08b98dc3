"""Confirm the winner: train the best individuals again with other seeds, and compare their losses.

The loss that selected an individual is too optimistic, because it is the lowest of many. The
confirmations are recorded in a separate study. They do not count against the budget.
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

import numpy as np
import numpy.typing as npt

from hpo.store.evaluations import INTERRUPTED, Evaluation
from hpo.text_format import format_number

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.manifest import Manifest
    from hpo.store.record import Record

_CONFIDENCE = 0.95  # Probability that all statements of a comparison hold together.
# Relative to the largest loss: equal losses may have been summed in another order.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ConfirmationPlan:
    """How many seeds confirm each of the best individuals, and how the seeds are drawn.

    Seeds are large random numbers, so that they differ from the seeds of runs. Individuals have
    different seeds, so that their losses are independent. Other settings give other seeds, so that
    losses under different settings are never compared.
    """

    count: int
    """The number of seeds for each individual."""
    seed_basis: str
    """The seed and the settings of the run, as text. All confirmation seeds follow from it."""
    min_count: int = 0
    """How many seeds suffice for an individual of an earlier session. 0 means `count`."""

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

    def split_planned(
        self, confirmations: Sequence[Evaluation]
    ) -> tuple[list[Evaluation], list[Evaluation]]:
        """Return the planned confirmations, as `select_planned`, and all others."""
        planned = self.select_planned(confirmations)
        trials = {evaluation.trial for evaluation in planned}
        return planned, [each for each in confirmations if each.trial not in trials]

    def count_remaining(
        self, best: Sequence[Evaluation], confirmations: Sequence[Evaluation]
    ) -> int:
        """Return how many planned confirmations of the individuals in `best` have not finished."""
        finished = {(e.confirms, e.seed) for e in confirmations if e.is_finished}
        return len(self._pair_with_seeds(best).keys() - finished)

    def enqueue_planned(
        self, record: Record, best: Sequence[Evaluation], space: SearchSpace
    ) -> int:
        """Enqueue the planned confirmations of `best` that the record lacks, and cancel others.

        Return the number of confirmations in the record, without interrupted ones.
        """
        planned = self._pair_with_seeds(best)
        distributions = space.make_distributions()
        for evaluation in record.read_evaluations():
            is_planned = (evaluation.confirms, evaluation.seed) in planned
            if evaluation.state == "waiting" and not is_planned:
                record.cancel_waiting(evaluation)
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
    usable = [count for count in counts if 0 < count <= run.confirm_seeds]
    return ConfirmationPlan(run.confirm_seeds, basis, min(usable, default=run.confirm_seeds))


def _format_seed_basis(seed: object, settings: Mapping[str, Any]) -> str:
    return f"{seed}/{json.dumps(settings, sort_keys=True)}"


def _is_counted(confirmation: Evaluation) -> bool:
    return confirmation.state != INTERRUPTED


@dataclass(frozen=True)
class ConfirmedIndividual:
    """An individual that was trained again with other seeds, compared with the others.

    Its `losses` are those of the evaluations that succeeded; `failed` is the number of the others.
    """

    trial: int
    """The trial number of the individual in the search."""
    losses: list[float]
    failed: int = 0
    mean: float | None = None
    """The mean of the losses; None without losses."""
    deviation: float | None = None
    """The standard deviation of the losses; None for fewer than two losses."""
    may_be_best: bool | None = None
    """Whether the true mean, over all seeds, may be the lowest; None without a comparison."""
    worse_by_at_most: float | None = None
    """The upper bound of the difference to the lowest true mean; None without a comparison."""
    as_good: bool = False
    """Whether `worse_by_at_most` is at most the margin, see `compute_margin`."""


def compare_confirmed(confirmations: Sequence[Evaluation]) -> list[ConfirmedIndividual]:
    """Compare the confirmed individuals, and sort them by their failures and then by the mean loss.

    Unfinished confirmations are ignored. Individuals with fewer seeds than others come last,
    because few losses may be low by luck. Only individuals with as many failures as the first one
    take part in the comparison of means.
    """
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in confirmations:
        if evaluation.confirms is not None and evaluation.is_finished:
            groups.setdefault(evaluation.confirms, []).append(evaluation)
    most = max(map(len, groups.values()), default=0)
    entries = []
    for trial, evaluations in groups.items():
        losses = [evaluation.loss for evaluation in evaluations if evaluation.state == "complete"]
        scale = _find_scale(losses)
        scaled = [loss / scale for loss in losses]
        entry = ConfirmedIndividual(trial, losses, failed=len(evaluations) - len(losses))
        if losses:
            entry = replace(entry, mean=scale * statistics.fmean(scaled))
        if len(losses) > 1:
            entry = replace(entry, deviation=scale * statistics.stdev(scaled))
        entries.append(entry)

    def make_sort_key(entry: ConfirmedIndividual) -> tuple[bool, int, float]:
        is_short = len(entry.losses) + entry.failed < most
        return is_short, entry.failed, math.inf if entry.mean is None else entry.mean

    entries.sort(key=make_sort_key)
    compared = {entry.trial: entry for entry in _compare_means(select_comparable(entries))}
    return [compared.get(entry.trial, entry) for entry in entries]


def select_comparable(entries: Sequence[ConfirmedIndividual]) -> list[ConfirmedIndividual]:
    """Return the first entry and the entries that can be compared with it; empty if there are none.

    Entries can be compared if they have as many failures as the first entry, and at least two
    losses.
    """
    failed = entries[0].failed if entries else 0
    rivals = [entry for entry in entries if entry.failed == failed and len(entry.losses) > 1]
    return rivals if len(rivals) > 1 and rivals[0] is entries[0] else []


def compute_margin(entries: Sequence[ConfirmedIndividual]) -> float | None:
    """Return the largest difference to the best mean loss that counts as equally good.

    The margin is a standard deviation of losses over seeds: the first individual's own, or the
    pooled one if it is smaller. It is None without a comparison.
    """
    rivals = select_comparable(entries)
    if not rivals:
        return None
    samples = _LossSamples.from_individuals(rivals)
    return samples.scale * samples.margin


def describe_margin(entries: Sequence[ConfirmedIndividual], margin: float) -> str:
    """Return a margin, and which standard deviation it is, in words."""
    first = entries[0]
    is_own = first.deviation is not None and math.isclose(margin, first.deviation)
    owner = f" of trial {first.trial}" if is_own else ""
    return f"{format_number(margin)}, the standard deviation{owner} between seeds"


def count_seeds_needed(entries: Sequence[ConfirmedIndividual], most: int) -> int | None:
    """Estimate how many seeds each individual needs to show that the first is as good as the best.

    The first individual has the lowest mean loss so far, but the true mean of another individual
    may be lower. Return None if more than `most` seeds are needed. `entries` are the result of
    `compare_confirmed`, with at least two individuals to compare.
    """
    samples = _LossSamples.from_individuals(select_comparable(entries))
    for count in range(int(samples.sizes[0]) + 1, most + 1):
        more = replace(samples, sizes=np.full_like(samples.sizes, count))
        _, excess = more.compare_with_lowest()
        if excess[0] <= samples.margin + _ROUNDING:
            return count
    return None


def _compare_means(rivals: Sequence[ConfirmedIndividual]) -> list[ConfirmedIndividual]:
    if not rivals:
        return []
    samples = _LossSamples.from_individuals(rivals)
    compared = []
    for entry, may_be_lowest, excess in zip(rivals, *samples.compare_with_lowest(), strict=True):
        worse_by_at_most = samples.scale * float(excess)
        compared.append(
            replace(
                entry,
                may_be_best=bool(may_be_lowest),
                worse_by_at_most=worse_by_at_most if math.isfinite(worse_by_at_most) else None,
                as_good=bool(excess <= samples.margin + _ROUNDING),
            )
        )
    return compared


@dataclass(frozen=True)
class _LossSamples:
    """The losses of individuals to compare. Means and variances have the shape `(individuals,)`."""

    scale: float
    """The number by which losses are divided before the mean and the variance are computed."""
    means: npt.NDArray[np.float64]
    variances: npt.NDArray[np.float64]
    sizes: npt.NDArray[np.int64]
    """The number of losses of each individual, at least 2."""

    @classmethod
    def from_individuals(cls, entries: Sequence[ConfirmedIndividual]) -> _LossSamples:
        scale = _find_scale([loss for entry in entries for loss in entry.losses])
        scaled = [[loss / scale for loss in entry.losses] for entry in entries]
        return cls(
            scale,
            np.array([statistics.fmean(losses) for losses in scaled]),
            np.array([statistics.variance(losses) for losses in scaled]),
            np.array([len(losses) for losses in scaled]),
        )

    @property
    def pooled_variance(self) -> float:
        """The variance of the losses around the means of their samples."""
        return float(np.average(self.variances, weights=self.sizes - 1))

    @property
    def margin(self) -> float:
        """The difference that counts as equally good, see `compute_margin`."""
        return math.sqrt(min(self.variances[0], self.pooled_variance))

    def compare_with_lowest(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """Compare each mean with the lowest mean, by simultaneous confidence bounds.

        The method is Hsu's (Constrained simultaneous confidence intervals for multiple comparisons
        with the best, Annals of Statistics 12, 1984). For each pair of samples, it computes a bound
        on the error of the difference of their means. The results are wrong only if an error
        exceeds its bound, in a pair that contains the truly lowest mean. Bonferroni's inequality
        limits the probability of this to 5%, even if variances differ. For each sample, the larger
        of its own and the pooled variance is used, because few losses can have a small variance by
        chance.

        Returns:
            Whether each true mean may be the lowest, and the upper bound of the difference by which
            it exceeds the lowest.
        """
        # Takes 0.05 s to import. Runs without confirmations do not need it.
        from scipy.special import stdtrit

        error_rate = (1 - _CONFIDENCE) / (len(self.means) - 1)
        quantile = stdtrit(np.sum(self.sizes - 1), 1 - error_rate)
        squares = np.maximum(self.variances, self.pooled_variance) / self.sizes
        bounds = quantile * np.sqrt(np.add.outer(squares, squares))
        differences = np.subtract.outer(self.means, self.means)
        may_be_lowest = (differences <= bounds + _ROUNDING).all(axis=1)
        is_rival = may_be_lowest & ~np.eye(len(self.means), dtype=bool)
        excess = np.max(differences + bounds, axis=1, where=is_rival, initial=0.0)
        return may_be_lowest, excess


@dataclass(frozen=True)
class SeedNoise:
    """How much the seed changes the loss: the deviation of the losses of one individual."""

    deviation: float
    share: float
    """The share of the variance of all losses that the seeds cause, from 0 to 1."""


def estimate_seed_noise(groups: Sequence[Sequence[float]]) -> SeedNoise | None:
    """Estimate how much the seed changes the loss, by an analysis of variance with random effects.

    The method is described by Searle, Casella and McCulloch, Variance components, 1992, section
    3.6. A negative variance between individuals counts as 0. Each group has the losses of one
    individual, one for each seed. Return None if there are too few losses.
    """
    groups = [losses for losses in groups if losses]
    sizes = [len(losses) for losses in groups]
    count = sum(sizes)
    if len(groups) < 2 or count == len(groups):
        return None
    scale = _find_scale(list(itertools.chain(*groups)))
    scaled = [[loss / scale for loss in losses] for losses in groups]
    squares = sum(len(losses) * statistics.pvariance(losses) for losses in scaled)
    all_squares = count * statistics.pvariance(itertools.chain(*scaled))
    within = squares / (count - len(groups))
    between = (all_squares - squares) / (len(groups) - 1)
    mean_size = (count - sum(size**2 for size in sizes) / count) / (len(groups) - 1)
    total = within + max(between - within, 0.0) / mean_size
    if math.sqrt(total) <= _ROUNDING:
        return None
    return SeedNoise(scale * math.sqrt(within), within / total)


def _find_scale(losses: Sequence[float]) -> float:
    """Return a divisor for losses, which may be huge, so that their squares do not overflow."""
    return max(map(abs, losses), default=0.0) or 1.0
