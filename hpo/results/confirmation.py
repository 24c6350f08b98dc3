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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.store.evaluations import INTERRUPTED, Evaluation

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.manifest import Manifest
    from hpo.store.record import Record

_SIGNIFICANT = 0.05
_ROUNDING = 1e-12  # of losses that are the same but for the order in which they were added up


@dataclass(frozen=True)
class Plan:
    """How the best are confirmed: with `count` seeds each, which follow from `basis`, the run's seed and settings.

    Seeds are drawn, so that no run was started with them, and differ from individual to individual, so that their
    losses are independent. Other settings make other seeds: losses under different settings are never put together.
    `least` is the lowest count of an earlier session, whose individuals stay confirmed; 0 for `count`.
    """

    count: int
    basis: str
    least: int = 0

    def seeds(self, trial: int) -> list[int]:
        """Return the seeds for an individual, by its trial."""
        rng = random.Random(f"confirm/{self.basis}/{trial}")
        return [rng.getrandbits(31) for _ in range(self.count)]

    def of(self, confirmations: Sequence[Evaluation]) -> list[Evaluation]:
        """Return the confirmations of individuals with `least` of them or all, whether they have ended or wait."""
        chosen: dict[int, list[Evaluation]] = {}
        for evaluation in filter(_counts, confirmations):
            trial = evaluation.confirms
            if trial is not None and evaluation.seed in self.seeds(trial):
                chosen.setdefault(trial, []).append(evaluation)
        return [
            evaluation for group in chosen.values() if len(group) >= (self.least or self.count) for evaluation in group
        ]

    def to_do(self, best: Sequence[Evaluation], confirmations: Sequence[Evaluation]) -> int:
        """Return how many evaluations are still to be done before each of the best is confirmed."""
        return len(self._pairs(best).keys() - {(e.confirms, e.seed) for e in confirmations if e.finished})

    def begin(self, record: Record, best: Sequence[Evaluation], space: SearchSpace) -> int:
        """Let the evaluations that are to be done, and no others, wait in the record; return how many it then has."""
        planned, distributions = self._pairs(best), space.distributions()
        for waiting in [evaluation for evaluation in record.evaluations() if evaluation.state == "waiting"]:
            if (waiting.confirms, waiting.seed) not in planned:
                record.withdraw(waiting)
        there = {(e.confirms, e.seed) for e in record.evaluations() if _counts(e)}
        for (trial, seed), params in planned.items():
            if (trial, seed) not in there:
                record.enqueue(params, distributions, confirms=trial, seed=seed, propagator="--confirm")
        return sum(map(_counts, record.evaluations()))

    def _pairs(self, best: Sequence[Evaluation]) -> dict[tuple[int | None, int | None], dict[str, Any]]:
        """Return each trial with each of its seeds, and the hyperparameters to train."""
        return {(one.trial, seed): one.params for one in best for seed in self.seeds(one.trial)}


def plan_of(run: Manifest) -> Plan:
    """Return the plan of a run."""
    basis = _basis(run.seed, run.settings)
    alike = [one.options for one in run.sessions if _basis(one.options.get("seed"), one.settings) == basis]
    counts = [options.get("confirm", 0) for options in alike]
    return Plan(run.confirm, basis, min((count for count in counts if 0 < count <= run.confirm), default=run.confirm))


def _basis(seed: object, settings: Mapping[str, Any]) -> str:
    return f"{seed}/{json.dumps(settings, sort_keys=True)}"


def _counts(confirmation: Evaluation) -> bool:
    return confirmation.state != INTERRUPTED


def compare(confirmations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return confirmed individuals, ordered by the number of their failures, and then by the mean of their losses.

    Each is a dict of its `trial`, its `losses`, their `mean` and standard `deviation` (None where there are too few),
    how many evaluations have `failed`, and `p`: the probability of losses that differ as much from those of the first
    individual, if the means are the same (Welch, The generalization of Student's problem, 1947). It is corrected for
    the number of all pairs, since the first individual was chosen by the same losses (Holm, A simple sequentially
    rejective multiple test procedure, 1979). `told_apart` is whether `p` is under 5%; the first one's `p` is None.
    """
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in confirmations:
        if evaluation.confirms is not None and evaluation.finished:
            groups.setdefault(evaluation.confirms, []).append(evaluation)
    entries = [_entry(trial, group) for trial, group in groups.items()]
    entries.sort(key=lambda entry: (entry["failed"], math.inf if entry["mean"] is None else entry["mean"]))
    pairs = list(itertools.combinations(entries, 2))
    corrected = _holm([_welch(one["losses"], other["losses"]) for one, other in pairs])
    for entry, p in zip(entries, [None, *corrected], strict=False):  # the pairs with the first come first
        entry["p"] = p
        entry["told_apart"] = p is not None and p < _SIGNIFICANT
    return entries


def seed_noise(entries: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
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
    scale = _scale([loss for losses in groups for loss in losses])
    scaled = [[loss / scale for loss in losses] for losses in groups]
    means, overall = list(map(statistics.fmean, scaled)), statistics.fmean(itertools.chain(*scaled))
    within = sum((loss - mean) ** 2 for losses, mean in zip(scaled, means, strict=True) for loss in losses) / freedom
    between = sum(size * (mean - overall) ** 2 for size, mean in zip(sizes, means, strict=True)) / (len(groups) - 1)
    size = (count - sum(size**2 for size in sizes) / count) / (len(groups) - 1)
    total = within + max(between - within, 0.0) / size
    if math.sqrt(total) <= _ROUNDING:
        return None
    return {"deviation": scale * math.sqrt(within), "share": within / total}


def _entry(trial: int, group: Sequence[Evaluation]) -> dict[str, Any]:
    losses = [evaluation.loss for evaluation in group if evaluation.state == "complete"]
    scale = _scale(losses)
    return {
        "trial": trial,
        "losses": losses,
        "mean": scale * statistics.fmean(loss / scale for loss in losses) if losses else None,
        "deviation": scale * statistics.stdev(loss / scale for loss in losses) if len(losses) > 1 else None,
        "failed": len(group) - len(losses),
    }


def _scale(losses: Sequence[float]) -> float:
    """Return what to divide losses by, so that their squares do not overflow: networks may diverge."""
    return max(map(abs, losses), default=0.0) or 1.0


def _welch(first: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the p-value of Welch's t-test; None where there are too few losses for one."""
    if min(len(first), len(other)) < 2:
        return None
    scale = _scale([*first, *other])
    one, two = ([loss / scale for loss in losses] for losses in (first, other))
    if max(statistics.stdev(one), statistics.stdev(two)) <= _ROUNDING:  # an objective without randomness
        return 1.0 if abs(statistics.fmean(one) - statistics.fmean(two)) <= _ROUNDING else 0.0
    from scipy.stats import ttest_ind_from_stats  # takes 0.2 s; ttest_ind warns of samples without variance

    samples = [(statistics.fmean(losses), statistics.stdev(losses), len(losses)) for losses in (one, two)]
    return float(ttest_ind_from_stats(*samples[0], *samples[1], equal_var=False).pvalue)


def _holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values, corrected for their number; None stays None."""
    given = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (value, place) in enumerate(given):
        highest = max(highest, min(1.0, (len(given) - rank) * value))
        corrected[place] = highest
    return corrected
