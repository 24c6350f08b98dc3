"""What hpo.training costs and gives: beside loops by hand, on two ranks beside one, and in memory.

    python benchmarks/training.py

(a) epochs of `fit` on one rank beside epochs of a loop by hand in the same process; (b) steps of a worker of two ranks
beside steps of a worker of one, and beside two workers of one at once, which is what the two cores give at all; (c) the
memory of a rank's parameters, gradients and optimizer state. What is compared is measured in turn, in one job, since
machines are noisy: each ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from hpo.trainer.worker import Worker
from hpo.training import Net, ParallelSettings, Recipe, fit, load_data, make_transformer, parallelize, resnet18
from hpo.training.fit import Training
from hpo.training.image_data import ImageDataset, LabelledImages
from hpo.training.parallel.strategy import split_by_size
from hpo.training.samples import Data
from hpo.training.text_data import TextDataset
from tests.programs.ranks import run_ranks

SEED = 1
PIPELINE = ParallelSettings("pipeline", microbatches=16)
WAYS = {"replicate": ParallelSettings(), "shard": ParallelSettings("shard"), "pipeline": PIPELINE}
EPOCHS = 1000  # more than are trained

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A network, its data, and how it is trained."""

    network: Callable[[], nn.Module]
    data: Callable[[], Data]
    recipe: Recipe


def small_net() -> nn.Module:
    """Return a network of search_spaces/digits_cnn.py."""
    return Net((1, 8, 8), 10, conv_layers=4, activation="relu")


def resnet() -> nn.Module:
    """Return the network of search_spaces/cifar10_resnet.py."""
    return resnet18((3, 32, 32), 10)


def language_model() -> nn.Module:
    """Return a network of search_spaces/text_transformer.py, with 3.2 million parameters."""
    return make_transformer(vocabulary=97, context=128, depth=4, width=256, heads=4, dropout=0.1)


def images() -> ImageDataset:
    """Return images of noise, 128 to train with and 64 to validate."""
    drawn = np.random.default_rng(SEED)
    parts = [
        LabelledImages(drawn.integers(0, 256, (n, 3, 32, 32), np.uint8), drawn.integers(0, 10, n)) for n in (128, 64)
    ]
    mean, deviation = np.full(3, 127.5, np.float32), np.full(3, 74.0, np.float32)
    return ImageDataset(parts[0], parts[1], tuple("0123456789"), mean, deviation)


def text() -> TextDataset:
    """Return pieces of 128 symbols at random, 128 to train with and 32 to validate."""
    drawn = np.random.default_rng(SEED)
    return TextDataset(drawn.integers(0, 97, (128, 129), np.uint8), drawn.integers(0, 97, (32, 129), np.uint8))


CASES = {
    "Net": Case(
        small_net,
        lambda: load_data("digits"),
        Recipe(EPOCHS, 32, lr=0.1, optimizer="adadelta", schedule="step", gamma=0.99),
    ),
    "ResNet-18": Case(resnet, images, Recipe(EPOCHS, 128, lr=0.02, weight_decay=5e-4, schedule="cosine")),
    "transformer": Case(
        language_model,
        text,
        Recipe(EPOCHS, 128, lr=1e-3, optimizer="adamw", weight_decay=0.01, schedule="cosine", clip=1.0),
    ),
}


