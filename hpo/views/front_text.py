"""The Pareto front as text: what it is, how far it reaches, and how much it is worth."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpo.dominance import Costs
from hpo.objectives import Objectives
from hpo.store.evaluations import Evaluation
from hpo.text_format import format_count, format_named_values, format_number


def list_objectives(objectives: Objectives) -> str:
    """Return the objectives as a part of a sentence, such as ``loss, parameters and accuracy (maximised)``."""
    texts = objectives.describe()
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]]) if len(texts) > 1 else texts[0]


def describe_front(count: int, objectives: Objectives) -> str:
    """Return a sentence on a front of so many individuals."""
    if count == 1:
        return f"1 individual: no other one is better in any of {list_objectives(objectives)}."
    return f"{count} individuals: none of them is better than another in all of {list_objectives(objectives)}."


def describe_hypervolume(hypervolume: Mapping[str, Any] | None, objectives: Objectives) -> str:
    """Return a sentence on the hypervolume, as a summary has it; empty without one."""
    if hypervolume is None:
        return ""
    ideal, reference = (format_point(hypervolume[corner], objectives) for corner in ("ideal", "reference"))
    return f"Hypervolume: they dominate {hypervolume['share']:.1%} of the box between {ideal} and {reference}."


def format_point(values: Iterable[float], objectives: Objectives) -> str:
    """Return a value of each objective as text."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in zip(objectives.names, values, strict=True))


def format_ranges(front: Sequence[Evaluation], objectives: Objectives) -> str:
    """Return from where to where a front reaches in each objective."""
    texts = []
    for name, own in zip(
        objectives.names, zip(*(evaluation.values for evaluation in front), strict=True), strict=False
    ):
        lowest, highest = format_number(min(own)), format_number(max(own))
        texts.append(f"{name} {lowest} to {highest}" if lowest != highest else f"{name} {lowest}")
    return ", ".join(texts)


def format_best_so_far(best: Evaluation | None, on_front: int) -> str:
    """Return what has been found, as the beginning of a line; `on_front` is 0 where the loss is the only objective."""
    if best is None:
        return ""
    found = f"front of {on_front}, lowest loss" if on_front else "best so far"
    return f"{found} {format_number(best.loss)} (trial {best.trial}: {format_named_values(best.params)}), "


def put_objectives_first(metrics: Iterable[str], objectives: Objectives) -> list[str]:
    """Return names of metrics, those of objectives before the others."""
    names = list(metrics)
    own = [name for name in objectives.metric_names if name in names]
    return own + [name for name in names if name not in own]


def describe_alternatives(front: Sequence[Evaluation], objectives: Objectives) -> str:
    """Return how to choose another individual of a front."""
    if len(front) == 1:
        return "it alone is on the front"
    ways = " or ".join(f"--by {shlex.quote(name)}" for name in objectives.metric_names)
    return f"{format_count(len(front), 'individual')} are on the front: {ways} chooses another"


def compute_entry_costs(entries: Sequence[Mapping[str, Any]], objectives: Objectives) -> Costs:
    """Return the costs of individuals of a summary, shape (individuals, objectives), the lower the better."""
    costs = [
        objectives.compute_costs((entry["loss"], *objectives.select_metric_values(entry["metrics"])))
        for entry in entries
    ]
    return np.array(costs, float).reshape(-1, len(objectives.names))


def group_ties(entries: Sequence[Mapping[str, Any]], objectives: Objectives) -> list[dict[str, Any]]:
    """Return the individuals of a summary, only the first of those that tie; `ties` counts the others."""
    groups: dict[tuple[float, ...], list[Mapping[str, Any]]] = {}
    for entry, costs in zip(entries, compute_entry_costs(entries, objectives), strict=True):
        groups.setdefault(tuple(costs), []).append(entry)
    return [{**group[0], "ties": len(group) - 1} for group in groups.values()]


def format_trial(entry: Mapping[str, Any]) -> str:
    """Return the number of an individual's trial, and how many others `together` has left out."""
    return f"{entry['trial']} +{entry['ties']}" if entry.get("ties") else str(entry["trial"])


def make_improved_heading(objectives: Objectives) -> str:
    """Return the heading of the column that counts a propagator's improvements."""
    return "joined the front" if objectives.is_multi_objective else "improved the best"
