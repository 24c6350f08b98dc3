"""Predictions and text samples of the best network, which `test` of a search file can return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpo.text_format import format_repr

MOST_PREDICTIONS = 60
MOST_TEXTS = 20
_LONGEST_TEXT = 10_000  # characters of a prompt, or of the generated text


@dataclass(frozen=True)
class Prediction:
    """The prediction of a network for one test image, for the report.

    Args:
        image: The image, dtype uint8, shape (height, width) or (height, width, 3).
        label: The correct class.
        predicted: The class that the network predicts.
        confidence: The probability that the network gives to `predicted`, from 0 to 1.

    Raises:
        ValueError: The image has another dtype or shape.
    """

    image: npt.NDArray[np.uint8]
    label: str
    predicted: str
    confidence: float

    def __post_init__(self) -> None:
        shape = self.image.shape
        is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)
        if self.image.dtype != np.uint8 or not is_image:
            raise ValueError(
                "the image of a prediction must be uint8, of shape (height, width) or (height, "
                f"width, 3), got {self.image.dtype} of shape {shape}"
            )

    @property
    def is_correct(self) -> bool:
        """Whether the predicted class is correct."""
        return self.predicted == self.label


@dataclass(frozen=True)
class TextSample:
    """A text that a network generated, for the report.

    Args:
        prompt: The beginning, which is given to the network.
        text: The continuation, which the network generates.

    Raises:
        ValueError: One of them is not a string.
    """

    prompt: str
    text: str

    def __post_init__(self) -> None:
        for name in ("prompt", "text"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"the {name} of a text sample must be a string, got "
                    f"{format_repr(getattr(self, name))}"
                )


def shorten_text(prompt: str, text: str) -> dict[str, str]:
    """Return a text sample as data that JSON can hold.

    If `prompt` is long, its beginning is cut off. If `text` is long, its end is cut off.
    """
    if len(prompt) > _LONGEST_TEXT:
        prompt = "..." + prompt[-_LONGEST_TEXT:]
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT] + "..."
    return {"prompt": prompt, "text": text}
