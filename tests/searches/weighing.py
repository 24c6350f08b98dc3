"""A search whose weights hold the number of the epoch, and are changed in place.

The loss is lowest in epoch `dip`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hpo import Int, Prediction, SearchSpace, TextSample

space = SearchSpace(dip=Int(1, 5), height=Int(1, 40))


@dataclass(frozen=True)
class Settings:
    offers: str = "weights"
    tests: str = "well"


def objective(params, worker, settings):
    weights = {"epoch": torch.zeros(1), "dip": torch.tensor([float(params["dip"])])}
    for epoch in range(1, 6):
        weights["epoch"] += 1
        if settings.offers == "weights" and worker.rank == 0:
            worker.offer_weights(weights)
        elif settings.offers == "nonsense":
            worker.offer_weights({"epoch": epoch})
        yield params["height"] + 5.0 * abs(epoch - params["dip"])


def test(params, weights, settings):
    if settings.tests == "badly":
        raise ValueError("no test data today")
    image = np.full((4, 4), 200, np.uint8)
    samples = [
        Prediction(image, "cat", "dog", 0.9),
        TextSample("def <cat>", "(dog):\n\tpass"),
        Prediction(image, "<cat>", "<cat>", 0.5),
    ]
    return {"epoch": weights["epoch"].item(), "height": params["height"]}, samples
