"""A search of networks that Lightning trains, in several ways in turn.

The loss begins at x and falls. With "plain", a Trainer that Lightning itself has made finds the
ranks, as under torchrun.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hpo import Float, SearchSpace
from hpo.training.lightning import make_fabric, make_trainer
from tests.searches.counting import count

space = SearchSpace(x=Float(0.1, 1.0))


@dataclass(frozen=True)
class Settings:
    ways: str = "none"
    epochs: int = 3
    folder: str = "."


class Line(lightning.LightningModule):
    def __init__(self, x, way, worker):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.layer.weight, x)
        self.way = way
        self.worker = worker
        self.is_last = worker.rank == worker.size - 1
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def training_step(self, batch, _):
        if self.way != "plain":
            assert signal.getsignal(signal.SIGTERM) is self.on_sigterm, (
                "Lightning's calls a collective"
            )
        if self.way == "raises" and self.is_last and self.current_epoch == 1:
            raise ValueError("injected")
        if self.way == "sleeps":
            time.sleep(3600)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, _):
        if self.way == "nan" and self.is_last:
            self.layer.weight.fill_(torch.nan)
        loss = mse_loss(self.layer(batch[0]), batch[1]).sqrt()
        if self.way == "unsynced":
            loss = loss + self.worker.rank
        self.log("val_loss", loss, sync_dist=self.way != "unsynced")
        self.log("epochs", float(self.current_epoch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Sharded(Line):
    def configure_model(self):
        if not isinstance(self.layer, FSDPModule):  # it is called for the validation again
            fully_shard(self.layer, mesh=init_device_mesh("cpu", (self.worker.size,)))


class Ended(lightning.Callback):
    """Counts validations, and records the exception that ends a training."""

    seen = 0

    def on_validation_end(self, trainer, pl_module):  # noqa: ARG002
        self.seen += 1

    def on_exception(self, trainer, pl_module, exception):  # noqa: ARG002
        pl_module.ended_by = type(exception).__name__


class Report(lightning.Callback):
    """Reports each validation loss, as users of Lightning's Trainer do."""

    def __init__(self, worker):
        self.worker = worker

    def on_validation_end(self, trainer, pl_module):
        if trainer.state.fn == "fit":
            metrics = dict(trainer.callback_metrics)
            self.worker.offer_weights(pl_module.state_dict())
            self.worker.report(metrics.pop("val_loss"), **metrics)


def plain_trainer(worker, callbacks, **options):
    return lightning.Trainer(
        accelerator="cpu",
        devices=worker.size,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Report(worker), callbacks],
        **options,
    )


def loader(worker):
    data = torch.ones(12, 1)
    return DataLoader(TensorDataset(data, torch.zeros_like(data)), 12 // worker.size)


def objective(params, worker, settings):
    ways = settings.ways.split(",")
    way = ways[count(params, worker, settings.folder) % len(ways)]
    module, ended = (Sharded if way == "sharded" else Line)(params["x"], way, worker), Ended()
    options = {"max_epochs": settings.epochs, "callbacks": ended}
    if way == "devices":
        options["devices"] = 2
    if way == "sharded":
        options["strategy"] = ModelParallelStrategy(worker.size, tensor_parallel_size=1)
    if way == "fabric":
        make_fabric(worker, num_nodes=2)
    if way == "plain":
        trainer = plain_trainer(worker, **options)
    else:
        trainer = make_trainer(worker, "loss" if way == "monitor" else "val_loss", **options)
    try:
        trainer.fit(module, loader(worker), loader(worker))
        trainer.validate(module, loader(worker), verbose=False)  # This is not an epoch.
    finally:
        left = getattr(module, "ended_by", "nothing")
        threads = os.environ.get("OMP_NUM_THREADS")
        with Path(settings.folder, f"{worker.index}-{worker.rank}").open("a") as file:
            file.write(f"{params['x']!r} {ended.seen} {left} {threads} {os.getpid()}\n")
