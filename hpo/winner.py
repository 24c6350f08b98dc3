"""The winner of a run: which individual it recommends, and what its network does on data that no search has seen."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from hpo.prediction import Prediction
from hpo.run_dir import RunDir, write_json
from hpo.search_file import SearchFile
from hpo.trials import Evaluation, rank
from hpo.weights import read_weights

_MOST_PREDICTIONS = 60
_SHOWN: dict[str, type] = {"image": str, "label": str, "predicted": str, "confidence": float, "wrong": bool}


def winner_of(evaluations: Sequence[Evaluation], confirmed: Sequence[Mapping[str, Any]]) -> Evaluation | None:
    """Give the evaluation that a run recommends: the best by the mean over other seeds, where it was confirmed."""
    if confirmed and confirmed[0]["mean"] is not None:
        return next(one for one in evaluations if one.trial == confirmed[0]["trial"])
    return next(iter(rank(evaluations, 1)), None)


def examine(run_dir: RunDir, search: SearchFile, settings: Any, winner: Evaluation) -> dict[str, Any] | None:
    """Test the network of a run's winner and keep what comes out; None where nothing can be tested, or all was.

    Test data is for this alone: a network that was chosen by it would need other data to be tested with.
    """
    if search.test is None or examined(run_dir, winner) is not None:
        return None
    weights = read_weights(run_dir.weights)
    if weights is None or weights.trial != winner.trial:
        return None
    result = search.call(search.test, dict(winner.params), weights.state, settings=settings)
    metrics, predictions = result if isinstance(result, tuple) else (result, ())
    content = {
        "trial": winner.trial,
        "metrics": {str(name): _finite(name, value) for name, value in dict(metrics).items()},
        "predictions": [_shown(prediction) for prediction in list(predictions)[:_MOST_PREDICTIONS]],
    }
    write_json(run_dir.test_json, content)
    return content


def examined(run_dir: RunDir, winner: Evaluation) -> dict[str, Any] | None:
    """Give what came out when the winner was tested: its metrics and predictions; None where it was not."""
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        known = {
            "trial": int(content["trial"]),
            "metrics": {str(name): float(metric) for name, metric in content["metrics"].items()},
            "predictions": [{name: kind(one[name]) for name, kind in _SHOWN.items()} for one in content["predictions"]],
        }
    except (KeyError, TypeError, ValueError, AttributeError):  # somebody has edited it
        return None
    return known if known["trial"] == winner.trial else None


def _finite(name: object, value: object) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the test metric {name!r} must be a finite number, not {value!r}")
    return float(value)


def _shown(prediction: Prediction) -> dict[str, Any]:
    """Write a prediction as JSON, its image as the URL of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.asarray(prediction.image, np.uint8)).save(file, "PNG")
    return {
        "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
        "label": str(prediction.label),
        "predicted": str(prediction.predicted),
        "confidence": float(prediction.confidence),
        "wrong": not prediction.is_right,
    }
