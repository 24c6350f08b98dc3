"""Convert between the trials of an Optuna study and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.store.evaluations import INTERRUPTED, Assignment, Evaluation
from hpo.store.json_values import (
    is_list_of,
    is_mapping,
    is_mapping_of,
    is_number,
    is_text,
    is_whole_number,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_COPIED_ATTRIBUTES = ("propagator", "confirms", "seed", "inherits", "at_rungs")

_STATE_NAMES = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def _is_duration(value: Any) -> bool:
    return is_number(value) and bool(value >= 0)


def _is_at_rungs(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str)
        and name.isdecimal()
        and type(values) is list
        and all(map(is_number, values))
        for name, values in value.items()
    )


_VALIDATORS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("island", "worker", "generation", "confirms", "seed"), is_whole_number),
    **dict.fromkeys(("retry_of", "crash_count", "resumed_from_step", "inherits"), is_whole_number),
    **dict.fromkeys(("checkpoint_step", "epoch", "paused_after", "cut_after"), is_whole_number),
    "tests": is_whole_number,
    **dict.fromkeys(("failure", "traceback", "propagator", "imported_from"), is_text),
    **dict.fromkeys(("metrics", "immigrants"), is_mapping),
    "at_rungs": _is_at_rungs,
    "hosts": is_mapping_of(is_whole_number),
    "gpus": is_mapping_of(is_list_of(is_text)),
    **dict.fromkeys(("seconds", "seconds_before"), _is_duration),
}


def is_interrupted(trial: FrozenTrial) -> bool:
    """Return whether the end of its job interrupted a trial. It is then retried."""
    return trial.state.is_finished() and trial.user_attrs.get("failure") == INTERRUPTED


def find_retried_trial(trial: FrozenTrial) -> int | None:
    """Return the trial that this one retries or continues; None if it is the first."""
    return _find_earlier_trial(trial, "retry_of")


def _find_earlier_trial(trial: FrozenTrial, name: str) -> int | None:
    number: Any = trial.user_attrs.get(name)
    return int(number) if is_whole_number(number) and number < trial.number else None


def find_root_trial(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> int:
    """Return the number of the first trial of the individual to which `trial` belongs."""
    repeated = find_retried_trial(trial)
    return trial.number if repeated is None else find_root_trial(trials[repeated], trials)


def copy_retry_attributes(trial: FrozenTrial) -> dict[str, Any]:
    """Return the attributes of a trial that a retry of this trial copies, such as the seed."""
    return {name: trial.user_attrs[name] for name in _COPIED_ATTRIBUTES if name in trial.user_attrs}


def is_paused(trial: FrozenTrial) -> bool:
    """Return whether a trial was paused, so that another trial may train its individual further."""
    return trial.state == TrialState.PRUNED and is_whole_number(
        trial.user_attrs.get("paused_after")
    )


def make_assignment(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> Assignment:
    """Return the assignment of a trial that has started; `trials` are all trials of the study."""
    evaluation = make_evaluation(trial)
    parent = None
    if evaluation.inherits is not None:
        parent = find_root_trial(trials[evaluation.inherits], trials)
    return Assignment(
        trial._trial_id,
        trial.number,
        trial.params,
        find_root_trial(trial, trials),
        trial.user_attrs.get("seed"),
        parent,
        evaluation.confirms,
        evaluation.tests,
    )


def make_evaluation(trial: FrozenTrial, is_repeated: bool = False) -> Evaluation:
    """Convert a trial to an evaluation.

    Invalid attributes, which another program has written, are ignored.

    Args:
        is_repeated: Whether another trial retries or continues this one. Then a paused trial has
            the state "promoted", and a failed trial has the state "interrupted".
    """
    ended = trial.state.is_finished()
    attributes = {
        name: value
        for name, value in trial.user_attrs.items()
        if name in _VALIDATORS and _VALIDATORS[name](value)
    }
    for name in ("metrics", "immigrants"):
        if name in attributes:
            attributes[name] = {
                key: value for key, value in attributes[name].items() if is_number(value)
            }
    at_rungs = attributes.pop("at_rungs", {})
    return Evaluation(
        trial=trial.number,
        state=_find_state(trial, is_repeated),
        loss=float(trial.values[0]) if trial.values else math.inf,
        other_values=tuple(map(float, trial.values[1:])) if trial.values else (),
        params=trial.params,
        started=trial.datetime_start.timestamp() if trial.datetime_start else math.nan,
        ended=trial.datetime_complete.timestamp() if trial.datetime_complete else math.nan,
        curve=trial.intermediate_values,
        at_rungs={int(losses): values for losses, values in at_rungs.items()},
        **{
            "island": 0,
            "worker": 0,
            "generation": 0,
            **attributes,
            "retry_of": find_retried_trial(trial),
            "inherits": _find_earlier_trial(trial, "inherits"),
            "seconds": float(attributes.get("seconds", math.nan)) if ended else 0.0,
        },
    )


def _find_state(trial: FrozenTrial, is_repeated: bool) -> str:
    if is_interrupted(trial) or (is_repeated and trial.state == TrialState.FAIL):
        return INTERRUPTED
    if is_paused(trial):
        return "promoted" if is_repeated else "paused"
    return _STATE_NAMES[trial.state]


def make_trial(
    state: TrialState,
    params: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    attributes: Mapping[str, Any],
) -> FrozenTrial:
    """Create a running or waiting trial, with the distributions of its active hyperparameters."""
    own = {name: distributions[name] for name in params}
    return create_trial(
        state=state, params=dict(params), distributions=own, user_attrs=dict(attributes)
    )


def make_imported_trial(
    evaluation: Evaluation,
    distributions: Mapping[str, BaseDistribution],
    attributes: Mapping[str, Any],
) -> FrozenTrial:
    """Convert a complete, pruned or paused evaluation of another run to a trial."""
    user_attrs = dict(attributes)
    if not math.isnan(evaluation.seconds):
        user_attrs["seconds"] = evaluation.seconds
    user_attrs |= make_metrics_attribute(evaluation.metrics)
    return FrozenTrial(
        number=-1,
        trial_id=-1,
        state=TrialState.COMPLETE if evaluation.state == "complete" else TrialState.PRUNED,
        value=None,
        values=list(evaluation.values),
        datetime_start=datetime.fromtimestamp(evaluation.started),
        datetime_complete=datetime.fromtimestamp(evaluation.ended),
        params=dict(evaluation.params),
        distributions={name: distributions[name] for name in evaluation.params},
        user_attrs=user_attrs,
        system_attrs={},
        intermediate_values=dict(evaluation.curve),
    )


def make_metrics_attribute(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the trial attribute that holds metrics; an empty dict without metrics."""
    return {"metrics": dict(metrics)} if metrics else {}
