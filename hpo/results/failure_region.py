"""Find the region of the search space in which most failures of a kind lie, described by one or two conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.results.failure_reasons import group_by_reason
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.text_format import format_value

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Masks = npt.NDArray[np.bool_]

_MIN_FAILED = 4
_MIN_COVERED = 0.6  # Share of all failures that must lie in the region.
_MIN_FAILURE_SHARE = 0.5  # Share of the evaluations in the region that must have failed.
_MOST_LIMITS = 12  # Limits of a hyperparameter that are tried in each direction.
# Probability of a region if failures do not depend on hyperparameters. It is divided by the number
# of all regions that are tried (Bonferroni).
_MAX_FALSE_ALARM_RATE = 0.01


@dataclass(frozen=True)
class FailureRegion:
    """A part of the search space in which evaluations fail more often than elsewhere."""

    conditions: Sequence[str]
    """One or two conditions, such as "width >= 512". The region is where all of them hold."""
    all_failed: int
    """The number of failures in the whole search space."""
    failed: Sequence[Evaluation]
    """The failures in the region, sorted by their end."""
    ended: int
    """The number of evaluations in the region that have ended."""


@dataclass(frozen=True)
class FailureKind:
    """The failures with the same reason."""

    reason: str
    """The reason of the latest of these failures."""
    failed: Sequence[Evaluation]
    """The failed evaluations, sorted by their end."""
    region: FailureRegion | None
    """The region in which most of them lie; None if no region is significant."""


def find_failure_kinds(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> list[FailureKind]:
    """Return the failures by reason, the most frequent first, each reason with its region.

    Args:
        evaluations: The evaluations of the search, and confirmations. Regions are derived from the
            search alone.
        distributions: The Optuna distribution of each hyperparameter by its name.
    """
    searched = [evaluation for evaluation in evaluations if evaluation.confirms is None]
    groups = group_by_reason(evaluations)
    tests = sum(len(failed) >= _MIN_FAILED for _, failed in groups)
    return [
        FailureKind(reason, failed, find_failure_region(searched, distributions, failed, tests))
        for reason, failed in groups
    ]


def find_failure_region(
    evaluations: Sequence[Evaluation],
    distributions: Mapping[str, Any],
    failures: Sequence[Evaluation],
    tests: int = 1,
) -> FailureRegion | None:
    """Return the region that separates failures from the other evaluations best; None if none does so significantly.

    Regions are compared by a likelihood ratio. One model has different probabilities of failure in
    the region and elsewhere, the other has one probability everywhere (Wilks 1938: twice the
    logarithm of the ratio has a chi-squared distribution).

    Args:
        evaluations: The evaluations of the search. Evaluations that have not ended are ignored.
        distributions: The Optuna distribution of each hyperparameter by its name.
        failures: The failed evaluations. Evaluations that failed for other reasons count as others.
        tests: The number of regions that are searched for in the same run. The rate of false alarms
            is for all of them.
    """
    import numpy as np

    # A promoted evaluation is represented by the evaluation that continues it.
    ended = sort_by_end(evaluations)
    trials = {evaluation.trial for evaluation in failures if evaluation.confirms is None}
    failed = np.array([evaluation.trial in trials for evaluation in ended], bool)
    if failed.sum() < _MIN_FAILED or failed.all():
        return None
    found = [
        (text, mask)
        for name, kind in distributions.items()
        for text, mask in _list_conditions(name, kind, ended, failed)
    ]
    if not found:
        return None
    texts, masks = [text for text, _ in found], np.array([mask for _, mask in found], float)
    # Entry (i, j) belongs to the region in which conditions i and j hold.
    counts, failed_counts = masks @ masks.T, (masks * failed) @ masks.T
    gains = _compute_log_ratios(failed_counts, counts, int(failed.sum()), len(failed))
    number = len(texts)
    # A second condition must be worth the larger number of regions among which the best is chosen.
    gains -= np.where(np.eye(number, dtype=bool), math.log(number), 2 * math.log(number))
    gains[
        (failed_counts < _MIN_COVERED * failed.sum())
        | (failed_counts < _MIN_FAILURE_SHARE * counts)
    ] = -math.inf
    first, second = np.unravel_index(np.argmax(gains), gains.shape)
    if math.exp(-gains[first, second]) > _MAX_FALSE_ALARM_RATE / tests:
        return None
    conditions = list(dict.fromkeys([texts[first], texts[second]]))
    inside = found[first][1] & found[second][1]
    failed_inside = [ended[index] for index in np.flatnonzero(inside & failed)]
    return FailureRegion(conditions, int(failed.sum()), failed_inside, int(inside.sum()))


def _list_conditions(
    name: str, distribution: Any, ended: Sequence[Evaluation], failed: Masks
) -> list[tuple[str, Masks]]:
    """Return conditions on a hyperparameter, each as text and as the mask of the evaluations that satisfy it."""
    import numpy as np

    values = [evaluation.params.get(name) for evaluation in ended]
    of_failed = [
        value
        for value, is_failed in zip(values, failed, strict=True)
        if is_failed and value is not None
    ]
    if hasattr(distribution, "choices"):
        return [
            (
                f"{name} = {format_value(value)}",
                np.array([own is not None and own == value for own in values], bool),
            )
            for value in dict.fromkeys(of_failed)
        ]
    numbers = np.array([math.nan if value is None else value for value in values], float)
    limits = sorted(set(of_failed))
    lower, upper = limits[:_MOST_LIMITS], limits[-_MOST_LIMITS:]
    with np.errstate(invalid="ignore"):
        above = [(f"{name} >= {format_value(limit)}", numbers >= limit) for limit in lower]
        below = [(f"{name} <= {format_value(limit)}", numbers <= limit) for limit in upper]
    return [(text, mask) for text, mask in above + below if not mask.all()]


def _compute_log_ratios(failures: Any, counts: Any, all_failures: int, all_counts: int) -> Any:
    """Return the logarithm of the likelihood ratio of each region, shape `(regions,)`."""
    outside_failures, outside = all_failures - failures, all_counts - counts
    separate = _compute_log_likelihood(failures, counts) + _compute_log_likelihood(
        outside_failures, outside
    )
    return separate - _compute_log_likelihood(all_failures, all_counts)


def _compute_log_likelihood(failures: Any, counts: Any) -> Any:
    """Return the log-likelihood of outcomes under the most likely probability of failure."""
    from scipy.special import xlogy

    share = failures / (counts + (counts == 0))
    return xlogy(failures, share) + xlogy(counts - failures, 1 - share)
