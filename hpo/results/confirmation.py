"""Confirming the winner: the best of a run are trained again with other seeds, and their losses are compared.

The loss by which an individual was chosen is too optimistic, since it is the lowest of many. The evaluations that
confirm the best are recorded in a study of their own beside the run's, and count for no budget.
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
    """How the best are confirmed: with `count` seeds each, which follow from `basis`, the run's seed and settings.

    Seeds are drawn, so that no run was started with them, and differ from individual to individual, so that their
    losses are independent. Other settings make other seeds: losses under different settings are never put together.
    `least` is the lowest count of an earlier session, whose individuals stay confirmed; 0 for `count`.
    """

    count: int
    seed_basis: str
    min_count: int = 0

    def draw_seeds(self, trial: int) -> list[int]:
        """Return the seeds for an individual, by its trial."""
        rng = random.Random(f"confirm/{self.seed_basis}/{trial}")
        return [rng.getrandbits(31) for _ in range(self.count)]

    def select_planned(self, confirmations: Sequence[Evaluation]) -> list[Evaluation]:
        """Return the confirmations of individuals with `least` of them or all, whether they have ended or wait."""
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

    def count_remaining(self, best: Sequence[Evaluation], confirmations: Sequence[Evaluation]) -> int:
        """Return how many evaluations are still to be done before each of the best is confirmed."""
        return len(self._pair_with_seeds(best).keys() - {(e.confirms, e.seed) for e in confirmations if e.is_finished})

    def enqueue_planned(self, record: Record, best: Sequence[Evaluation], space: SearchSpace) -> int:
        """Let the evaluations that are to be done, and no others, wait in the record; return how many it then has."""
        planned, distributions = self._pair_with_seeds(best), space.make_distributions()
        for waiting in [evaluation for evaluation in record.read_evaluations() if evaluation.state == "waiting"]:
            if (waiting.confirms, waiting.seed) not in planned:
                record.cancel_waiting(waiting)
        there = {(e.confirms, e.seed) for e in record.read_evaluations() if _is_counted(e)}
        for (trial, seed), params in planned.items():
            if (trial, seed) not in there:
                record.enqueue(params, distributions, confirms=trial, seed=seed, propagator="--confirm-seeds")
        return sum(map(_is_counted, record.read_evaluations()))

    def _pair_with_seeds(self, best: Sequence[Evaluation]) -> dict[tuple[int | None, int | None], dict[str, Any]]:
        """Return each trial with each of its seeds, and the hyperparameters to train."""
        return {(one.trial, seed): one.params for one in best for seed in self.draw_seeds(one.trial)}


def make_plan(run: Manifest) -> ConfirmationPlan:
    """Return the plan of a run."""
    basis = _format_seed_basis(run.seed, run.settings)
    alike = [one.options for one in run.sessions if _format_seed_basis(one.options.get("seed"), one.settings) == basis]
    counts = [options.get("confirm_seeds", 0) for options in alike]
    return ConfirmationPlan(
        run.confirm_seeds,
        basis,
        min((count for count in counts if 0 < count <= run.confirm_seeds), default=run.confirm_seeds),
    )


def _format_seed_basis(seed: object, settings: Mapping[str, Any]) -> str:
    return f"{seed}/{json.dumps(settings, sort_keys=True)}"


def _is_counted(confirmation: Evaluation) -> bool:
    return confirmation.state != INTERRUPTED


def compare_confirmed(confirmations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return confirmed individuals, ordered by the number of their failures, and then by the mean of their losses.

    Individuals with fewer seeds than others are behind these: few losses may be low by luck.

    Each is a dict of its `trial`, its `losses`, their `mean` and standard `deviation` (None if there are too few), and
    how many evaluations have `failed`. Individuals that failed as often as the first are compared, see
    `hpo.results.comparison`. Then `may_be_best` is whether the mean over all seeds may be the lowest, and
    `worse_by_at_most` bounds its difference to the lowest. Both are None without a comparison. An individual is
    `as_good` as the best if this bound is `as_good_within` or less.
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
    for entry, bound in zip(rivals, compare_with_lowest(samples) if samples else [], strict=True):
        excess = max(0.0, scale * bound.excess)
        entry["may_be_best"] = bound.may_be_lowest
        entry["worse_by_at_most"] = excess if math.isfinite(excess) else None
        entry["as_good"] = bound.excess <= margin + ROUNDING
    return entries


def _make_sort_key(entry: dict[str, Any], most: int) -> tuple[bool, int, float]:
    is_short = len(entry["losses"]) + entry["failed"] < most
    return is_short, entry["failed"], math.inf if entry["mean"] is None else entry["mean"]


def select_comparable(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the individuals that can be compared with the best, the first included; none if it is the only one."""
    rivals = [one for one in entries if one["failed"] == entries[0]["failed"] and len(one["losses"]) > 1]
    return rivals if len(rivals) > 1 and rivals[0] is entries[0] else []


