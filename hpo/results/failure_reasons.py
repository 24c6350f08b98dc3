"""Group failed evaluations by the reason of their failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpo.store.evaluations import Evaluation

# Numbers, sizes and addresses in the text of a reason, except line numbers, statuses, and digits of names.
_NUMBER = re.compile(r"(?<![\w:.])(?<!status )(?:0x[0-9a-f]+|\d[\d.,]*(?: ?[KMGT]i?B)?)")


def summarize_failures(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the reasons of failures, the most frequent first.

    Args:
        evaluations: The evaluations of the search and the confirmations.

    Returns:
        One dict for each reason, with these keys:

        - `reason` and `count`: The text of the reason and the number of evaluations that failed for it.
        - `trial`: The trial number of the latest of these evaluations.
        - `confirms`: The number of the trial that this evaluation confirms; None if it belongs to the search.
        - `has_traceback`: Whether the traceback of this evaluation was recorded.
    """
    counted = []
    for reason, group in group_by_reason(evaluations):
        latest = group[-1]
        example = {"trial": latest.trial, "confirms": latest.confirms, "has_traceback": bool(latest.traceback)}
        counted.append({"reason": reason, "count": len(group), **example})
    return counted


def group_by_reason(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation]]]:
    """Return the failed evaluations in groups with the same reason, the most frequent first, each sorted by the end.

    Reasons that differ only in numbers are the same: each message of an exhausted memory has another number of bytes.
    The text is the reason of the latest evaluation of the group.
    """
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.state == "failed":
            groups.setdefault(_NUMBER.sub("#", format_reason(evaluation)), []).append(evaluation)
    by_end = [sorted(group, key=lambda e: (e.ended, e.trial)) for group in groups.values()]
    return [(format_reason(group[-1]), group) for group in sorted(by_end, key=len, reverse=True)]


def format_reason(failed: Evaluation) -> str:
    """Return the reason of a failure without the rank, so that equal failures of different ranks are grouped."""
    return re.sub(r"^rank \d+[:,] ", "", failed.failure or "")
