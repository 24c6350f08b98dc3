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
        finite = {}
        for name, metric in dict(metrics).items():
            value = metric.item() if hasattr(metric, "item") else metric
            if not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"the test metric {name!r} must be a finite number, got {value!r}")
            finite[str(name)] = float(value)
        yield {"kind": "metrics", "metrics": finite}
        yield {"kind": "samples", **_encode_samples(samples)}
    except (Exception, SystemExit) as error:
        line = UserFrames(search.file.location).find_position(extract_error_frames(error))
        where = f"{line}: " if line else ""
        text = f"{where}{type(error).__name__}: {format_with_hint(error)}"
        yield {"kind": "failure", "text": text}


def _encode_samples(samples: Iterable[object]) -> dict[str, list[Any]]:
    """Return the first predictions and texts as JSON data, with images as data URLs of PNGs."""
    predictions: list[dict[str, Any]] = []
    texts: list[dict[str, str]] = []
    for sample in samples:
        if isinstance(sample, Prediction):
            if len(predictions) < MOST_PREDICTIONS:
                from PIL import Image

                file = io.BytesIO()
                Image.fromarray(sample.image).save(file, "PNG")
                data = {
                    "image": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
                    "label": str(sample.label),
                    "predicted": str(sample.predicted),
                    "confidence": float(sample.confidence),
                    "wrong": not sample.is_correct,
                }
                predictions.append(data)
        elif isinstance(sample, TextSample):
            if len(texts) < MOST_TEXTS:
                texts.append(shorten_text(sample.prompt, sample.text))
        else:
            raise ValueError(
                "test must return metrics and a list of hpo.Prediction and hpo.TextSample, "
                f"got {format_repr(sample)}"
            )
    return {"predictions": predictions, "texts": texts}
