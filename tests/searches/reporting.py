"""A search whose objectives report x + 3, x + 1 and x + 2, in several ways in turn.

Ranks note their progress.
"""

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpo import Float, SearchSpace
from tests.searches.counting import count

space = SearchSpace(x=Float(0.0, 1.0))
workers: list[Any] = []  # those of the evaluations of this process


@dataclass(frozen=True)
class Settings:
    ways: str = "reports"
    folder: str = "."
    seconds: float = 0.0  # that one rank takes for an epoch
    slow: int = -1  # index of this rank


class Loop:
    """Training code with a loop and a hook, as in a library. The search does not change it."""

    def __init__(self, params, worker, settings, way):
        self.x, self.worker, self.settings, self.way = params["x"], worker, settings, way
        self.is_last = worker.rank == worker.size - 1
        self.epoch = 0

    def note(self, event):
        with Path(self.settings.folder, f"{self.worker.index}-{self.worker.rank}").open(
            "a"
        ) as file:
            file.write(json.dumps([event, self.x, self.epoch]) + "\n")

    def losses(self):
        for epoch, more in enumerate((3.0, 1.0, 2.0), 1):
            self.epoch = epoch
            if self.worker.rank == self.settings.slow % self.worker.size:
                time.sleep(self.settings.seconds)
            total = torch.tensor(self.x + more)
            dist.all_reduce(total)
            yield total.item() / self.worker.size

    def run(self, hook):
        try:
            for loss in self.losses():
                hook(loss)
                self.note("goes on")
        finally:
            self.note("leaves")

    def report(self, loss):
        self.worker.report(loss, epoch=self.epoch)

    def fewer(self, loss):
        if not (self.is_last and self.epoch == 3):
            self.worker.report(loss)

    def raises(self, loss):
        if self.is_last and self.epoch == 2:
            raise ValueError("injected")
        self.worker.report(loss)

    def nan(self, loss):
        self.worker.report(float("nan") if self.is_last and self.epoch == 2 else loss)

    def text(self, _loss):
        self.worker.report("low")

    def metric(self, loss):
        self.worker.report(loss, note="good")

    def positional(self, loss):
        self.worker.report(loss, {"accuracy": 0.5})

    def differs(self, loss):
        self.worker.report(loss + self.worker.rank)

    def swallows(self, loss):
        for _ in range(2):
            with suppress(BaseException):
                self.worker.report(float("nan") if self.is_last and self.epoch == 2 else loss)
                self.note("returned")

    def sleeps(self, loss):
        if self.is_last and self.epoch == 2:
            time.sleep(3600)  # in the last rank
        self.worker.report(loss)  # while it sleeps

    def thread(self, loss):
        errors = []

        def report():
            try:
                self.worker.report(loss)
            except RuntimeError as error:
                errors.append(error)

        other = threading.Thread(target=report, name="other")
        other.start()
        other.join()
        raise errors[0]

    def late(self, loss):
        workers[-2].report(loss)

    def gathers(self, loss):
        self.worker.offer_weights(self.weights)
        self.worker.report(loss)

    def weights(self):
        self.note("gathers")
        total = torch.tensor([float(self.epoch)])
        dist.all_reduce(total)  # the ranks are here together
        return {"epoch": total / self.worker.size} if self.worker.rank == 0 else None

    def gather_raises(self, loss):
        def gather():
            if self.is_last:
                raise ValueError("injected in a function")
            return self.weights()

        self.worker.offer_weights(gather)
        self.worker.report(loss)

    def gather_sleeps(self, loss):
        def gather():
            if self.is_last:
                time.sleep(3600)  # in a function
            return self.weights()

        self.worker.offer_weights(gather)
        self.worker.report(loss)

    def gather_alone(self, loss):
        if self.worker.rank == 0:
            self.worker.offer_weights(self.weights)
        self.worker.report(loss)

    def gather_nothing(self, loss):
        self.worker.offer_weights(lambda: None)
        self.worker.report(loss)

    def gather_reports(self, loss):
        self.worker.offer_weights(lambda: self.worker.report(loss))
        self.worker.report(loss)


def yields(loop):
    for loss in loop.losses():
        if loop.way == "yields_gathers":
            loop.worker.offer_weights(loop.weights)
        if loop.way == "mixed" and loop.epoch < 3:
            loop.worker.report(loss, epoch=loop.epoch)
        else:
            yield loss, {"epoch": loop.epoch}
        loop.note("goes on")


def objective(params, worker, settings):
    ways = settings.ways.split(",")
    way = ways[count(params, worker, settings.folder) % len(ways)]
    workers.append(worker)
    loop = Loop(params, worker, settings, way)
    loop.note("starts")
    if way in ("yields", "yields_gathers", "mixed"):
        return yields(loop)
    loop.run(getattr(loop, "report" if way in ("reports", "returns") else way))
    return -99.0 if way == "returns" else None
