"""Trains with DistributedDataParallel, then compiles a model: the compiler is imported then, and works."""

import sys

import torch

from hpo.evaluation.group import Group
from hpo.evaluation.host import Host
from hpo.ranks.communicator import same_host, world
from hpo.training import Net, Recipe, fit, load_data
from tests.programs.tell import tell


def imported():
    return "torch._dynamo.eval_frame" in sys.modules


data = load_data("digits", train_samples=64, validation_samples=10)
with Host(same_host(world())) as host, Group(world(), host, index=0, collective_timeout=60.0) as group:
    group.connect()
    net = Net(data.image_shape, data.classes, conv_layers=1, activation="relu")
    list(fit(net, data, group.worker(seed=0), Recipe(epochs=1, batch_size=32, lr=0.1)))
    after_training = imported()
    compiled = torch.compile(net, backend="eager")
    images = torch.rand(3, *data.image_shape)
    difference = (compiled(images) - net(images)).abs().max().item()
    optimizer = torch.optim.AdamW(net.parameters())
    compiled(images).sum().backward()
    optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
tell(rank=world().rank, after_training=after_training, after_compiling=imported(), graphs=graphs, difference=difference)
