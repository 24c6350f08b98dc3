"""Group failed evaluations by reason, and find the region of the search space in which they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.json_values import is_number
from hpo.text_format import format_value

# Numbers, sizes and addresses in the text of a reason, except line numbers, statuses, and digits of
# names.
_NUMBER = re.compile(r"(?<![\w.])(?<!\w:)(?<!status )(?:0x[0-9a-f]+|\d[\d.,]*(?: ?[KMGT]i?B)?)")

_MIN_FAILED = 4
_MIN_COVERED = 0.6  # Share of all failures that must lie in the region.
_MIN_FAILURE_SHARE = 0.5  # Share of the evaluations in the region that must have failed.
_MOST_LIMITS = 12  # Limits of a hyperparameter that are tried in each direction.
# Probability of a region if failures do not depend on hyperparameters. It is divided by the number
# of all regions that are tried (Bonferroni).
_MAX_FALSE_ALARM_RATE = 0.01

_Mask = npt.NDArray[np.bool_]


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
class FailureGroup:
    """The failures with the same reason."""

    reason: str
    """The reason, with "..." for numbers that are not the same in all of these failures."""
    failed: Sequence[Evaluation]
    """The failed evaluations, sorted by their end."""
    region: FailureRegion | None = None
    """The region in which most of them lie; None if no region is significant."""

    @property
    def latest(self) -> Evaluation:
        """The latest of these failures."""
        return self.failed[-1]


def format_reason(failed: Evaluation) -> str:
    """Return the reason of a failure without the rank, so that ranks with equal failures agree."""
    return re.sub(r"^rank \d+[:,] ", "", failed.failure or "")


def group_failures(evaluations: Sequence[Evaluation]) -> list[FailureGroup]:
    """Return the failures by reason, the most frequent first, without regions.

    Reasons that differ only in numbers are the same: each message of an exhausted memory has
    another number of bytes.
    """
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.state == "failed":
            groups.setdefault(_NUMBER.sub("\0", format_reason(evaluation)), []).append(evaluation)
    by_end = [sorted(group, key=lambda e: (e.ended, e.trial)) for group in groups.values()]
    by_size = sorted(by_end, key=len, reverse=True)
    return [FailureGroup(_merge_reasons(failed), failed) for failed in by_size]


def _merge_reasons(failed: Sequence[Evaluation]) -> str:
    """Return the reason of failures that differ only in numbers."""
    reasons = {format_reason(evaluation) for evaluation in failed}
    numbers = [set(found) for found in zip(*map(_NUMBER.findall, reasons), strict=True)]
    merged = (found.pop() if len(found) == 1 else "..." for found in numbers)
    return _NUMBER.sub(lambda _: next(merged), reasons.pop())


def find_failure_kinds(
    evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]
) -> list[FailureGroup]:
    """Return the failures by reason, the most frequent first, each reason with its region.

    Regions are derived from the evaluations of the search alone, not from confirmations.
    """
    searched = [evaluation for evaluation in evaluations if evaluation.confirms is None]
    kinds = group_failures(evaluations)
    tests = sum(len(kind.failed) >= _MIN_FAILED for kind in kinds)
    return [
        replace(kind, region=find_failure_region(searched, distributions, kind.failed, tests))
        for kind in kinds
    ]


def find_failure_region(
    evaluations: Sequence[Evaluation],
    distributions: Mapping[str, Any],
    failures: Sequence[Evaluation],
    tests: int = 1,
) -> FailureRegion | None:
    """Return the region that separates failures from the other evaluations best.

    Regions are compared by a likelihood ratio. One model has different probabilities of failure in
    the region and elsewhere, the other has one probability everywhere (Wilks 1938: twice the
    logarithm of the ratio has a chi-squared distribution).

    Args:
        evaluations: The evaluations of the search. Evaluations that have not ended are ignored.
        failures: The failed evaluations. Evaluations that failed for other reasons count as others.
        tests: The number of regions that are searched for in the same run. The rate of false alarms
            is for all of them.
    """
    # A promoted evaluation is represented by the evaluation that continues it.
    ended = sort_by_end(evaluations)
    trials = {evaluation.trial for evaluation in failures if evaluation.confirms is None}
    failed = np.array([evaluation.trial in trials for evaluation in ended], bool)
    if failed.sum() < _MIN_FAILED or failed.all():
        return None
    conditions: list[tuple[str, _Mask]] = []
    for name, distribution in distributions.items():
        values = [evaluation.params.get(name) for evaluation in ended]
        conditions += _list_conditions(name, distribution, values, failed)
    if not conditions:
        return None
    texts = [text for text, _ in conditions]
    masks = np.array([mask for _, mask in conditions])
    gains = _compute_gains(masks.astype(float), failed)
    first, second = np.unravel_index(np.argmax(gains), gains.shape)
    if math.exp(-gains[first, second]) > _MAX_FALSE_ALARM_RATE / tests:
        return None
    inside = masks[first] & masks[second]
    return FailureRegion(
        _merge_conditions(texts[first], texts[second]),
        int(failed.sum()),
        list(compress(ended, inside & failed)),
        int(inside.sum()),
    )


def _merge_conditions(first: str, second: str) -> list[str]:
    """Return two conditions, or one if they are equal, or allow one value of a hyperparameter."""
    allowed = first.replace(" >= ", " = ").replace(" <= ", " = ")
    if allowed == second.replace(" >= ", " = ").replace(" <= ", " = "):
        return [first if first == second else allowed]
    return [first, second]


def _list_conditions(
    name: str, distribution: Any, values: Sequence[Any], failed: _Mask
) -> list[tuple[str, _Mask]]:
    """Return conditions on a hyperparameter, each as text and as the mask of its evaluations."""
    of_failed = [value for value in compress(values, failed) if value is not None]
    found: list[tuple[str, _Mask]] = []
    if hasattr(distribution, "choices"):
        for choice in dict.fromkeys(of_failed):
            has_choice = [value is not None and value == choice for value in values]
            found.append((f"{name} = {format_value(choice)}", np.array(has_choice)))
        if not all(map(is_number, distribution.choices)):
            return found
    numbers = np.array([math.nan if value is None else value for value in values], float)
    limits = sorted(set(of_failed))
    lower = limits[:_MOST_LIMITS]
    upper = limits[-_MOST_LIMITS:]
    found += [(f"{name} >= {format_value(limit)}", numbers >= limit) for limit in lower]
    found += [(f"{name} <= {format_value(limit)}", numbers <= limit) for limit in upper]
    return [(text, mask) for text, mask in found if not mask.all()]


def _compute_gains(masks: npt.NDArray[np.float64], failed: _Mask) -> npt.NDArray[np.float64]:
    """Return the logarithm of the likelihood ratio of each region, less a penalty.

    The gain is minus infinity for regions that have too few of the failures, or too many others.

    `masks` have the shape `(conditions, evaluations)`, and gains `(conditions, conditions)`. Entry
    (i, j) belongs to the region in which conditions i and j hold.
    """
    all_failed = failed.sum()
    number = len(masks)
    counts = masks @ masks.T
    failed_counts = (masks * failed) @ masks.T
    gains = _compute_log_likelihood(failed_counts, counts)
    gains += _compute_log_likelihood(all_failed - failed_counts, len(failed) - counts)
    gains -= _compute_log_likelihood(all_failed, len(failed))
    # A second condition must be worth the larger number of regions among which the best is chosen.
    gains -= np.where(np.eye(number, dtype=bool), math.log(number), 2 * math.log(number))
    is_small = failed_counts < _MIN_COVERED * all_failed
    is_mixed = failed_counts < _MIN_FAILURE_SHARE * counts
    return np.where(is_small | is_mixed, -math.inf, gains)


def _compute_log_likelihood(failures: Any, counts: Any) -> Any:
    """Return the log-likelihood of outcomes under the most likely probability of failure."""
    from scipy.special import xlogy  # Takes 0.05 s to import.

    share = failures / (counts + (counts == 0))
    return xlogy(failures, share) + xlogy(counts - failures, 1 - share)
