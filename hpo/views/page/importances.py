"""How much each hyperparameter matters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.store.evaluations import Evaluation

_LEAST = 20  # complete evaluations


def importances(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]) -> dict[str, float]:
    """Return how much of what tells the best evaluations from the others each hyperparameter explains, most first.

    They add up to 1. One that exists in some evaluations only is judged by these, and counts as much as it exists in
    the best tenth of all. Of those that are left out too little is known, and of all where it is empty.
    """
    complete = sorted((one for one in evaluations if one.state == "complete"), key=lambda one: one.loss)
    best = complete[: math.ceil(len(complete) / 10)]
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in distributions:
        groups.setdefault(tuple(one.trial for one in complete if name in one.params), []).append(name)
    found: dict[str, float] = {}
    for trials, names in groups.items():
        chosen = set(trials)
        having = [one for one in complete if one.trial in chosen]
        if len(having) >= _LEAST and len({one.loss for one in having}) > 1:
            explained = _explained(having, {name: distributions[name] for name in names})
            weight = sum(one.trial in chosen for one in best) / len(best)
            found |= {name: share * weight for name, share in explained.items()}
    total = sum(found.values())
    if not total:
        return {}
    return {name: found[name] / total for name in sorted(found, key=lambda name: -found[name])}


def _explained(evaluations: Sequence[Evaluation], distributions: Mapping[str, Any]) -> dict[str, float]:
    import optuna.importance  # takes 0.5 s

    study = optuna.create_study()
    study.add_trials(
        optuna.trial.create_trial(
            params={name: one.params[name] for name in distributions},
            distributions=dict(distributions),
            value=one.loss,
        )
        for one in evaluations
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `normalize`
        return optuna.importance.get_param_importances(study, normalize=False)
