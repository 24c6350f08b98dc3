"""Train networks with each parallel strategy on a worker, and with a plain loop.

Rank 0 prints a line of JSON. The first argument is the number of ranks. The second argument is a
list of functions below, separated by commas. Each of them compares losses, states or parameters.
"""

import itertools
import math
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training import size_of
from hpo.trainer.worker import Worker
from hpo.training import (
    DropoutMasks,
    ParallelSettings,
    SharedGradScaler,
    augment_images,
    decay_weights,
    gather_state,
    gather_weights,
    load_state,
    make_mesh,
)
from search_spaces import cifar10_resnet
from tests.programs.ranks import run_ranks
from tests.programs.tell import tell
from tests.searches.shared_training import SharedTraining

# Nothing divides by 2, 3 or 4; the last batch of an epoch has one sample more than none.
EPOCHS, BATCH, TRAIN, VALIDATION, SEED = 2, 21, 43, 25, 5
worker: Worker  # of this rank
told: dict[str, list[float]] = {}


class Numbers:
    """Random samples that can be learnt: three classes of images, or pieces of text."""

    def __init__(self, count: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
        drawn = torch.Generator().manual_seed(seed)
        if len(shape) == 1:
            text = torch.randint(0, 7, (count, shape[0] + 1), generator=drawn).cumsum(1) % 11
            self.inputs, self.targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        else:
            self.targets = torch.randint(0, 3, (count,), generator=drawn)
            self.inputs = torch.randn(count, *shape, generator=drawn) + self.targets.view(
                -1, 1, 1, 1
            )
            self.inputs = self.inputs.to(dtype)

    def __len__(self) -> int:
        return len(self.targets)

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[indices], self.targets[indices]


class TextbookDropout(nn.Module):
    """Dropout whose masks are drawn for whole batches, step by step, as in a single process."""

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self.layer, self.step = p, layer, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return inputs
        draws = DropoutMasks(SEED)
        draws.begin_forward(self.step, torch.arange(len(inputs)), inputs.device)
        self.step += 1
        return inputs * draws.draw_mask(self.layer, inputs.shape, self.p) / (1 - self.p)


def dropout(p: float, layer: int, textbook: bool) -> nn.Module:
    return TextbookDropout(p, layer) if textbook else nn.Dropout(p)


class Residual(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + F.relu(self.norm(self.conv(inputs)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)

    def forward(self, inputs):
        return self.words(inputs)


class Block(nn.Module):
    def __init__(self, layer: int, textbook: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = dropout(0.2, layer, textbook)
        self.more = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(seen))
        return x + self.more(x)


def convolutional(norm: bool, dropped: bool, textbook: bool = False) -> nn.Sequential:
    torch.manual_seed(SEED)
    body = nn.Sequential(Residual(6, norm), Residual(6, norm))
    drop = [dropout(0.3, 0, textbook)] if dropped else []
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), body, *drop, nn.Flatten(), nn.Linear(96, 3))


def transformer(textbook: bool = False) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        Words(), *(Block(layer, textbook) for layer in range(3)), nn.Linear(16, 11)
    )


NETWORKS = {
    "conv": lambda textbook: convolutional(False, False, textbook),
    "conv-norm": lambda textbook: convolutional(True, False, textbook),
    "conv-dropout": lambda textbook: convolutional(False, True, textbook),
    "conv-norm-dropout": lambda textbook: convolutional(True, True, textbook),
    "transformer": transformer,
}


@dataclass(frozen=True)
class Recipe:
    """The optimizer and schedule of a training, and how it changes samples and gradients."""

    lr: float
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    schedule: str = "constant"
    gamma: float = 1.0
    warmup: float = 0.0
    clip: float = 0.0
    label_smoothing: float = 0.0
    augmentation: str = "none"
    epochs: int = EPOCHS


