"""A search with three objectives: a loss, a width, and a speed, which is maximised.

`lacks` names an objective that is not reported. With several names, such as "width,speed", the
width selects one of them.
"""

from dataclasses import dataclass

import torch

from hpo import Float, Int, SearchSpace, maximize

space = SearchSpace(width=Int(1, 300, log=True), lr=Float(1e-4, 1.0, log=True, mutable=True))
objectives = ("loss", "width", maximize("speed"))


@dataclass(frozen=True)
class Settings:
    epochs: int = 3
    lacks: str = ""


def objective(params, worker, settings):
    names = settings.lacks.split(",")
    lacks = names[params["width"] % len(names)]
    for epoch in range(1, settings.epochs + 1):
        loss = params["width"] ** -0.5 + params["lr"] + abs(epoch - 2)
        worker.offer_weights({"width": torch.tensor(params["width"])})
        reported = {"width": params["width"], "speed": 10 * epoch / params["width"]}
        if worker.rank > 0:
            reported = {"width": 7}  # only the first rank's count
        elif lacks == "width":
            del reported["width"]
        elif lacks:
            reported["speed"] = float("nan")
        yield loss, reported
