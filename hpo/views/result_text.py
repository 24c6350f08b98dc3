"""Describe results in sentences and columns that tables, the report and `hpo watch` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual
from hpo.results.hypervolume import Hypervolume
from hpo.results.summary import RungSummary, Summary
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import compute_costs, select_far_apart
from hpo.text_format import format_list, format_number, format_value

if TYPE_CHECKING:
    from hpo.results.prior_agreement import PriorAgreement

_TOLERANCE = 0.02  # fraction of a loss; smaller differences are not mentioned
_METHOD = "95% confidence, Hsu's multiple comparisons with the best"

Columns = list[tuple[str, list[str]]]
"""Columns of a table, each a pair of its heading and its cells."""


def describe_front(count: int, objectives: Objectives) -> str:
    """Return a sentence with the meaning of a Pareto front of `count` individuals."""
    texts = objectives.describe()
    names = format_list(texts, len(texts))
    if count == 1:
        return f"1 individual: no other one is better in any of {names}."
    return f"{count} individuals: none of them is better than another in all of {names}."


def describe_hypervolume(hypervolume: Hypervolume | None, objectives: Objectives) -> str:
    """Return a sentence about the hypervolume that the front dominates; "" without one."""
    if hypervolume is None:
        return ""
    ideal = _format_point(hypervolume.ideal, objectives)
    reference = _format_point(hypervolume.reference, objectives)
    box = f"the box between {ideal} and {reference}"
    return f"Hypervolume: they dominate {hypervolume.share:.1%} of {box}."


def _format_point(values: Iterable[float], objectives: Objectives) -> str:
    """Return the value of each objective as text, such as "loss 0.1, parameters 2000"."""
    named = zip(objectives.names, values, strict=True)
    return ", ".join(f"{name} {format_number(value)}" for name, value in named)


def select_front_rows(
    front: Sequence[Evaluation], objectives: Objectives, limit: int
) -> tuple[list[Evaluation], dict[int, int]]:
    """Return at most `limit` individuals of a front that are far apart, and their ties.

    Returns:
        The individuals; and, by trial, the number of others with equal values that were left out.
    """
    if len(front) <= limit:
        return list(front), {}
    first: dict[tuple[float, ...], Evaluation] = {}
    ties: Counter[int] = Counter()
    for evaluation in front:
        costs = objectives.compute_costs(evaluation.values)
        if costs in first:
            ties[first[costs].trial] += 1
        first.setdefault(costs, evaluation)
    distinct = list(first.values())
    positions = select_far_apart(compute_costs(distinct, objectives), limit)
    return [distinct[position] for position in positions], dict(ties)


def format_trial(trial: int, ties: Mapping[int, int]) -> str:
    """Return a trial as text: "7 +1" means that `select_front_rows` has left out an equal one."""
    return f"{trial} +{ties[trial]}" if ties.get(trial) else str(trial)


def put_objectives_first(metrics: Iterable[str], objectives: Objectives) -> list[str]:
    """Return the names of metrics, first those that are objectives."""
    names = list(metrics)
    own = [name for name in objectives.metric_names if name in names]
    return own + [name for name in names if name not in own]


def make_improved_heading(objectives: Objectives) -> str:
    """Return the heading of the column that counts new best results by propagator."""
    return "joined the front" if objectives.is_multi_objective else "improved the best"


def describe_confirmed(summary: Summary, names: Sequence[str]) -> list[str]:
    """Return sentences that compare the confirmed individuals.

    They say which individuals may be the best, which are as good as the best, and how much the loss
    depends on the seed.

    Args:
        names: A name for each individual in `summary.confirmed`, in the same order.
    """
    noise = summary.seed_noise
    sentences = describe_comparison(summary.confirmed, summary.as_good_within, names)
    if noise:
        sentences.append(
            f"Seeds make {noise.share:.0%} of the variance of these losses: those of one "
            f"individual have a standard deviation of {format_number(noise.deviation)}."
        )
    return sentences


def describe_comparison(
    entries: Sequence[ConfirmedIndividual], margin: float | None, names: Sequence[str]
) -> list[str]:
    """Return sentences that compare individuals; `margin` as in `compute_margin`."""
    if not entries:
        return []
    if len(entries) == 1:
        return ["There is nothing to compare it with: --top-n 3 would confirm three."]
    if margin is None:
        others_failed = all(entry.failed > entries[0].failed for entry in entries[1:])
        reason = "All others failed more often" if others_failed else "There are too few losses"
        return [f"{reason}: nothing is compared with the best."]
    named = list(zip(names, entries, strict=True))
    candidates = [name for name, entry in named if entry.may_be_best]
    good = [name for name, entry in named if entry.as_good]
    if len(candidates) == 1:
        sentences = [f"{_capitalize(candidates[0])} is the best of these ({_METHOD})."]
    else:
        rest = "" if len(candidates) == len(entries) else ", and no other one"
        subject = _capitalize(format_list(candidates, len(candidates)))
        sentences = [f"{subject} may be the best{rest} ({_METHOD})."]
    within = f"as good as the best within {format_number(margin)}, one standard deviation by seeds"
    if len(good) > 1:
        sentences.append(f"{_capitalize(format_list(good, len(good)))} are {within}.")
    elif not good:
        excess = entries[0].worse_by_at_most
        known = "" if excess is None else f": {names[0]} is at most {format_number(excess)} worse"
        sentences.append(f"None is certain to be {within}{known}.")
    elif len(candidates) > 1:
        sentences.append(f"Only {good[0]} is certain to be {within}.")
    return sentences


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def format_expected_loss(summary: Summary) -> str:
    """Return a sentence with the loss that a model expects of the best trial; empty without it.

    If the model expects a lower loss of another trial, the sentence also names that trial.
    """
    expected = summary.expected_loss
    if expected is None or summary.best is None:
        return ""
    loss = summary.best.loss
    text = (
        f"A model of {expected.evaluations} losses expects {format_number(expected.loss)} "
        f"of trial {expected.trial}"
    )
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
        ("next promotion", [_format_next_promotion(rung) for rung in rungs]),
    ]
    if len({rung.bracket for rung in rungs}) > 1:
        columns.insert(0, ("bracket", [str(rung.bracket) for rung in rungs]))
    return columns


def _format_next_promotion(rung: RungSummary) -> str:
    """Return which paused trial of a rung is promoted next, and when; "" if none is paused."""
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