RECIPE = Recipe(lr=0.02, clip=0.5, weight_decay=0.01, schedule="cosine", warmup=0.2)
RECIPES = {
    "conv": replace(RECIPE, augmentation="crop-and-flip"),
    "conv-norm": replace(RECIPE, schedule="step", gamma=0.5, clip=0.0),
    "conv-dropout": replace(RECIPE, optimizer="adadelta", lr=0.5, schedule="constant"),
    "conv-norm-dropout": RECIPE,
    "transformer": replace(
        RECIPE, optimizer="adamw", schedule="one-cycle", warmup=0.3, label_smoothing=0.1
    ),
}


def data_of(name: str) -> tuple[Numbers, Numbers]:
    shape = (9,) if name == "transformer" else (2, 6, 6)
    dtype = torch.float64 if name == "resnet" else torch.float32
    # A batch of one image is one value in its last layers.
    train = 3 * BATCH if name == "resnet" else TRAIN
    return Numbers(train, shape, 1, dtype), Numbers(VALIDATION, shape, 2, dtype)


def textbook(
    name: str, accumulate: int = 1, epochs: int = EPOCHS
) -> tuple[list[float], list[float]]:
    """Train with a plain loop on the first rank.

    Return the losses of all steps, and the validation losses, on all ranks.
    """
    trained_alone = train_alone(name, accumulate, epochs) if worker.rank == 0 else None
    losses: tuple[list[float], list[float]] = worker.comm.bcast(trained_alone)
    return losses


def train_alone(name: str, accumulate: int, epochs: int) -> tuple[list[float], list[float]]:
    net, recipe, (train, validation) = NETWORKS[name](True), RECIPES[name], data_of(name)
    groups = decay_weights(net, recipe.weight_decay)
    optimizer, schedule = optimizer_by_hand(recipe, groups, epochs, math.ceil(len(train) / BATCH))
    drawn = torch.Generator().manual_seed(SEED)
    losses, validated = [], []
    for _ in range(epochs):
        net.train()
        for batch in torch.randperm(len(train), generator=drawn).split(BATCH):
            inputs, targets = train.get_batch(batch)
            if recipe.augmentation != "none":
                inputs = augment_images(
                    inputs, torch.rand(len(batch), 3, generator=drawn), recipe.augmentation
                )
            optimizer.zero_grad()
            total = 0.0
            size = -(-len(batch) // accumulate)
            for part, wanted in zip(inputs.split(size), targets.split(size), strict=True):
                outputs = net(part).flatten(0, -2)
                loss = F.cross_entropy(
                    outputs, wanted.flatten(), label_smoothing=recipe.label_smoothing
                )
                loss = loss * len(part) / len(batch)
                loss.backward()
                total += loss.item()
            if recipe.clip:
                nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            losses.append(total)
        net.eval()
        with torch.no_grad():
            inputs, targets = validation.get_batch(torch.arange(VALIDATION))
            validated.append(F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten()).item())
    return losses, validated


def optimizer_by_hand(recipe, groups, epochs, steps_per_epoch):
    steps = epochs * steps_per_epoch
    optimizer = {
        "sgd": lambda: torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(groups, lr=recipe.lr),
        "adadelta": lambda: torch.optim.Adadelta(groups, lr=recipe.lr),
    }[recipe.optimizer]()
    schedulers = torch.optim.lr_scheduler
    if recipe.schedule == "cosine":
        rise = round(recipe.warmup * steps)
        warmup = schedulers.LinearLR(optimizer, 1 / (rise + 1), total_iters=rise)
        cosine = schedulers.CosineAnnealingLR(optimizer, steps - rise)
        return optimizer, schedulers.SequentialLR(optimizer, [warmup, cosine], [rise])
    if recipe.schedule == "one-cycle":
        return optimizer, schedulers.OneCycleLR(
            optimizer, recipe.lr, steps, pct_start=recipe.warmup, cycle_momentum=False
        )
    if recipe.schedule == "step":
        return optimizer, schedulers.StepLR(optimizer, steps_per_epoch, recipe.gamma)
    return optimizer, schedulers.ConstantLR(optimizer, 1.0)


