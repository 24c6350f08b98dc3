"""The winner of a run: which individual it recommends, and what its network does on data that no search has seen."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.prediction import MOST_PREDICTIONS, MOST_TEXTS, shorten_text
from hpo.problem import Problem
from hpo.results.confirmation import compare
from hpo.store.evaluations import Evaluation
from hpo.store.front import front
from hpo.store.run_dir import RunDir, write_json
from hpo.store.weights import kept_weights, read_about
from hpo.text import printable

RunTest = Callable[[dict[str, Any], Path], Iterator[Mapping[str, Any]]]
"""Tests the network with these hyperparameters and the weights in a file, and yields the parts of the result."""

_SHOWN: dict[str, type] = {"image": str, "label": str, "predicted": str, "confidence": float, "wrong": bool}


class FailedTestError(Exception):
    """The test of a network has failed: a line of the user's code, the type of the error and its message."""


def winner_of(
    evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> Evaluation | None:
    """Return the evaluation that a run recommends; of several objectives, it is one of the front.

    If all confirmations have finished, it is the individual with the lowest mean loss over other seeds, and otherwise
    the one with the lowest loss.
    """
    confirmed = compare(confirmations) if all(one.finished for one in confirmations) else []
    best = front(evaluations, objectives)
    among = {one.trial: one for one in (best if objectives.are_several else evaluations)}
    first = next((entry for entry in confirmed if entry["trial"] in among), None)
    if first is not None and first["mean"] is not None:
        return among[first["trial"]]
    return next(iter(best), None)


def best_by(name: str, evaluations: Sequence[Evaluation], objectives: Objectives) -> Evaluation | None:
    """Return the evaluation of the front that is best in one objective, None where nothing has succeeded.

    Of equal ones, it is the one with the lowest loss. Raises UsageError where there is no such objective.
    """
    if name not in objectives.names:
        close = difflib.get_close_matches(name, objectives.names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        several = f"objectives of this run are {', '.join(map(printable, objectives.names))}"
        there = several if objectives.are_several else f"only objective is {LOSS}"
        raise UsageError(f"--by {printable(name)}: {hint}the {there}")
    place = objectives.names.index(name)
    return min(front(evaluations, objectives), key=lambda one: objectives.costs(one.values)[place], default=None)


def examine(run_dir: RunDir, problem: Problem, winner: Evaluation, run_test: RunTest) -> dict[str, Any] | None:
    """Test the network of a run's winner, and record and return the result; None if it cannot be, or has been, tested.

    `run_test(params, weights)` yields the parts of the result, as `hpo.trainer.testing.test` does in a trainer. Test
    data are only for this: a network that was chosen by its result on them would need other data to be tested with.
    Weights that were trained with other settings, before the run was resumed, are not tested.

    Raises FailedTestError if the test fails.
    """
    if not problem.file.has_test or examined(run_dir, winner) is not None:
        return None
    path = kept_weights(run_dir, winner.trial)
    about = read_about(path) if path else None
    if path is None or about is None or (about.trial, about.params) != (winner.trial, winner.params):
        return None
    if about.settings != run_dir.manifest().settings:
        return None
    before = _read(run_dir)  # The test of an earlier winner, before the run was resumed.
    times = 1 + (before["times"] if before is not None else 0)
    content: dict[str, Any] | None = None
    for part in run_test(dict(winner.params), path.absolute()):
        if part["kind"] == "metrics":
            content = {"trial": winner.trial, "times": times, "metrics": _metrics(part), "predictions": [], "texts": []}
        elif part["kind"] == "samples" and content is not None:
            content |= _samples(part)
        else:
            raise FailedTestError(part.get("text", "it gave no metrics"))
        write_json(run_dir.test_json, content)  # First without samples, which may fail: the test has been made.
    if content is None:
        raise FailedTestError("it gave no metrics")
    return content


def examined(run_dir: RunDir, winner: Evaluation) -> dict[str, Any] | None:
    """Return the result of the winner's test; None where it was not tested.

    It has metrics, predictions, texts and `times`: how many networks of this run had been tested by then, this one too.
    """
    content = _read(run_dir)
    return content if content is not None and content["trial"] == winner.trial else None


def _read(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
        about = {"trial": int(content["trial"]), "times": int(content["times"])}
        return {**about, "metrics": _metrics(content), **_samples(content)}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None  # It is missing, or was edited.


def _metrics(content: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(metric) for name, metric in content["metrics"].items()}


def _samples(content: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return predictions and texts in the types that they are shown in; runs of earlier versions have no texts."""
    predictions, texts = content["predictions"][:MOST_PREDICTIONS], content.get("texts", [])[:MOST_TEXTS]
    return {
        "predictions": [{name: kind(one[name]) for name, kind in _SHOWN.items()} for one in predictions],
        "texts": [shorten_text(str(one["prompt"]), str(one["text"])) for one in texts],
    }