def by_hand(case: Case) -> Iterator[tuple[float, float]]:
    """Train as `fit` does on one rank, in torch alone; yield the validation loss and accuracy after each epoch."""
    recipe, network = case.recipe, case.network()
    network.to(memory_format=torch.channels_last)
    train, validation = case.data().splits(torch.device("cpu"))
    optimizer, schedule = optimizer_by_hand(network, recipe, -(-len(train) // recipe.batch_size))
    drawn = torch.Generator().manual_seed(SEED)
    while True:
        network.train()
        for batch in split_by_size(torch.randperm(len(train), generator=drawn), recipe.batch_size):
            inputs, targets = train.get_batch(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs).flatten(0, -2), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            if recipe.clip:
                clip_grad_norm_(network.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
        network.eval()
        lost = right = 0.0
        with torch.no_grad():
            for batch in split_by_size(torch.arange(len(validation)), 256):
                inputs, targets = validation.get_batch(batch)
                outputs = network(inputs)
                lost += F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).item() * len(targets)
                right += (outputs.argmax(-1) == targets).float().mean().item() * len(targets)
        yield lost / len(validation), right / len(validation)


def optimizer_by_hand(network: nn.Module, recipe: Recipe, steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return the optimizer and the schedule of a recipe, for epochs of so many steps."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in network.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adadelta":
        adadelta = torch.optim.Adadelta(groups, lr=recipe.lr)
        return adadelta, StepLR(adadelta, steps, recipe.gamma)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=recipe.lr)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=True)
    return optimizer, CosineAnnealingLR(optimizer, EPOCHS * steps)


def beside_by_hand(case: Case, worker: Worker, rounds: int) -> Times:
    """Return the seconds of each epoch by hand, and of each of `fit`."""
    torch.manual_seed(SEED)
    hand = by_hand(case)
    expected, _ = next(hand)
    torch.manual_seed(SEED)
    ours = fit(case.network(), case.data(), worker, case.recipe)
    loss, _ = next(ours)
    # Dropout draws other numbers; without it, both compute the same.
    assert abs(loss - expected) < 0.05 * expected, f"a loss of {loss}, and by hand of {expected}"
    times: Times = {"by hand": [], "ours": []}
    for _ in range(rounds):
        times["by hand"].append(seconds_of(lambda: next(hand)))
        times["ours"].append(seconds_of(lambda: next(ours)))
    return times


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def together(case: Case, worker: Worker, rounds: int) -> Times:
    """Return the seconds of two steps of one rank, of two such ranks at once, and of both ranks in each way."""
    data = case.data().splits(worker.device)[0]
    alone = steps_of(case, data, replace(worker, rank=0, size=1), ParallelSettings())
    work = {"one rank": alone if worker.rank == 0 else lambda: None, "two at once": alone}
    # ResNet-18's stages would have statistics of microbatches.
    names = ["replicate"] if case.network is resnet else list(WAYS)
    work |= {name: steps_of(case, data, worker, WAYS[name]) for name in names}
    times: Times = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, steps in work.items():
            worker.comm.barrier()
            dist.barrier()
            seconds = max(worker.comm.allgather(seconds_of(steps)))
            if number:  # the first round warms up
                times[name].append(seconds)
    return times


def steps_of(case: Case, data: Any, worker: Worker, settings: ParallelSettings) -> Callable[[], None]:
    """Return a function that takes two training steps on the worker's ranks."""
    torch.manual_seed(SEED)
    training = Training(parallelize(case.network(), worker, settings), data, case.recipe, SEED)
    batch = torch.arange(case.recipe.batch_size)

    def steps() -> None:
        training.step(batch)
        training.step(batch)

    return steps


def memory(case: Case, worker: Worker, rounds: int) -> Times:  # noqa: ARG001 - bytes are no matter of chance
    """Return the bytes of the rank that has most in each way, those of a whole network, and what a part may have."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in case.network().children()]
    each = 4 * 4  # parameters, gradients, and AdamW's two, in 32 bits
    whole = each * sum(blocks)
    found: Times = {"whole": [whole], "bound": [whole / worker.size + each * max(blocks)]}
    data = case.data().splits(worker.device)[0]
    for name, settings in WAYS.items():
        training = Training(parallelize(case.network(), worker, settings), data, case.recipe, SEED)
        training.step(torch.arange(8))
        found[name] = [max(worker.comm.allgather(size_of(training)))]
    return found


def size_of(training: Training) -> int:
    """Return the bytes of this rank's parameters, their gradients, and the optimizer's state of them."""
    parameters = [p for _, p in training.strategy.named_parameters()]
    states = [t for p in parameters for t in training._optimizer.state[p].values() if torch.is_tensor(t) and t.dim()]
    tensors = [t for t in [*parameters, *(p.grad for p in parameters), *states] if t is not None]
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


PARTS = {"by-hand": beside_by_hand, "together": together, "memory": memory}


def measure(part: str, name: str, rounds: int, ranks: int) -> None:
    """Measure a part of a case on a worker of so many ranks, forked from this process; its leader prints JSON."""

    def run(worker: Worker) -> None:
        found = PARTS[part](CASES[name], worker, rounds)
        if worker.rank == 0:
            print(json.dumps(found), flush=True)

    run_ranks(ranks, run, SEED)  # type: ignore[no-untyped-call]


def measured(ranks: int, part: str, name: str, rounds: int) -> Times:
    """Return what `measure` measures on so many ranks."""
    command = [sys.executable, __file__, "--worker", part, name, "--rounds", str(rounds), "--ranks", str(ranks)]
    job = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    found: Times = json.loads(job.stdout)
    return found


def row(name: str, seconds: float, ratios: list[float]) -> None:
    """Print a line of a table: the name, a time, the median of ratios, and their range."""
    print(f"{name:<26}{seconds:>9.3f}{median(ratios):>8.2f}   {min(ratios):.2f} to {max(ratios):.2f}", flush=True)


def compare(rounds: int) -> None:
    """Print all tables."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores with a load of {load:.1f} from others, torch {torch.__version__}, {rounds} rounds")
    print("\n(a) one rank beside a loop by hand, an epoch: seconds by hand; times as long (goal: 1.03 at most)")
    for name in CASES:
        times = measured(1, "by-hand", name, 10 * rounds if name == "Net" else rounds)
        ratios = [ours / hand for ours, hand in zip(times["ours"], times["by hand"], strict=True)]
        row(name, median(times["by hand"]), ratios)
    print("\n(b) two ranks beside one: seconds of a step; samples per second, one rank's being 1 (goal: 1.8)")
    for name in ("ResNet-18", "transformer"):
        times = measured(2, "together", name, rounds)
        for way, seconds in times.items():
            batches = 2 if way == "two at once" else 1
            ratios = [batches * one / other for one, other in zip(times["one rank"], seconds, strict=True)]
            row(f"{name}, {way}", median(seconds) / 2, ratios)
    print("\n(c) the transformer's parameters, gradients and optimizer state: MB on the rank that has most (share)")
    for ranks in (2, 4):
        (whole,), (bound,), *sizes = measured(ranks, "memory", "transformer", rounds).values()
        parts = [f"{way} {size / 1e6:.1f} ({size / whole:.2f})" for way, (size,) in zip(WAYS, sizes, strict=True)]
        expected = f"1/{ranks} and the largest block {bound / 1e6:.1f} ({bound / whole:.2f})"
        print(f"{ranks} ranks: {', '.join(parts)}; {expected}", flush=True)


def main() -> None:
    """Print how all compare, or measure a part of it as one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often all that is compared is measured, in turn")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    if arguments.worker:
        part, name = arguments.worker
        measure(part, name, arguments.rounds, arguments.ranks)
    else:
        compare(arguments.rounds)


if __name__ == "__main__":
    main()
