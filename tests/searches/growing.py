"""A search whose losses do not depend on the number of ranks. More ranks make evaluations faster, or slower on request.

On one rank, an epoch takes `seconds` times x. Each loss depends on the whole state.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0), lr=Float(0.01, 0.1))


@dataclass(frozen=True)
class Settings:
    epochs: int = 12
    seconds: float = 0.4
    batch_size: int = 32
    most_ranks: int = 64  # more fail
    fails_after: int = 0  # After this number of epochs.
    scales: bool = True  # else more ranks take longer
    saves: bool = True
    restores: bool = True
    folder: str = ""  # for a note of each epoch


def prepare(_):
    return torch.randn(128, 8, generator=torch.Generator().manual_seed(1))


def objective(params, worker, settings):
    inputs, targets = worker.data, worker.data.sum(1, keepdim=True)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    drawn, begin = torch.Generator().manual_seed(worker.seed), 0
    if settings.restores and (state := worker.checkpoint):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        drawn.set_state(state["drawn"])
        begin = state["epochs"]
    for epoch in range(begin, settings.epochs):
        if worker.size > settings.most_ranks and epoch >= settings.fails_after:
            raise ValueError(f"injected: no batch of {settings.batch_size} for {worker.size} ranks")
        time.sleep(settings.seconds * params["x"] * (1 / worker.size if settings.scales else worker.size))
        for batch in torch.randperm(len(inputs), generator=drawn).split(settings.batch_size):
            mine = batch[worker.rank :: worker.size]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model.module(inputs), targets).item()
        if settings.folder:
            with Path(settings.folder, "epochs").open("a") as file:
                file.write(json.dumps([worker.index, worker.rank, worker.size, params["x"], epoch + 1]) + "\n")
        if settings.saves:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drawn": drawn.get_state()}
            worker.save_checkpoint({**parts, "epochs": epoch + 1})
        worker.offer_weights(model.module.state_dict())
        yield loss
