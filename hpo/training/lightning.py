"""Lightning on the ranks of a worker: a Trainer that reports its validation losses, and a Fabric.

Imported only by search spaces that use it: Lightning takes seconds to import.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hpo.trainer.worker import Worker

try:
    from lightning import Callback, Fabric, LightningModule, Trainer
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.utilities.warnings import disable_possible_user_warnings
except ModuleNotFoundError as error:
    reason = f"hpo.training.lightning needs Lightning ({error}): pip install 'hpo-islands[lightning]'"
    raise ModuleNotFoundError(reason) from None

_WORKER_OPTIONS = ("accelerator", "devices", "num_nodes")


def make_trainer(worker: Worker, monitor: str, **options: Any) -> Trainer:
    """Return a Trainer of the worker's ranks that reports the logged metric `monitor` after each validation of a fit.

    ::

        trainer_of(worker, "val_loss", max_epochs=3).fit(module, train, val)

    `monitor` is a loss, lower is better, logged with ``sync_dist=True``, since it is to be the same on all ranks. The
    other metrics that are logged are recorded with it, and the module's weights are offered, whole ones where they are
    sharded. The fit is ended as an objective is that calls `worker.report`.

    `options` are a Trainer's. Strategy, precision, callbacks and plugins are free: the strategy is ``ddp`` by default.
    Loggers, checkpoints, progress bars, the summary of the model and the sanity check are off by default.

    Raises ValueError where an option is the worker's to choose, and where `monitor` is no metric that was logged.
    """
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False) | {"num_sanity_val_steps": 0}
    callbacks = [_LossReporter(worker, monitor), *_to_list(options.pop("callbacks", None))]
    return Trainer(**{**quiet, **_make_options(worker, options)}, callbacks=callbacks)


def make_fabric(worker: Worker, **options: Any) -> Fabric:
    """Return a Fabric of the worker's ranks, launched; its strategy is ``ddp`` by default.

    `options` are a Fabric's. Losses are yielded or reported, and weights offered, as in any objective.

    Raises ValueError where an option is the worker's to choose.
    """
    fabric = Fabric(**_make_options(worker, options))
    fabric.launch()
    return fabric


def _make_options(worker: Worker, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells Lightning the worker's ranks, with a user's options; keep it from talking."""
    for name in _WORKER_OPTIONS:
        if name in options:
            raise ValueError(f"{name}={options[name]!r}: the ranks and their devices are the worker's; leave it out")
    os.environ.setdefault("PL_GLOBAL_SEED", str(worker.seed % 2**32))  # by which samplers shuffle
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # tips, and which GPUs there are
    disable_possible_user_warnings()  # they advise loader processes, which are forked
    warnings.filterwarnings("ignore", module=r"lightning\.", category=FutureWarning)  # what torch tells Lightning
    ranks = {
        "accelerator": worker.device.type,
        "devices": 1 if worker.device.type == "cpu" else [worker.device.index],
        "num_nodes": worker.size,
        "strategy": "ddp",
    }
    return {**ranks, **options, "plugins": [_WorkerEnvironment(worker), *_to_list(options.get("plugins"))]}


def _to_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


class _WorkerEnvironment(ClusterEnvironment):
    """The ranks of a worker; to Lightning, each is a node with one device."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # of a process group that would have to be made: there is one

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._worker.size

    def global_rank(self) -> int:
        return self._worker.rank

    def node_rank(self) -> int:
        return self._worker.rank

    def local_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


class _LossReporter(Callback):
    """Reports a metric after each validation, and offers the weights that have it."""

    def __init__(self, worker: Worker, monitor: str) -> None:
        self._worker = worker
        self._monitor = monitor
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        # Lightning's own handler calls a collective, wherever the rank is.
        signal.signal(signal.SIGTERM, self._sigterm_handler)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = dict(trainer.callback_metrics)
        if self._monitor not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            raise ValueError(
                f"monitor={self._monitor!r} is no metric that was logged by the end of the validation ({there}): "
                f"self.log({self._monitor!r}, loss, sync_dist=True) in validation_step"
            )
        loss = metrics.pop(self._monitor)
        self._worker.offer_weights(lambda: _gather_weights(trainer, pl_module))
        self._worker.report(loss, **metrics)


def _gather_weights(trainer: Trainer, module: LightningModule) -> Mapping[str, Any]:
    """Return the module's whole weights on the leader; called by all ranks together."""
    with torch.inference_mode(False), torch.no_grad():
        weights: Mapping[str, Any] = trainer.strategy.lightning_module_state_dict()
        if any(hasattr(tensor, "full_tensor") for tensor in weights.values()):
            return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        return weights
