"""A search with one usual mistake, which `way` selects, written as users make it.

By default it has no mistake.
"""

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hpo import Categorical, Float, Int, SearchSpace

space = SearchSpace(
    width=Int(8, 24), lr=Float(1e-3, 1.0, log=True), act=Categorical("tanh", "relu")
)
TRAIN = 200
ALONE = ("weights by rank", "uneven")  # ways in which each rank trains a network of its own
SAVING = ("saves", "no optimizer", "saved late", "not restored", "saved model")
kept: list[nn.Module] = []


@dataclass(frozen=True)
class Settings:
    way: str = "none"
    epochs: int = 2
    batch: int = 20


class Samples(Dataset[object]):
    """A data set that is defined in the search file.

    Loader processes that are not forked cannot import it.
    """

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return torch.full((8,), place / self.count), place % 4


class Network(nn.Module):
    def __init__(self, width, way):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.normal = nn.BatchNorm1d(width) if way == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.3 if way == "dropout" else 0.0)
        self.last = nn.Linear(width, 4)
        if way in ("unused", "idle"):
            self.aside = nn.Linear(width, 4)

    def forward(self, inputs):
        return self.last(self.drop(self.normal(self.first(inputs).tanh())))


def prepare(settings):
    if settings.way == "path in prepare":
        Path("data/train.csv").read_text()
    chance = torch.Generator().manual_seed(7)
    inputs = torch.randn(TRAIN + 80, 8, generator=chance)
    return inputs, (inputs[:, :4] + 0.3 * torch.randn(TRAIN + 80, 4, generator=chance)).argmax(
        dim=1
    )


def load(way):
    """Load one batch in a separate process."""
    context = None if way == "fork" else "forkserver"
    return next(iter(DataLoader(Samples(40), 4, num_workers=1, multiprocessing_context=context)))


def early(way, worker):
    """Make the mistake, if it belongs before the network is made."""
    if way == "torchrun":
        int(os.environ["RANK"])
    elif way == "init":
        dist.init_process_group("gloo")
    elif way == "path":
        Path("data/train.csv").read_text()
    elif way in ("fork", "dataset in file"):
        load(way)
    elif way == "rank 0 alone" and worker.rank == 0:
        dist.barrier()
    elif way == "slow":
        time.sleep(100)
    elif way == "weights by rank":
        torch.manual_seed(worker.rank)


def network_of(params, way):
    if way == "global network":
        kept[:] = kept or [Network(params["width"], way)]
        return kept[0]
    return Network(params["width"], way)


def order_of(way, worker, epoch):
    if way in ("order", "no share or order"):
        return torch.randperm(
            TRAIN, generator=torch.Generator().manual_seed(100 * epoch + worker.rank)
        )
    if way == "unseeded":
        return torch.randperm(
            TRAIN, generator=torch.Generator().manual_seed(torch.Generator().seed())
        )
    return torch.randperm(TRAIN, generator=torch.Generator().manual_seed(worker.seed + epoch))


def batches(way, worker, epoch, size):
    """Yield this rank's share of each batch, and the size of the whole batch."""
    size = size * worker.size if way == "growing batch" else size
    if way == "drawn":
        chance = torch.Generator().manual_seed(10 * epoch + worker.rank)
        for _ in range(TRAIN // size):
            yield torch.randint(TRAIN, (size // worker.size,), generator=chance), size
        return
    for number, batch in enumerate(order_of(way, worker, epoch).split(size)):
        if way in ("unequal steps", "uneven") and epoch == 1 and number >= 5 and worker.rank == 1:
            return
        yield batch if way.startswith("no share") else batch[worker.rank :: worker.size], len(batch)


def step_loss(way, worker, outputs, labels, whole):
    if way == "mean of means" or way.startswith("no share"):
        return cross_entropy(outputs, labels)
    scale = 1 if way == "scale" else worker.size
    return cross_entropy(outputs, labels, reduction="sum") * scale / whole


def validated(way, worker, network, inputs, labels):
    """Return the validation loss of all samples.

    With some mistakes, it is the loss of this rank's share, or another value.
    """
    network.eval()
    ours = range(worker.rank, len(labels), worker.size)
    with torch.no_grad():
        total = cross_entropy(network(inputs[ours]), labels[ours], reduction="sum")
    if way == "own loss":
        return total.item() / len(ours)
    dist.all_reduce(total)
    if way == "wrong mean":
        return total.item() / len(ours)
    if way == "nan":
        return float("nan")
    return total.item() / len(labels)


def state_of(way, model, network, optimizer, epochs):
    state = {"network": (model if way == "saved model" else network).state_dict(), "epochs": epochs}
    return state if way == "no optimizer" else {**state, "optimizer": optimizer.state_dict()}


def restored(way, worker, network, optimizer):
    """Load the checkpoint of an interrupted evaluation if there is one.

    Return its number of epochs, or 0.
    """
    if way not in SAVING or way == "not restored" or worker.checkpoint is None:
        return 0
    network.load_state_dict(worker.checkpoint["network"])
    if way != "no optimizer":
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    return worker.checkpoint["epochs"]


def objective(params, worker, settings):
    way = settings.way
    checkpoint = Path(f"losses-{worker.size}")
    if way == "checkpoint" and checkpoint.exists():
        return json.loads(checkpoint.read_text())
    return trained(params, worker, settings, checkpoint) if way != "returned" else returned()


def returned():
    return 0.5
    yield


def trained(params, worker, settings, checkpoint):
    way = settings.way
    early(way, worker)
    inputs, labels = worker.data
    network = network_of(params, way)
    model = (
        network
        if way in ALONE
        else DistributedDataParallel(network, find_unused_parameters=way == "idle")
    )
    optimizer = torch.optim.SGD(
        network.parameters(), lr=params["lr"], momentum=0.9 if way in SAVING else 0.0
    )
    done = restored(way, worker, network, optimizer)
    for epoch in (
        itertools.count()
        if way == "early stopping"
        else range(done, settings.epochs + (way == "epochs") * worker.rank)
    ):
        network.train()
        for batch, whole in batches(way, worker, epoch, settings.batch):
            optimizer.zero_grad()
            given = (
                inputs[batch] * (torch.rand(len(batch), 1) + 0.5)
                if way == "augmented"
                else inputs[batch]
            )
            outputs = (network if way == "unwrapped call" else model)(given)
            step_loss(way, worker, outputs, labels[batch], whole).backward()
            optimizer.step()
        loss = validated(way, worker, network, inputs[TRAIN:], labels[TRAIN:])
        if way != "no offer":
            worker.offer_weights(model.state_dict() if way == "prefix" else network.state_dict())
        if way in SAVING and way != "saved late":
            worker.save_checkpoint(state_of(way, model, network, optimizer, epoch + 1))
        if way == "checkpoint" and worker.rank == 0:
            checkpoint.write_text(json.dumps(loss))
        yield None if way == "none elsewhere" and worker.rank else loss
        if way == "saved late":
            worker.save_checkpoint(state_of(way, model, network, optimizer, epoch + 1))
        if way == "early stopping" and worker.rank == 1 and epoch == 1:
            return


def test(params, weights, settings):
    if settings.way == "test":
        return {"accuracy": weights["missing"].mean()}
    network = Network(params["width"], settings.way)
    if settings.way != "prefix":
        network.load_state_dict(weights)
    return {"accuracy": 0.5}
