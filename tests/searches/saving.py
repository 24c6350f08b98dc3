"""A search whose evaluations save checkpoints in the way of `saves`, and record their epochs.

Each loss depends on the whole state: weights, momentum, learning rate schedule, and two random
generators.
"""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpo import Float, SearchSpace
from hpo.store.tensors import write_file
from hpo.trainer import state_files

space = SearchSpace(x=Float(0.0, 1.0))


@dataclass(frozen=True)
class Settings:
    # Ways, divided by commas: the first for x < 0.1, the second for x < 0.2, and so on in turn.
    saves: str = "state"
    epochs: int = 6
    best: int = 99  # epochs after which losses rise
    seconds: float = 0.1  # that an epoch takes
    width: int = 5
    folder: str = ""


def prepare(settings):
    return torch.randn(40, settings.width, generator=torch.Generator().manual_seed(0))


class Training:
    def __init__(self, params, worker):
        self.inputs = worker.data
        self.network = nn.Linear(self.inputs.shape[1], 1)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.02 + 0.1 * params["x"])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.drawn, self.noise = (
            torch.Generator().manual_seed(worker.seed),
            np.random.default_rng(worker.seed),
        )
        self.history = []

    def epoch(self):
        for batch in torch.randperm(40, generator=self.drawn).split(8):
            self.optimizer.zero_grad()
            target = self.inputs[batch].sum(1, keepdim=True) + float(self.noise.normal(0.0, 0.1))
            nn.functional.mse_loss(self.network(self.inputs[batch]), target).backward()
            self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            self.history.append(
                nn.functional.mse_loss(self.network(self.inputs), self.inputs.sum(1, True)).item()
            )
        return self.history[-1]

    def state(self):
        return {
            "network": self.network.state_dict(),
            "rest": (
                self.optimizer.state_dict(),
                self.schedule.state_dict(),
                self.drawn.get_state(),
            ),
            "noise": self.noise.bit_generator.state,
            "history": self.history,
        }

    def load(self, state):
        self.network.load_state_dict(state["network"])
        optimizer, schedule, drawn = state["rest"]
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(schedule)
        self.drawn.set_state(drawn)
        self.noise.bit_generator.state = state["noise"]
        self.history = state["history"]


def sharded(state):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weights = {
        name: distribute_tensor(t.detach().clone(), mesh, [Shard(0)])
        for name, t in state["network"].items()
    }
    return {**state, "network": weights}


def failing(worker):
    if worker.rank == worker.size - 1:
        raise ValueError("injected: gathering")
    return {}


def kill_while_writing():
    """Kill this process when it has written half of its next file of tensors."""

    def write_half(path, *content, **options):
        write_file(path, *content, **options)
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    vars(state_files)["write_file"] = write_half


def save(way, training, worker):
    if way == "killed" and len(training.history) == 3:
        kill_while_writing()
    if way in ("state", "report", "killed", "first", "second") or (
        way == "leader" and worker.rank == 0
    ):
        worker.save_checkpoint(training.state())
    elif way == "function" or (way == "one function" and worker.rank == 1):
        worker.save_checkpoint(training.state)
    elif way == "sharded":
        worker.save_checkpoint(sharded(training.state()))
    elif way == "object":
        worker.save_checkpoint({"epoch": 1, "all": [1, training.optimizer]})
    elif way == "function of an object":
        worker.save_checkpoint(lambda: {"network": training.network})
    elif way == "failing function":
        worker.save_checkpoint(lambda: failing(worker))


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def objective(params, worker, settings):
    ways = settings.saves.split(",")
    way = ways[int(params["x"] * 10) % len(ways)]
    losses = trained(params, worker, settings, way)
    if way != "report":
        return losses
    for loss in losses:
        worker.report(loss)
    return None


def trained(params, worker, settings, way):
    training, folder = Training(params, worker), Path(settings.folder)
    if state := worker.checkpoint:
        training.load(state)
    while len(training.history) < settings.epochs:
        if way == "second":
            wait_for(folder / "first")
        time.sleep(settings.seconds)
        loss, epoch = training.epoch(), len(training.history)
        if settings.folder and worker.rank == 0:
            with Path(folder, "epochs").open("a") as file:
                file.write(json.dumps([worker.index, params["x"], epoch]) + "\n")
        worker.offer_weights(training.network.state_dict())
        save(way, training, worker)
        yield loss + 10 * max(0, epoch - settings.best)
        if way == "late" and worker.checkpoint:
            return
        if way == "first":  # it fails after the second one was paused
            Path(folder, "first").touch()
            wait_for(folder / "paused")
            raise ValueError("injected")
        # The checkpoint must hold the values before the yield.
        for parameter in training.network.parameters():
            with torch.no_grad():
                parameter.mul_(1.0)
