"""Group failed evaluations by the reason of their failure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.store.evaluations import Evaluation

# Numbers, sizes and addresses in the text of a reason, except line numbers, statuses, and digits of
# names.
_NUMBER = re.compile(r"(?<![\w:.])(?<!status )(?:0x[0-9a-f]+|\d[\d.,]*(?: ?[KMGT]i?B)?)")


@dataclass(frozen=True)
class FailureReason:
    """A reason for which evaluations failed, and the latest of these evaluations."""

    reason: str
    count: int
    """The number of evaluations that failed for it."""
    trial: int
    """The trial number of the latest of these evaluations."""
    confirms: int | None
    """The trial that the latest evaluation confirms; None if it belongs to the search."""
    has_traceback: bool
    """Whether the traceback of the latest evaluation was recorded."""


def summarize_failures(evaluations: Sequence[Evaluation]) -> list[FailureReason]:
    """Return the reasons of failures, the most frequent first.

    Args:
        evaluations: The evaluations of the search and the confirmations.
    """
    return [
        FailureReason(
            reason, len(group), group[-1].trial, group[-1].confirms, bool(group[-1].traceback)
        )
        for reason, group in group_by_reason(evaluations)
    ]


def group_by_reason(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation]]]:
    """Return the failed evaluations in groups with the same reason, the most frequent first, each sorted by the end.

    Reasons that differ only in numbers are the same: each message of an exhausted memory has
    another number of bytes. The text is the reason of the latest evaluation of the group.
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
