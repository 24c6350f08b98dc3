"""Give distinct names to hyperparameters, metrics and other columns that are shown together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

# Exports give all names a prefix. Other views give it only to names that are taken.
PARAM_PREFIX = "param_"
METRIC_PREFIX = "metric_"


def make_distinct(wanted: Mapping[str, str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """Return the text to show for each name, with the prefix added until no other column has it.

    `wanted` are the preferred texts, `taken` those of other columns.
    """

    def make_sort_key(name: str) -> tuple[bool, bool, str]:
        return wanted[name] in taken, wanted[name] != name, name

    shown: dict[str, str] = {}
    used = set(taken)
    for name in sorted(wanted, key=make_sort_key):
        shown[name] = wanted[name]
        while shown[name] in used:
            shown[name] = prefix + shown[name]
        used.add(shown[name])
    return {name: shown[name] for name in wanted}


def collect_names(individuals: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of the hyperparameters of all individuals, in the individuals' order."""
    names: list[str] = []
    for individual in individuals:
        position = 0
        for name in individual:
            if name not in names:
                names.insert(position, name)
            position = names.index(name) + 1
    return names


def name_params(params: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return the text to show for each hyperparameter, which differs from names in `taken`."""
    return make_distinct({name: name for name in params}, taken, PARAM_PREFIX)


def name_metrics(
    metrics: Iterable[str], params: Iterable[str], taken: Collection[str]
) -> dict[str, str]:
    """Return the text for each metric, which differs from hyperparameters and names in `taken`."""
    param_names = name_params(params, taken)
    used = {*taken, *param_names, *param_names.values()}
    return make_distinct({name: name for name in metrics}, used, METRIC_PREFIX)


def merge_params_and_metrics(
    params: Mapping[str, Any], metrics: Mapping[str, Any], taken: Collection[str]
) -> dict[str, Any]:
    """Return hyperparameters and metrics in one mapping, with names that are not in `taken`."""
    param_names = name_params(params, taken)
    metric_names = name_metrics(metrics, params, taken)
    named_params = {param_names[name]: value for name, value in params.items()}
    return named_params | {metric_names[name]: value for name, value in metrics.items()}
