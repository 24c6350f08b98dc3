"""Measure the time, speedup and memory of trainings whose ranks share a network.

They share it as in search_spaces/cifar10_resnet.py.

    python benchmarks/training.py

(a) The time of an epoch on one rank, compared with a plain training loop in the same
process. (b) The time of a training step on a worker of two ranks. For comparison, a step is timed
on one rank, and on two ranks that train separately at the same time. (c) The memory of a rank's
parameters, gradients and optimizer state. Variants alternate in one job. Each ratio is the median
over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hpo.trainer.worker import Worker
from hpo.training import (
    ImageDataset,
    LabelledImages,
    ParallelSettings,
    TextDataset,
    decay_weights,
    load_data,
    make_transformer,
)
from search_spaces.cifar10_resnet import build_network
from search_spaces.digits_cnn import Net
from tests.programs.ranks import run_ranks
from tests.searches.shared_training import SharedTraining

SEED = 1
PIPELINE = ParallelSettings("pipeline", microbatches=16)
WAYS = {"replicate": ParallelSettings(), "shard": ParallelSettings("shard"), "pipeline": PIPELINE}

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A network, its data, its optimizer, and how many samples a step has."""

    network: Callable[[], nn.Module]
    data: Callable[[], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    clip: float = 0.0

    def make_training(self, worker: Worker, settings: ParallelSettings) -> Any:
        """Return a training whose ranks share the network."""
        torch.manual_seed(SEED)
        data = self.data().splits(worker.device)
        training = SharedTraining(
            self.network(), data, worker, settings, self.optimizer, self.batch_size
        )  # type: ignore[no-untyped-call]
        training.clip = self.clip
        return training


def make_small_net() -> nn.Module:
    """Return a small network of search_spaces/digits_cnn.py."""
    return Net(conv_layers=4, activation="relu")


def make_resnet() -> nn.Module:
    """Make the network of search_spaces/cifar10_resnet.py."""
    return build_network(make_images())


def make_language_model() -> nn.Module:
    """Make a network of search_spaces/text_transformer.py, with 3.2 million parameters."""
    return make_transformer(vocabulary=97, context=128, depth=4, width=256, heads=4, dropout=0.1)


def make_images() -> ImageDataset:
    """Return random images: 128 for training, 64 for validation."""
    drawn = np.random.default_rng(SEED)
    parts = [
        LabelledImages(drawn.integers(0, 256, (n, 3, 32, 32), np.uint8), drawn.integers(0, 10, n))
        for n in (128, 64)
    ]
    mean, deviation = np.full(3, 127.5, np.float32), np.full(3, 74.0, np.float32)
    return ImageDataset(parts[0], parts[1], tuple("0123456789"), mean, deviation)


def make_text() -> TextDataset:
    """Return random texts of 128 symbols: 128 for training, 32 for validation."""
    drawn = np.random.default_rng(SEED)
    return TextDataset(
        drawn.integers(0, 97, (128, 129), np.uint8), drawn.integers(0, 97, (32, 129), np.uint8)
    )


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of ResNet-18."""
    return torch.optim.SGD(decay_weights(model, 5e-4), lr=0.02, momentum=0.9, nesterov=True)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of the transformer."""
    return torch.optim.AdamW(decay_weights(model, 0.01), lr=1e-3, fused=True)


CASES = {
    "Net": Case(
        make_small_net,
        lambda: load_data("digits"),
        lambda model: torch.optim.Adadelta(model.parameters(), 0.1),
        32,
    ),
    "ResNet-18": Case(make_resnet, make_images, make_sgd, 128),
    "transformer": Case(make_language_model, make_text, make_adamw, 128, clip=1.0),
}


def train_by_hand(case: Case) -> Iterator[float]:
    """Train on one rank with torch alone. Yield the validation loss after each epoch."""
    network = case.network()
    network.to(memory_format=torch.channels_last)
    train, validation = case.data().splits(torch.device("cpu"))
    optimizer = case.optimizer(network)
    drawn = torch.Generator().manual_seed(SEED)
    while True:
        network.train()
        for batch in torch.randperm(len(train), generator=drawn).split(case.batch_size):  # type: ignore[no-untyped-call]
            inputs, targets = train.get_batch(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs).flatten(0, -2), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            if case.clip:
                clip_grad_norm_(network.parameters(), case.clip)
            optimizer.step()
        network.eval()
        lost = 0.0
        with torch.no_grad():
            for batch in torch.arange(len(validation)).split(256):  # type: ignore[no-untyped-call]
                inputs, targets = validation.get_batch(batch)
                lost += F.cross_entropy(
                    network(inputs).flatten(0, -2), targets.flatten()
                ).item() * len(targets)
        yield lost / len(validation)


def train_shared(training: Any) -> Iterator[float]:
    """Train with the functions of `hpo.training`. Yield the validation loss after each epoch."""
    while True:
        for batch in training.iterate_batches():
            training.step(batch)
        yield training.validate()[0]


def compare_with_loop(case: Case, worker: Worker, rounds: int) -> Times:
    """Return the seconds of each epoch of a plain loop, and of a loop with `hpo.training`."""
    torch.manual_seed(SEED)
    hand = train_by_hand(case)
    expected = next(hand)
    ours = train_shared(case.make_training(worker, ParallelSettings()))
    loss = next(ours)
    # Only the random numbers of dropout differ.
    assert abs(loss - expected) < 0.05 * expected, f"got a loss of {loss}, but {expected} by hand"
    times: Times = {"by hand": [], "ours": []}
    for _ in range(rounds):
        times["by hand"].append(time_call(lambda: next(hand)))
        times["ours"].append(time_call(lambda: next(ours)))
    return times


def time_call(work: Callable[[], object]) -> float:
    """Call `work`, and return the seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare_ranks(case: Case, worker: Worker, rounds: int) -> Times:
    """Return the seconds of two training steps, by variant.

    The variants are: one rank; two ranks that train alone at the same time; and a worker of both
    ranks, for each strategy.
    """
    alone = make_steps_alone(case)
    work = {"one rank": alone if worker.rank == 0 else lambda: None, "two at once": alone}
    # ResNet-18 has no pipeline: batch norm would use the statistics of microbatches.
    names = ["replicate"] if case.network is make_resnet else list(WAYS)
    work |= {name: make_steps(case, worker, WAYS[name]) for name in names}
    times: Times = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, steps in work.items():
            worker.comm.barrier()
            dist.barrier()
            seconds = max(worker.comm.allgather(time_call(steps)))
            if number:  # The first round is a warm-up.
                times[name].append(seconds)
    return times


def make_steps(case: Case, worker: Worker, settings: ParallelSettings) -> Callable[[], None]:
    """Return a function that takes two training steps with all ranks of the worker."""
    training = case.make_training(worker, settings)
    batch = torch.arange(case.batch_size)

    def steps() -> None:
        training.step(batch)
        training.step(batch)

    return steps


def make_steps_alone(case: Case) -> Callable[[], None]:
    """Return a function that takes two training steps in this process alone."""
    network = case.network()
    network.to(memory_format=torch.channels_last)
    inputs, targets = (
        case.data().splits(torch.device("cpu"))[0].get_batch(torch.arange(case.batch_size))
    )
    optimizer = case.optimizer(network)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs).flatten(0, -2), targets.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return steps


def measure_memory(case: Case, worker: Worker, rounds: int) -> Times:  # noqa: ARG001 - bytes do not vary
    """Return the bytes of the network, and of the largest rank by strategy.

    "whole" are the bytes of the network, and "bound" is an upper bound per rank.
    """
    blocks = [sum(p.numel() for p in block.parameters()) for block in case.network().children()]
    each = 4 * 4  # Bytes of a parameter, its gradient and two states of AdamW.
    whole = each * sum(blocks)
    found: Times = {"whole": [whole], "bound": [whole / worker.size + each * max(blocks)]}
    for name, settings in WAYS.items():
        training = case.make_training(worker, settings)
        training.step(torch.arange(8))
        found[name] = [max(worker.comm.allgather(size_of(training)))]
    return found


def size_of(training: Any) -> int:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    parameters = list(training.model.parameters())
    states = [
        t
        for p in parameters
        for t in training.optimizer.state[p].values()
        if torch.is_tensor(t) and t.dim()
    ]
    tensors = [t for t in [*parameters, *(p.grad for p in parameters), *states] if t is not None]
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


PARTS = {"by-hand": compare_with_loop, "ranks": compare_ranks, "memory": measure_memory}


def measure(part: str, name: str, rounds: int, ranks: int) -> None:
    """Fork a worker of `ranks` ranks.

    Measure one part of the benchmark for one case, and print the result as JSON.
    """

    def run(worker: Worker) -> None:
        found = PARTS[part](CASES[name], worker, rounds)
        if worker.rank == 0:
            print(json.dumps(found), flush=True)

    run_ranks(ranks, run, SEED)  # type: ignore[no-untyped-call]


def run_measurement(ranks: int, part: str, name: str, rounds: int) -> Times:
    """Call `measure` in a new process, and return the result that it prints."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        part,
        name,
        "--rounds",
        str(rounds),
        "--ranks",
        str(ranks),
    ]
    job = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=1800)
    found: Times = json.loads(job.stdout)
    return found


