"""A search of two individuals.

One has a low loss only with seed 0, and the other has good losses with all seeds. The saved network
is the seed. While a file "wait" exists, `test` waits, and makes a file "testing".
"""

import time
from pathlib import Path

import torch

from hpo import Categorical, SearchSpace

space = SearchSpace(kind=Categorical("lucky", "steady"))


def objective(params, worker):
    spread = worker.seed % 1000 / 1e4
    usual = {"lucky": 0.9, "steady": 0.5}[params["kind"]] + spread
    worker.offer_weights({"seed": torch.tensor([worker.seed])})
    yield 0.1 if params["kind"] == "lucky" and worker.seed == 0 else usual


def test(_, weights):
    while Path("wait").exists():
        Path("testing").touch()
        time.sleep(0.05)
    return {"seed": weights["seed"].item()}
