"""Describe the Pareto front: its size, ranges and hypervolume."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hpo.objectives import Objectives
from hpo.results.hypervolume import Hypervolume
from hpo.store.evaluations import Evaluation
from hpo.text_format import format_count, format_named_values, format_number


def list_objectives(objectives: Objectives) -> str:
    """Return the names of the objectives as a phrase, such as ``loss, parameters and accuracy (maximised)``."""
    texts = objectives.describe()
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]]) if len(texts) > 1 else texts[0]


def describe_front(count: int, objectives: Objectives) -> str:
    """Return a sentence with the meaning of a Pareto front of `count` individuals."""
    if count == 1:
        return f"1 individual: no other one is better in any of {list_objectives(objectives)}."
    return f"{count} individuals: none of them is better than another in all of {list_objectives(objectives)}."


def describe_hypervolume(hypervolume: Hypervolume | None, objectives: Objectives) -> str:
    """Return a sentence about the hypervolume that the front dominates; empty if `hypervolume` is None."""
    if hypervolume is None:
        return ""
    ideal = format_point(hypervolume.ideal, objectives)
    reference = format_point(hypervolume.reference, objectives)
    return f"Hypervolume: they dominate {hypervolume.share:.1%} of the box between {ideal} and {reference}."


def format_point(values: Iterable[float], objectives: Objectives) -> str:
    """Return the value of each objective as text, such as "loss 0.1, parameters 2000"."""
    return ", ".join(
        f"{name} {format_number(value)}"
        for name, value in zip(objectives.names, values, strict=True)
    )


def format_ranges(front: Sequence[Evaluation], objectives: Objectives) -> str:
    """Return the lowest and the highest value of each objective on a front, as text."""
    texts = []
    for name, own in zip(
        objectives.names,
        zip(*(evaluation.values for evaluation in front), strict=True),
        strict=False,
    ):
        lowest, highest = format_number(min(own)), format_number(max(own))
        texts.append(f"{name} {lowest} to {highest}" if lowest != highest else f"{name} {lowest}")
    return ", ".join(texts)


def format_best_so_far(best: Evaluation | None, on_front: int) -> str:
    """Return the best result as text that begins a line of progress; empty before the first result.

    Args:
        best: The evaluation with the lowest loss.
        on_front: Number of individuals on the front; 0 if the loss is the only objective.
    """
    if best is None:
        return ""
    found = f"front of {on_front}, lowest loss" if on_front else "best so far"
    return f"{found} {format_number(best.loss)} (trial {best.trial}: {format_named_values(best.params)}), "


def put_objectives_first(metrics: Iterable[str], objectives: Objectives) -> list[str]:
    """Return the names of metrics in a new order: first the metrics that are objectives, then the others."""
    names = list(metrics)
    own = [name for name in objectives.metric_names if name in names]
    return own + [name for name in names if name not in own]


def describe_alternatives(front: Sequence[Evaluation], objectives: Objectives) -> str:
    """Return a text about the options with which the user chooses another individual of the front."""
    if len(front) == 1:
        return "it alone is on the front"
    ways = " or ".join(f"--by {shlex.quote(name)}" for name in objectives.metric_names)
    return f"{format_count(len(front), 'individual')} are on the front: {ways} chooses another"


def group_ties(
    front: Sequence[Evaluation], objectives: Objectives
) -> tuple[list[Evaluation], dict[int, int]]:
    """Return the first of all individuals with equal values, and the number of the others by its trial."""
    first: dict[tuple[float, ...], Evaluation] = {}
    for evaluation in front:
        first.setdefault(objectives.compute_costs(evaluation.values), evaluation)
    counts = Counter(
        first[objectives.compute_costs(evaluation.values)].trial for evaluation in front
    )
    return list(first.values()), {trial: count - 1 for trial, count in counts.items()}


def format_trial(trial: int, ties: Mapping[int, int]) -> str:
    """Return the trial of an individual as text: "7 +1" means that `group_ties` has omitted one equal individual."""
    return f"{trial} +{ties[trial]}" if ties.get(trial) else str(trial)


def make_improved_heading(objectives: Objectives) -> str:
    """Return the heading of the column that counts new best losses, or new members of the front, by propagator."""
    return "joined the front" if objectives.is_multi_objective else "improved the best"
