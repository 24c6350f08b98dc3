"""Describe the loss that a surrogate predicts for the best individual."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.text_format import format_number

_TOLERANCE = 0.02  # fraction of a loss; smaller differences are not mentioned


def format_expected_loss(summary: Mapping[str, Any]) -> str:
    """Return a sentence with the loss that the surrogate predicts for the best trial; empty without a prediction.

    If the surrogate predicts a lower loss for another trial, the sentence also names that trial.
    """
    expected = summary["expected"]
    if expected is None:
        return ""
    loss, lowest, count = summary["best"]["loss"], expected["lowest"], expected["evaluations"]
    text = f"A model of {count} losses expects {format_number(expected['loss'])} of trial {expected['trial']}"
    if expected["loss"] - loss > _TOLERANCE * abs(loss):
        text += f", and not {format_number(loss)}, which may be partly luck"
    if expected["loss"] - lowest["loss"] > _TOLERANCE * abs(lowest["loss"]):
        text += f"; it expects the lowest loss of trial {lowest['trial']}, {format_number(lowest['loss'])}"
    return f"{text}."
