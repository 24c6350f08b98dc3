"""A search of six individuals. One of them fails."""

from hpo import Categorical, Int, SearchSpace

space = SearchSpace(depth=Int(1, 3), act=Categorical("relu", "tanh"))


def objective(params, worker):  # noqa: ARG001
    if params == {"depth": 2, "act": "tanh"}:
        raise ValueError("injected")
    return params["depth"] + (params["act"] == "tanh") / 2