def start(name: str, settings: ParallelSettings) -> tuple[SharedTraining, Any]:
    """Return a training, and the schedule of its learning rate."""
    recipe, data, schedules = RECIPES[name], data_of(name), []

    def make_optimizer(model):
        groups = decay_weights(model, recipe.weight_decay)
        optimizer, schedule = optimizer_by_hand(
            recipe, groups, recipe.epochs, math.ceil(len(data[0]) / BATCH)
        )
        schedules.append(schedule)
        return optimizer

    training = SharedTraining(NETWORKS[name](False), data, worker, settings, make_optimizer, BATCH)
    training.smoothing, training.clip = recipe.label_smoothing, recipe.clip
    training.augmentation = recipe.augmentation
    return training, schedules[0]


def trained(
    name: str, settings: ParallelSettings
) -> tuple[list[float], list[float], SharedTraining]:
    """Train on all ranks of the worker.

    Return the losses of all steps, the validation losses, and the training.
    """
    training, schedule = start(name, settings)
    losses, validated = [], []
    for _ in range(RECIPES[name].epochs):
        for batch in training.iterate_batches():
            part = training.step(batch)
            schedule.step()
            dist.all_reduce(part)
            losses.append(part.item())
        validated.append(training.validate()[0])
    return losses, validated, training


def difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(
        abs(a - b) / abs(b) if math.isfinite(a) else math.inf
        for a, b in zip(one, other, strict=True)
    )


def ways(name: str) -> list[ParallelSettings]:
    """Return settings with which a network has the losses of a plain loop over whole batches."""
    found = [ParallelSettings(parallel) for parallel in ("replicate", "shard", "pipeline")]
    if "norm" not in name:  # statistics of a part of a batch are others
        found += [
            ParallelSettings(parallel, accumulate=3)
            for parallel in ("replicate", "shard", "pipeline")
        ]
        found += [
            ParallelSettings("pipeline", microbatches=4),
            ParallelSettings("pipeline", "float32", 2, 3),
        ]
    return found


def plain() -> None:
    for name in NETWORKS:
        expected, validated = textbook(name)
        for settings in ways(name):
            got, also, _ = trained(name, settings)
            told[f"{name} {settings}"] = [difference(got, expected), difference(also, validated)]
    for parallel in ("replicate", "shard"):
        expected, validated = textbook("conv-norm", accumulate=3)
        got, also, _ = trained("conv-norm", ParallelSettings(parallel, accumulate=3))
        told[f"parts {parallel}"] = [difference(got, expected), difference(also, validated)]
    expected, validated = textbook("conv-norm", accumulate=3)
    got, also, _ = trained("conv-norm", ParallelSettings("pipeline", microbatches=3))
    told["parts pipeline"] = [difference(got, expected), difference(also, validated)]


def several() -> None:
    """Compare the losses with those of a plain loop, if each rank has two devices.

    Report the number of parts of a stage.
    """
    devices, worker.devices = worker.devices, worker.devices * 2
    for name, settings in itertools.product(
        ("conv-dropout", "transformer"),
        (ParallelSettings("pipeline"), ParallelSettings("pipeline", microbatches=3)),
    ):
        expected, validated = textbook(name)
        got, also, training = trained(name, settings)
        told[f"{name} {settings}"] = [difference(got, expected), difference(also, validated)]
    # On the leader.
    told["whole"] = [len(gather_weights(training.model)), len(NETWORKS[name](False).state_dict())]
    told["parts"] = worker.comm.allgather(len(training.model.stage.parts))
    worker.devices = devices


def exact() -> None:
    """Compare the losses of ResNet-18 with those of a plain loop, in float64.

    In float32, the losses depend on the order of a batch's samples: after five steps, they differ
    in the second digit. One epoch has three steps. The third step depends on the momentum and on
    the batch statistics of the first two.
    """
    NETWORKS["resnet"], RECIPES["resnet"] = resnet, replace(RECIPE, weight_decay=5e-4, epochs=1)
    expected, validated = textbook("resnet", epochs=1)
    for parallel in ("replicate", "shard", "pipeline"):
        got, also, _ = trained("resnet", ParallelSettings(parallel))
        told[parallel] = [difference(got, expected), difference(also, validated)]


