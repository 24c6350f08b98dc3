"""The winner of a run: which individual it recommends, and what its network does on data that no search has seen."""

from __future__ import annotations

import base64
import difflib
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.prediction import Prediction, TextSample
from hpo.problem import Problem
from hpo.results.confirmation import compare
from hpo.store.front import front
from hpo.store.run_dir import RunDir, write_json
from hpo.store.trials import Evaluation
from hpo.store.weights import kept_weights, read_weights
from hpo.text import printable, quoted

_MOST_PREDICTIONS = 60
_MOST_TEXTS = 20
_LONGEST_TEXT = 10_000  # characters of a prompt or of what follows it
_SHOWN: dict[str, type] = {"image": str, "label": str, "predicted": str, "confidence": float, "wrong": bool}


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


def examine(run_dir: RunDir, problem: Problem, winner: Evaluation) -> dict[str, Any] | None:
    """Test the network of a run's winner, and record and return the result; None if it cannot be, or has been, tested.

    Test data are only for this: a network that was chosen by its result on them would need other data to be tested
    with. Weights that were trained with other settings, before the run was resumed, are not tested.
    """
    if problem.file.test is None or examined(run_dir, winner) is not None:
        return None
    path = kept_weights(run_dir, winner.trial)
    weights = read_weights(path) if path else None
    if weights is None or (weights.trial, weights.params) != (winner.trial, winner.params):
        return None
    if weights.settings != run_dir.manifest().settings:
        return None
    before = _read(run_dir)  # the test of an earlier winner, before the run was resumed
    metrics, samples = tested(problem, winner.params, weights.state)
    content: dict[str, Any] = {
        "trial": winner.trial,
        "times": 1 + (before["times"] if before is not None else 0),
        "metrics": metrics,
        "predictions": [],
        "texts": [],
    }
    write_json(run_dir.test_json, content)  # first without samples, which may fail: the test has been made
    content |= _samples(samples)
    write_json(run_dir.test_json, content)
    return content


def tested(
    problem: Problem, params: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[dict[str, float], Iterable[Prediction | TextSample]]:
    """Call the search space's `test`, which it must have, and return its metrics, which are finite, and its samples."""
    result = problem.test(dict(params), weights)
    metrics, samples = result if isinstance(result, tuple) else (result, ())
    return {str(name): _finite(name, value) for name, value in dict(metrics).items()}, samples


def examined(run_dir: RunDir, winner: Evaluation) -> dict[str, Any] | None:
    """Return the result of the winner's test; None where it was not tested.

    It has metrics, predictions, texts and `times`: how many networks of this run had been tested by then, this one too.
    """
    content = _read(run_dir)
    return content if content is not None and content["trial"] == winner.trial else None


def _read(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
        return {
            "trial": int(content["trial"]),
            "times": int(content["times"]),
            "metrics": {str(name): float(metric) for name, metric in content["metrics"].items()},
            "predictions": [{name: kind(one[name]) for name, kind in _SHOWN.items()} for one in content["predictions"]],
            # A run of before there were texts has none.
            "texts": [_text(str(one["prompt"]), str(one["text"])) for one in content.get("texts", [])[:_MOST_TEXTS]],
        }
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None  # there is none, or somebody has edited it


def _finite(name: object, value: object) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the test metric {name!r} must be a finite number, not {value!r}")
    return float(value)


def _samples(samples: Iterable[object]) -> dict[str, list[Any]]:
    """Return the first predictions and the first texts among samples, as JSON can hold them."""
    predictions: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    for one in samples:
        if isinstance(one, Prediction):
            predictions += [_shown(one)] if len(predictions) < _MOST_PREDICTIONS else []
        elif isinstance(one, TextSample):
            texts += [_text(one.prompt, one.text)] if len(texts) < _MOST_TEXTS else []
        else:
            raise ValueError(
                f"test returns metrics, and a list of hpo.Prediction and hpo.TextSample: {quoted(one)} is neither"
            )
    return {"predictions": predictions, "texts": texts}


def _text(prompt: str, text: str) -> dict[str, str]:
    """Return a text as JSON can hold it: of a long one, what stands around the end of its prompt."""
    prompt = prompt if len(prompt) <= _LONGEST_TEXT else "..." + prompt[-_LONGEST_TEXT:]
    return {"prompt": prompt, "text": text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."}


def _shown(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON can hold it, its image as the URL of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(prediction.image).save(file, "PNG")
    return {
        "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
        "label": str(prediction.label),
        "predicted": str(prediction.predicted),
        "confidence": float(prediction.confidence),
        "wrong": not prediction.is_right,
    }