def compute_margin(entries: Sequence[dict[str, Any]]) -> float | None:
    """Return how much worse than the best an individual may be that is as good; None without a comparison.

    It is the standard deviation of the losses of one individual: the first one's, or the pooled one if that is smaller.
    Another seed changes a loss by as much.
    """
    samples, scale = _make_samples(select_comparable(entries))
    return scale * _compute_scaled_margin(samples) if samples else None


def count_seeds_needed(entries: Sequence[dict[str, Any]], most: int) -> int | None:
    """Estimate how many seeds each show that the first is as good as the best; None if more than `most`."""
    samples, _ = _make_samples(select_comparable(entries))
    margin = _compute_scaled_margin(samples)
    for count in range(samples[0].size + 1, most + 1):
        if compare_with_lowest([replace(sample, size=count) for sample in samples])[0].excess <= margin + ROUNDING:
            return count
    return None


def _make_samples(entries: Sequence[dict[str, Any]]) -> tuple[list[LossSample], float]:
    """Return the losses of individuals as samples, divided by a scale, and the scale."""
    scale = _find_scale([loss for entry in entries for loss in entry["losses"]])
    return [LossSample.from_losses([loss / scale for loss in entry["losses"]]) for entry in entries], scale


def _compute_scaled_margin(samples: Sequence[LossSample]) -> float:
    return math.sqrt(min(samples[0].variance, pool_variances(samples))) if samples else 0.0


def estimate_seed_noise(entries: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Estimate from confirmed individuals' `losses` what seeds do to them; None where there are too few.

    `deviation` is the standard deviation of one individual's losses, and `share` is the share that seeds have in the
    variance of all individuals' losses, from 0 to 1: an analysis of variance with random effects (Searle, Casella and
    McCulloch, Variance components, 1992, section 3.6), where a negative variance between individuals counts as 0.
    """
    groups = [entry["losses"] for entry in entries if entry["losses"]]
    sizes = [len(losses) for losses in groups]
    count, freedom = sum(sizes), sum(sizes) - len(groups)
    if len(groups) < 2 or not freedom:
        return None
    scale = _find_scale([loss for losses in groups for loss in losses])
    scaled = [[loss / scale for loss in losses] for losses in groups]
    means, overall = list(map(statistics.fmean, scaled)), statistics.fmean(itertools.chain(*scaled))
    within = sum((loss - mean) ** 2 for losses, mean in zip(scaled, means, strict=True) for loss in losses) / freedom
    between = sum(size * (mean - overall) ** 2 for size, mean in zip(sizes, means, strict=True)) / (len(groups) - 1)
    size = (count - sum(size**2 for size in sizes) / count) / (len(groups) - 1)
    total = within + max(between - within, 0.0) / size
    if math.sqrt(total) <= ROUNDING:
        return None
    return {"deviation": scale * math.sqrt(within), "share": within / total}


def _make_entry(trial: int, group: Sequence[Evaluation]) -> dict[str, Any]:
    losses = [evaluation.loss for evaluation in group if evaluation.state == "complete"]
    scale = _find_scale(losses)
    return {
        "trial": trial,
        "losses": losses,
        "mean": scale * statistics.fmean(loss / scale for loss in losses) if losses else None,
        "deviation": scale * statistics.stdev(loss / scale for loss in losses) if len(losses) > 1 else None,
        "failed": len(group) - len(losses),
        "may_be_best": None,
        "worse_by_at_most": None,
        "as_good": False,
    }


def _find_scale(losses: Sequence[float]) -> float:
    """Return what to divide losses by, so that their squares do not overflow: networks may diverge."""
    return max(map(abs, losses), default=0.0) or 1.0
