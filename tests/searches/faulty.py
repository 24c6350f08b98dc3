"""A search that fails on request: in one way, on one rank, in chosen evaluations.

Ranks note when they start and fail. Evaluations are counted for each worker. `way` may list several
ways, which are taken in turn. Ranks count together in a file, since an objective is not called on a
rank if its evaluation is cancelled before it begins there.
"""

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpo import Float, SearchSpace
from tests.searches.counting import count
from tests.searches.counting import note as write_note

space = SearchSpace(x=Float(0.0, 1.0))
kept: list[object] = []


@dataclass(frozen=True)
class Settings:
    way: str = "none"
    rank: int = -1  # of the worker; -1 is its last
    every: int = 1  # which evaluations of a worker: 1 all, 3 every third, beginning with the first
    seconds: float = 0.0  # that each epoch takes
    epochs: int = 2
    cleanup: str = "0"  # seconds that it takes to close, of a worker's evaluations in turn
    folder: str = ""


def note(folder, worker, **event):
    if folder:
        write_note(folder, worker, **event)


def count_descriptors(process):
    return sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


class Wrong(torch.autograd.Function):
    """Raises in a backward pass, after gradients of later layers were sent to the peers."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        time.sleep(0.05)
        raise ValueError("injected: in the backward pass")


def never_return():
    """Block all signals and sleep, as native code that no signal interrupts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(3600)


def vanish():
    """Stop this process, as if its host had crashed."""
    os.kill(os.getpid(), signal.SIGSTOP)


class SpeechlessError(ValueError):
    """An exception whose text cannot be computed."""

    def __str__(self):
        raise TypeError("injected: no message")


RAISED = {
    "comm": ValueError("injected: while the others communicate"),
    "speechless": SpeechlessError("injected"),
    "unspeakable": ValueError("injected: \udcff \U0001f3d6"),
    "raise": ValueError("injected"),
    # And whatever holds its connections with it.
    "keep": ValueError("injected: with the model kept"),
    "memory": torch.OutOfMemoryError("injected: out of memory"),
    "exit": SystemExit("injected: exit"),
    "interrupt": KeyboardInterrupt("injected: interrupt"),
}
DONE = {
    "sleep": lambda: time.sleep(3600),
    "stuck": never_return,
    "frozen": vanish,
    "rest": lambda: time.sleep(3600),  # on all ranks
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def act(way, place, worker, folder):
    """Fail if `way` belongs here: "raise@start" raises at the start, "raise" in validation."""
    kind, _, where = way.partition("@")
    if (where or "validation") != place:
        return None
    note(folder, worker, event="fails", way=way)
    if kind in RAISED:
        raise RAISED[kind].with_traceback(None)
    if kind in DONE:
        DONE[kind]()
    return {"nan": math.nan, "inf": math.inf, "differs": float(worker.rank), "text": "low"}.get(
        kind
    )


def objective(params, worker, settings):
    number, cleanups = count(params, worker, settings.folder), settings.cleanup.split(",")
    try:
        yield from train(params, worker, settings, number)
    finally:
        time.sleep(float(cleanups[number % len(cleanups)]))
        note(settings.folder, worker, event="closed", number=number)


def train(params, worker, settings, number):
    turn, due = divmod(number, settings.every)
    ways = settings.way.split(",")
    way = ways[turn % len(ways)] if due == 0 else "none"
    mine = way == "rest" or (worker.rank == settings.rank % worker.size and way != "none")
    folder = settings.folder
    template = os.getppid()
    descriptors = {
        "template": count_descriptors(template),
        "first_rank": count_descriptors(parent_of(template)),
    }
    note(folder, worker, event="starts", number=number, way=way, descriptors=descriptors)
    if mine:
        act(way, "start", worker, folder)
    if way == "nothing" and mine:
        note(folder, worker, event="fails", way=way)
        return
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    )
    if mine and way == "keep@training":
        kept.append(model)
    for epoch in range(settings.epochs):
        if mine and epoch == 1:
            act(way, "between", worker, folder)
        if way == "comm@start":
            worker.comm.allreduce(1)
        hidden = model.module[0](torch.ones(2, 8)) if mine and way == "backward" else None
        output = model(torch.ones(2, 8))
        if mine and way == "backward":
            note(folder, worker, event="fails", way=way)
            output = output + model.module[1](Wrong.apply(hidden))
        if mine:
            act(way, "training", worker, folder)
        output.sum().backward()
        time.sleep(settings.seconds)
        loss = torch.tensor([1.0 / (epoch + 1) + params["x"]])
        result = act(way, "validation", worker, folder) if mine else None
        dist.all_reduce(loss)
        yield result if result is not None else loss.item() / worker.size
    if way == "fewer" and not mine:
        yield 0.5
