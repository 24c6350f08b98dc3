"""Describe what further evaluations of a run are expected to gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.results.advice.run_result import format_percent
from hpo.text_format import format_count, format_duration


def format_next_gain(expected: Mapping[str, Any] | None) -> str:
    """Return a sentence with the expected gain of the next tenth of the budget; empty without an estimate.

    Args:
        expected: The value of "next" in a summary.
    """
    if expected is None or expected["gain"] is None:
        return ""
    count = format_count(expected["evaluations"], "evaluation")
    if not expected["gain"]:
        return f"The next {count} are not expected to lower the best loss."
    text = f"The next {count} should lower the best loss by {format_percent(expected['gain'])}"
    time = "" if expected["seconds"] is None else f", in {format_duration(expected['seconds'])}"
    return f"{text}{time}."
