"""Names of hyperparameters and metrics that stand beside each other, and beside what a run knows, such as the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

PARAM, METRIC = "param_", "metric_"  # before each of them in exports, and elsewhere where a name is taken


def distinct(wanted: Mapping[str, str], taken: Collection[str], prefix: str) -> dict[str, str]:
    """Return what each name is shown as: what is wanted, with the prefix where that is taken, or another one has it."""
    shown: dict[str, str] = {}
    used = set(taken)
    for name in sorted(wanted, key=lambda name: (wanted[name] in taken, wanted[name] != name, name)):
        shown[name] = wanted[name]
        while shown[name] in used:
            shown[name] = prefix + shown[name]
        used.add(shown[name])
    return {name: shown[name] for name in wanted}


def params_shown(params: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return what hyperparameters are called beside what has the names that are taken."""
    return distinct({name: name for name in params}, taken, PARAM)


def metrics_shown(metrics: Iterable[str], params: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return what metrics are called beside hyperparameters, and beside what has the names that are taken."""
    ours = params_shown(params, taken)
    return distinct({name: name for name in metrics}, {*taken, *ours, *ours.values()}, METRIC)


def together(params: Mapping[str, Any], metrics: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Put hyperparameters and metrics into one mapping, in which none has the name of another, or one that is taken."""
    ours, theirs = params_shown(params, taken), metrics_shown(metrics, params, taken)
    return {
        **{ours[name]: value for name, value in params.items()},
        **{theirs[name]: value for name, value in metrics.items()},
    }
