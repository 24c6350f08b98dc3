"""Describe parts of a summary that the tables, the report and `hpo watch` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpo.results.summary import RungSummary, Summary
from hpo.text_format import format_number, format_value

if TYPE_CHECKING:
    from hpo.results.prior_agreement import PriorAgreement

_TOLERANCE = 0.02  # fraction of a loss; smaller differences are not mentioned

Columns = list[tuple[str, list[str]]]
"""Columns of a table, each a pair of its heading and its cells."""


def format_expected_loss(summary: Summary) -> str:
    """Return a sentence with the loss that a model expects of the best trial; empty without it.

    If the model expects a lower loss of another trial, the sentence also names that trial.
    """
    expected = summary.expected_loss
    if expected is None or summary.best is None:
        return ""
    loss = summary.best.loss
    text = f"A model of {expected.evaluations} losses expects {format_number(expected.loss)} of trial {expected.trial}"
    if expected.loss - loss > _TOLERANCE * abs(loss):
        text += f", and not {format_number(loss)}, which may be partly luck"
    if expected.loss - expected.lowest_loss > _TOLERANCE * abs(expected.lowest_loss):
        lowest = format_number(expected.lowest_loss)
        text += f"; it expects the lowest loss of trial {expected.lowest_trial}, {lowest}"
    return f"{text}."


def make_prior_columns(priors: Sequence[PriorAgreement]) -> Columns:
    """Return the columns of a table with one row per prior."""
    return [
        ("hyperparameter", [prior.name for prior in priors]),
        ("prior", [format_value(prior.value) for prior in priors]),
        ("confidence", [prior.confidence for prior in priors]),
        ("correlation", [f"{round(prior.correlation, 2) + 0.0:.2f}" for prior in priors]),
        ("evaluations", [prior.verdict for prior in priors]),
    ]


def make_rung_columns(rungs: Sequence[RungSummary]) -> Columns:
    """Return the columns of a table with one row per rung."""
    columns = [
        ("rung", [str(rung.epochs) for rung in rungs]),
        ("reached", [str(rung.reached) for rung in rungs]),
        ("continued", [str(rung.continued) for rung in rungs]),
        ("paused", [str(rung.paused) for rung in rungs]),
        ("best", ["" if rung.best is None else format_number(rung.best) for rung in rungs]),
        ("next promotion", [format_next_promotion(rung) for rung in rungs]),
    ]
    if len({rung.bracket for rung in rungs}) > 1:
        columns.insert(0, ("bracket", [str(rung.bracket) for rung in rungs]))
    return columns


def format_next_promotion(rung: RungSummary) -> str:
    """Return which paused trial of a rung is promoted next, and when; empty if no trial is paused."""
    first = rung.next
    if first is None:
        return ""
    loss = "" if first.loss is None else f", {format_number(first.loss)}"
    candidate = f"trial {first.trial}{loss}"
    if first.count_needed is None:
        return f"{candidate}: never"
    if first.count_needed <= rung.reached:
        return f"{candidate}: now"
    return f"{candidate}: after {first.count_needed} have reached it"
