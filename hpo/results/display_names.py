"""Distinct names for hyperparameters, metrics and columns such as the loss, which are shown together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

PARAM_PREFIX, METRIC_PREFIX = (
    "param_",
    "metric_",
)  # prefixes: of all names in exports, and elsewhere of a name that is taken


def make_distinct(wanted: Mapping[str, str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """Return what each name is shown as: the wanted text, with the prefix where it is taken or another name has it."""
    shown: dict[str, str] = {}
    used = set(taken)
    for name in sorted(wanted, key=lambda name: (wanted[name] in taken, wanted[name] != name, name)):
        shown[name] = wanted[name]
        while shown[name] in used:
            shown[name] = prefix + shown[name]
        used.add(shown[name])
    return {name: shown[name] for name in wanted}


def collect_names(individuals: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all hyperparameters that some individuals have, each behind those that are before it."""
    names: list[str] = []
    for individual in individuals:
        place = 0
        for name in individual:
            if name not in names:
                names.insert(place, name)
            place = names.index(name) + 1
    return names


def name_params(params: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return what each hyperparameter is shown as, beside columns that have the names in `taken`."""
    return make_distinct({name: name for name in params}, taken, PARAM_PREFIX)


def name_metrics(metrics: Iterable[str], params: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return what each metric is shown as, beside hyperparameters, and columns that have the names in `taken`."""
    ours = name_params(params, taken)
    return make_distinct({name: name for name in metrics}, {*taken, *ours, *ours.values()}, METRIC_PREFIX)


def merge_params_and_metrics(
    params: Mapping[str, Any], metrics: Mapping[str, Any], taken: Collection[str]
) -> dict[str, Any]:
    """Return hyperparameters and metrics in one mapping, in which no name occurs twice or is in `taken`."""
    ours, theirs = name_params(params, taken), name_metrics(metrics, params, taken)
    return {
        **{ours[name]: value for name, value in params.items()},
        **{theirs[name]: value for name, value in metrics.items()},
    }
