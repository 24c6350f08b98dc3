"""A realistic search space: an ordinal, a stepped range, conditions and constraints.

The lowest loss is 0, with sgd, a momentum of 0.8, a width of 96, a batch size of 64, and 3 layers
with a dropout of 0.2.
"""

import math

from hpo import Categorical, Float, Int, Ordinal, SearchSpace

space = SearchSpace(
    optimizer=Categorical("sgd", "adam"),
    momentum=Float(0.0, 0.95, step=0.05, when={"optimizer": "sgd"}),
    nesterov=Categorical(True, False, when={"optimizer": "sgd"}),
    nesterov_from=Int(1, 100, log=True, when={"nesterov": True}),
    beta=Float(0.9, 0.999, when={"optimizer": {"adam"}}),
    batch_size=Ordinal(16, 32, 64, 128),
    heads=Int(1, 16, log=True),
    width=Int(16, 256, step=16),
    layers=Int(1, 4),
    **{
        f"dropout_{layer}": Float(0.0, 0.5, when={"layers": range(layer, 5)})
        for layer in (1, 2, 3, 4)
    },
)
space.require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width")
space.require(
    lambda p: p["nesterov_from"] < 50 or p["momentum"] > 0.5, "what begins late needs momentum"
)


def objective(params, _):
    assert params["width"] % params["heads"] == 0
    is_sgd = params["optimizer"] == "sgd"
    assert ("momentum" in params, "beta" in params) == (is_sgd, not is_sgd)
    assert ("nesterov_from" in params) == params.get("nesterov", False)
    assert len([name for name in params if name.startswith("dropout")]) == params["layers"]
    loss = abs(params.pop("momentum") - 0.8) if is_sgd else 0.5
    loss += (
        abs(params["width"] - 96) / 96
        + abs(math.log2(params["batch_size"] / 64))
        + abs(params["layers"] - 3)
    )
    loss += sum(abs(value - 0.2) for name, value in params.items() if name.startswith("dropout"))
    for epoch in range(2):
        yield loss + 1 - epoch
