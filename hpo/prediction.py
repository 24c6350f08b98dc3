"""Predictions and texts of the best network, which a search space's `test` may return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpo.text_format import format_repr

MOST_PREDICTIONS = 60
MOST_TEXTS = 20
_LONGEST_TEXT = 10_000  # characters of a prompt, or of the text behind it


@dataclass(frozen=True)
class Prediction:
    """What a network predicts for one test image.

    `image` is uint8, of shape (height, width) or (height, width, 3). `label` is the class of the image, `predicted` the
    class that the network predicts, and `confidence`, from 0 to 1, the network's probability for it.

    Raises ValueError where the image has another type or shape.
    """

    image: npt.NDArray[np.uint8]
    label: str
    predicted: str
    confidence: float

    def __post_init__(self) -> None:
        shape = self.image.shape
        if self.image.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)):
            raise ValueError(
                "the image of a prediction must be uint8, of shape (height, width) or (height, width, 3), not "
                f"{self.image.dtype} of shape {shape}"
            )

    @property
    def is_correct(self) -> bool:
        """Whether the network is right."""
        return self.predicted == self.label


@dataclass(frozen=True)
class TextSample:
    """What a network writes: the `prompt` that it is given, and the `text` that it goes on with.

    Raises ValueError where one is no string.
    """

    prompt: str
    text: str

    def __post_init__(self) -> None:
        for name in ("prompt", "text"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(
                    f"the {name} of a text sample must be a string, not {format_repr(getattr(self, name))}"
                )


def shorten_text(prompt: str, text: str) -> dict[str, str]:
    """Return a text sample as JSON can hold it; of a long one, the part around the end of its prompt."""
    prompt = prompt if len(prompt) <= _LONGEST_TEXT else "..." + prompt[-_LONGEST_TEXT:]
    return {"prompt": prompt, "text": text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."}