def print_row(name: str, seconds: float, ratios: list[float]) -> None:
    """Print a row of a table: the name, the seconds, the median ratio, and the range of ratios."""
    print(
        f"{name:<26}{seconds:>9.3f}{median(ratios):>8.2f}   {min(ratios):.2f} to {max(ratios):.2f}",
        flush=True,
    )


def print_tables(rounds: int) -> None:
    """Print all tables."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(
        f"{cores} cores with a previous load of {load:.1f}, torch {torch.__version__}, "
        f"{rounds} rounds"
    )
    print(
        "\n(a) an epoch on one rank: seconds by hand; ratio to a loop by hand (goal: at most 1.03)"
    )
    for name in CASES:
        times = run_measurement(1, "by-hand", name, 10 * rounds if name == "Net" else rounds)
        ratios = [ours / hand for ours, hand in zip(times["ours"], times["by hand"], strict=True)]
        print_row(name, median(times["by hand"]), ratios)
    print("\n(b) two ranks: seconds per step; speedup to one rank (goal: 1.8)")
    for name in ("ResNet-18", "transformer"):
        times = run_measurement(2, "ranks", name, rounds)
        for way, seconds in times.items():
            batches = 2 if way == "two at once" else 1
            ratios = [
                batches * one / other for one, other in zip(times["one rank"], seconds, strict=True)
            ]
            print_row(f"{name}, {way}", median(seconds) / 2, ratios)
    print(
        "\n(c) parameters, gradients and optimizer state of the transformer: MB on the largest "
        "rank (share)"
    )
    for ranks in (2, 4):
        (whole,), (bound,), *sizes = run_measurement(
            ranks, "memory", "transformer", rounds
        ).values()
        parts = [
            f"{way} {size / 1e6:.1f} ({size / whole:.2f})"
            for way, (size,) in zip(WAYS, sizes, strict=True)
        ]
        expected = f"1/{ranks} and the largest block {bound / 1e6:.1f} ({bound / whole:.2f})"
        print(f"{ranks} ranks: {', '.join(parts)}; {expected}", flush=True)


def main() -> None:
    """Print all tables, or measure one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="number of rounds; each measures all variants"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    if arguments.worker:
        part, name = arguments.worker
        measure(part, name, arguments.rounds, arguments.ranks)
    else:
        print_tables(arguments.rounds)


if __name__ == "__main__":
    main()