def resnet(textbook: bool) -> nn.Sequential:  # noqa: ARG001 - it has no dropout
    torch.manual_seed(SEED)
    data: Any = SimpleNamespace(num_classes=3, image_shape=(2, 6, 6))
    return cifar10_resnet.build_network(data).double()


def mixed() -> None:
    before = RECIPES["conv-norm"]
    RECIPES["conv-norm"] = replace(RECIPE, lr=0.004)  # larger steps on so few samples are chaotic
    for name, precision in itertools.product(("conv-norm", "transformer"), ("bfloat16", "float16")):
        expected, validated = textbook(name)
        for parallel in ("replicate", "shard", "pipeline"):
            got, also, _ = trained(name, ParallelSettings(parallel, precision))
            told[f"{name} {parallel} {precision}"] = [
                difference(got, expected),
                difference(also, validated),
            ]
    RECIPES["conv-norm"] = before


def state() -> None:
    """Report the losses after loading the whole state, and the size of a part."""
    for name, parallel in itertools.product(
        ("conv-norm", "transformer"), ("replicate", "shard", "pipeline")
    ):
        settings = ParallelSettings(parallel)
        _, validated, training = trained(name, settings)
        whole = worker.comm.bcast(gather_state(training.model, training.optimizer))
        plain, validation = NETWORKS[name](False), data_of(name)[1]
        plain.load_state_dict(whole["network"])
        inputs, targets = validation.get_batch(torch.arange(VALIDATION))
        with torch.no_grad():
            loss = F.cross_entropy(plain.eval()(inputs).flatten(0, -2), targets.flatten()).item()
        again, _ = start(name, settings)
        load_state(again.model, again.optimizer, whole)
        told[f"{name} {parallel}"] = [loss, again.validate()[0], validated[-1]]
        ours = worker.comm.allgather(size_of(training))
        blocks = [sum(p.numel() for p in block.parameters()) for block in plain]
        # Parameters, gradients and AdamW's or momentum's state, of four bytes each.
        each = 4 if name == "transformer" else 3
        told[f"size {name} {parallel}"] = [
            max(ours),
            4 * each * sum(blocks),
            4 * each * max(blocks),
        ]


def root() -> None:
    """Report how much state is gathered if only the whole network is sharded."""
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fully_shard(network, mesh=make_mesh(worker))
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        network.eval()(torch.ones(2, 4))  # It leaves the parameters gathered.
    told["sizes"] = [
        value.numel() for value in gather_state(network, optimizer)["optimizer"].values()
    ]


def plain_values() -> None:
    """Report the number of steps, an int, after a state was gathered and loaded."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    whole = worker.comm.bcast(gather_state(model, optimizer))
    again = torch.optim.LBFGS(model.parameters())
    load_state(model, again, whole)
    told["steps"] = [
        state["n_iter"] for made in (optimizer, again) for state in made.state.values() if state
    ]


def scaler() -> None:
    """Report a parameter on each rank after two steps.

    In the first step, the last rank has an infinite gradient.
    """
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = (
        torch.optim.SGD([parameter], lr=1.0),
        SharedGradScaler(torch.device("cpu"), "float16"),
    )
    for gradient in (math.inf if worker.rank == worker.size - 1 else 512.0, 512.0):
        parameter.grad = torch.full((3,), gradient)
        scaler.step(optimizer)
        scaler.update()
        told[f"after {len(told)}"] = worker.comm.allgather(parameter[0].item())


def run(joined: Worker) -> None:
    """Run the chosen functions as one rank of a worker."""
    global worker
    worker = joined
    results = {}
    for name in sys.argv[2].split(","):
        told.clear()
        globals()[name]()
        results[name] = dict(told)
    if worker.rank == 0:
        tell(**results)


run_ranks(int(sys.argv[1]), run, SEED)
