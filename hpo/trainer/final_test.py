"""Test the best network of a run: call the user's `test` with the weights that the run has kept."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.prediction import MOST_PREDICTIONS, MOST_TEXTS, Prediction, TextSample, shorten_text
from hpo.process.failure import format_with_hint
from hpo.process.user_frames import UserFrames, extract_error_frames
from hpo.store.weights import read_weights
from hpo.text_format import format_repr

if TYPE_CHECKING:
    from hpo.trainer.search_file import BoundSearch


def run_test(
    search: BoundSearch, params: Mapping[str, Any], weights_path: Path
) -> Iterator[dict[str, Any]]:
    """Call the user's `test` with the weights in a file, and yield its result as JSON data.

    The parts are ``{"kind": "metrics", "metrics": {...}}``, then ``{"kind": "samples",
    "predictions": [...], "texts": [...]}``. If `test` fails or its result is invalid, the final
    part is ``{"kind": "failure", "text": ...}``.
    """
    try:
        weights = read_weights(weights_path)
        if weights is None:
            raise FileNotFoundError(f"the weights {weights_path} are missing")
        assert search.file.test is not None
        result = search.file.test(dict(params), weights.state, *search.copy_settings())
        metrics, samples = result if isinstance(result, tuple) else (result, ())
        finite = {str(name): _to_finite(name, value) for name, value in dict(metrics).items()}
        yield {"kind": "metrics", "metrics": finite}
        yield {"kind": "samples", **_encode_samples(samples)}
    except (Exception, SystemExit) as error:
        line = UserFrames(search.file.location).find_position(extract_error_frames(error))
        where = f"{line}: " if line else ""
        text = f"{where}{type(error).__name__}: {format_with_hint(error)}"
        yield {"kind": "failure", "text": text}


def _to_finite(name: object, value: object) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"the test metric {name!r} must be a finite number, got {value!r}")
    return float(value)


def _encode_samples(samples: Iterable[object]) -> dict[str, list[Any]]:
    """Return the first predictions and the first texts of the samples as JSON data."""
    predictions: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    for sample in samples:
        if isinstance(sample, Prediction):
            if len(predictions) < MOST_PREDICTIONS:
                predictions.append(_encode_prediction(sample))
        elif isinstance(sample, TextSample):
            if len(texts) < MOST_TEXTS:
                texts.append(shorten_text(sample.prompt, sample.text))
        else:
            raise ValueError(
                "test must return metrics and a list of hpo.Prediction and hpo.TextSample, "
                f"got {format_repr(sample)}"
            )
    return {"predictions": predictions, "texts": texts}


def _encode_prediction(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON data, with its image as the data URL of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(prediction.image).save(file, "PNG")
    return {
        "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
        "label": str(prediction.label),
        "predicted": str(prediction.predicted),
        "confidence": float(prediction.confidence),
        "wrong": not prediction.is_correct,
    }
