"""Use Lightning on the ranks of a worker, by a Trainer that reports losses, or a Fabric.

Import it only in search files that use it, since Lightning takes seconds to import.
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
    reason = (
        f"hpo.training.lightning needs Lightning ({error}): pip install 'hpo-islands[lightning]'"
    )
    raise ModuleNotFoundError(reason) from None


def make_trainer(worker: Worker, monitor: str, **options: Any) -> Trainer:
    """Make a Trainer on the worker's ranks that reports `monitor` after each validation.

    The other logged metrics are recorded with this loss. The Trainer also passes the module's
    weights to `worker.offer_weights`; sharded weights are gathered. If the evaluation is over, for
    example pruned, the exception of `worker.report` ends the fit. Collective: call on all ranks.

    Args:
        monitor: Name of the validation loss, which is minimized. Log it with ``sync_dist=True``: it
            must be the same on all ranks.
        options: Arguments of ``lightning.Trainer``, except ``accelerator``, ``devices`` and
            ``num_nodes``. The default strategy is ``"ddp"``. Loggers, checkpoints, progress bars,
            the model summary and the sanity check are off by default.

    Raises:
        ValueError: `options` has an option that the worker determines. During the fit: `monitor`
            was not logged by the end of a validation.

    Example:
        ::

            def objective(params, worker):
                trainer = make_trainer(worker, "val_loss", max_epochs=3)
                trainer.fit(module, train_loader, val_loader)
    """
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False) | {"num_sanity_val_steps": 0}
    callbacks = [_LossReporter(worker, monitor), *_to_list(options.pop("callbacks", None))]
    return Trainer(**{**quiet, **_make_options(worker, options)}, callbacks=callbacks)


def make_fabric(worker: Worker, **options: Any) -> Fabric:
    """Make a launched Fabric on the worker's ranks. Collective: call on all ranks.

    Unlike a Trainer of `make_trainer`, a Fabric reports nothing: the objective must yield or report
    losses, and call `worker.offer_weights`.

    Args:
        options: Arguments of ``lightning.Fabric``, except ``accelerator``, ``devices`` and
            ``num_nodes``. The default strategy is ``"ddp"``.

    Raises:
        ValueError: `options` has an option that the worker determines.

    Example:
        ::

            def objective(params, worker):
                fabric = make_fabric(worker, precision="bf16-mixed")
                network, optimizer = fabric.setup(network, optimizer)
    """
    fabric = Fabric(**_make_options(worker, options))
    fabric.launch()
    return fabric


def _make_options(worker: Worker, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options and those of the worker's ranks; hide Lightning's tips."""
    for name in ("accelerator", "devices", "num_nodes"):
        if name in options:
            raise ValueError(
                f"{name} must be omitted, got {options[name]!r}. The worker determines the ranks "
                "and their devices"
            )
    os.environ.setdefault("PL_GLOBAL_SEED", str(worker.seed % 2**32))  # Samplers shuffle with it.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # This hides tips and the list of GPUs.
    disable_possible_user_warnings()  # They recommend loader processes, which would be forked.
    # torch's deprecations concern Lightning's developers, not its users.
    warnings.filterwarnings("ignore", module=r"lightning\.", category=FutureWarning)
    ranks = {
        "accelerator": worker.device.type,
        "devices": 1 if worker.device.type == "cpu" else [worker.device.index],
        "num_nodes": worker.size,
        "strategy": "ddp",
    }
    return {
        **ranks,
        **options,
        "plugins": [_WorkerEnvironment(worker), *_to_list(options.get("plugins"))],
    }


def _to_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _WorkerEnvironment(ClusterEnvironment):
    """Describes the ranks of a worker to Lightning: each rank is a node with one device."""

    creates_processes_externally = True
    # Lightning needs them only to make a process group, and one exists.
    main_address = ""
    main_port = 0

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
    """Offers weights and reports the metric `monitor` after each validation of a fit."""

    def __init__(self, worker: Worker, monitor: str) -> None:
        self._worker = worker
        self._monitor = monitor
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's
        # Lightning's handler calls a collective, whatever the rank is doing at that time.
        signal.signal(signal.SIGTERM, self._sigterm_handler)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = dict(trainer.callback_metrics)
        if self._monitor not in metrics:
            logged = ", ".join(sorted(metrics)) or "none"
            raise ValueError(
                "monitor must be a metric that was logged by the end of the validation "
                f"({logged}), got {self._monitor!r}. Call self.log({self._monitor!r}, loss, "
                "sync_dist=True) in validation_step"
            )
        loss = metrics.pop(self._monitor)
        self._worker.offer_weights(lambda: _gather_weights(trainer, pl_module))
        self._worker.report(loss, **metrics)


def _gather_weights(trainer: Trainer, module: LightningModule) -> Mapping[str, Any]:
    """Return the module's whole weights on the leader. Collective: call on all ranks."""
    with torch.inference_mode(False), torch.no_grad():
        weights: Mapping[str, Any] = trainer.strategy.lightning_module_state_dict()
        if any(hasattr(tensor, "full_tensor") for tensor in weights.values()):
            return get_model_state_dict(
                module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
        return weights
