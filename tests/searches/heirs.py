"""A search with population based training.

Individuals inherit a number, and hyperparameters change it in each epoch. `asks` selects what an
evaluation does with the number: use, ignore, fail or diverge. `saves` selects if it is saved. With
"uneven", rank 1 fails before it reads the number, from the seventh evaluation of its worker on.
"""

import time
from dataclasses import dataclass

from hpo import Categorical, Float, Int, SearchSpace
from tests.searches.counting import count

space = SearchSpace(
    kind=Int(1, 2),
    lr=Float(0.01, 1.0, log=True, mutable=True),
    decays=Categorical(False, True, mutable=True),
    decay=Float(0.9, 0.99, mutable=True, when={"decays": True}),
)


@dataclass(frozen=True)
class Settings:
    asks: str = "use"
    saves: bool = True
    epochs: int = 3
    seconds: float = 0.0
    folder: str = "."


def objective(params, worker, settings):
    if (
        settings.asks == "uneven"
        and worker.rank == 1
        and count(params, worker, settings.folder) >= 6
    ):
        raise KeyError("injected")
    state = worker.checkpoint
    if state is None and settings.asks != "ignore":
        state = worker.parent_checkpoint
        if state and settings.asks == "fail":
            raise KeyError("injected")
        if state and settings.asks == "diverge":
            yield float("nan")
        state = {**state, "epoch": 0} if state else None
    state = state or {"x": 10.0, "epoch": 0}
    while state["epoch"] < settings.epochs:
        time.sleep(settings.seconds)
        factor = params.get("decay", 1.0) * (1 - 0.1 * params["lr"])
        state = {"x": state["x"] * factor, "epoch": state["epoch"] + 1}
        if settings.saves:
            worker.save_checkpoint(state)
        yield state["x"] + params["kind"]
