"""Training a network on a worker's ranks, as one process would train it."""

from __future__ import annotations

import hashlib
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from hpo.trainer.worker import seed_torch
from hpo.training.augmentation import DRAWS_PER_SAMPLE, augment_images
from hpo.training.parallel import ParallelSettings, parallelize
from hpo.training.parallel.strategy import GlobalBatch, ParallelStrategy, split_by_size
from hpo.training.recipe import Recipe, make_lr_scheduler, make_optimizer
from hpo.training.samples import Data, Samples

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker


_trained_workers: weakref.WeakSet[Worker] = (
    weakref.WeakSet()
)  # those that have trained: one is made for each evaluation


def fit(
    network: nn.Module,
    data: Data,
    worker: Worker,
    recipe: Recipe,
    settings: ParallelSettings | None = None,
    stage_costs: Mapping[str, float] | None = None,
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a network, and yield the validation loss and the recipe's metrics after each epoch.

    The ranks share it in the way that `settings` says, and the losses are the same on any number of ranks and in each
    way, to rounding: the order of the samples, augmentation and dropout follow from the worker's seed. (Statistics of
    batch normalisation are those of each part of a batch, where `settings` divides it.) The whole network's weights are
    offered before each yield. An evaluation that was interrupted goes on where it was; of several trainings in one, the
    first one does, and the others begin again. So it is with what is inherited: weights and the optimizer's momenta.
    `network` is taken over, as `share` says, which `stage_costs` is for, too.
    """
    way = parallelize(network, worker, settings or ParallelSettings(), stage_costs)
    del network  # a rank may have no room for all of it
    train, validation = data.splits(worker.device)
    training = Training(way, train, recipe, worker.seed)
    losses: list[float] = []
    before = 0  # epochs, of those from whom it inherits
    is_first = worker not in _trained_workers
    _trained_workers.add(worker)
    if is_first and (known := worker.checkpoint):
        training.load_state(known["training"])
        losses, before = known["losses"], known["before"]
    elif is_first and (known := worker.parent_checkpoint):
        training.load_parent_state(known["training"])
        before = known["before"] + len(known["losses"])
    known = None  # a rank may have little room for it, too

    while len(losses) < recipe.epochs and not should_stop_early(losses, recipe.patience):
        seed_epoch(worker.seed, before + len(losses))
        for batch in training.iterate_batches():
            training.step(batch)
        loss, metrics = evaluate(way, validation, recipe)
        losses.append(loss)
        network_state = cache(way.state_dict)  # gathered once for both
        worker.offer_weights(network_state)
        if is_first:
            worker.save_checkpoint(partial(_make_state, training, network_state, losses, before))
        yield loss, metrics
        del network_state  # it holds the whole network


def _make_state(
    training: Training, network_state: Callable[[], Mapping[str, torch.Tensor]], losses: list[float], epochs_before: int
) -> dict[str, Any]:
    return {"training": training.make_state(network_state()), "losses": losses, "before": epochs_before}


def should_stop_early(losses: Sequence[float], patience: int) -> bool:
    """Tell whether training ends early: after `patience` losses in a row that are not the lowest (0: it does not)."""
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def seed_epoch(number: int, epoch: int) -> None:
    """Seed what networks and data may draw from beside what this module draws, for an epoch that is not the first.

    An epoch then draws the same whether or not those before it were trained by this process.
    """
    if epoch:
        number = int.from_bytes(hashlib.sha256(f"{number}/{epoch}".encode()).digest()[:8], "little")
        seed_torch(number >> 1)
        np.random.seed(number % 2**32)
        random.seed(number)


class Training:
    """A training: a network that ranks share, its optimizer, and what is drawn for each epoch and each batch."""

    def __init__(self, way: ParallelStrategy, train: Samples, recipe: Recipe, seed: int) -> None:
        self.strategy = way
        self._train_samples = train
        self._recipe = recipe
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._optimizer = make_optimizer(recipe, way.named_parameters())
        self._lr_scheduler = make_lr_scheduler(recipe, self._optimizer, -(-len(train) // recipe.batch_size))

    def iterate_batches(self) -> Iterator[torch.Tensor]:
        """Return the indices of an epoch's global batches, in a new order: the same on all ranks."""
        return iter(
            split_by_size(torch.randperm(len(self._train_samples), generator=self._generator), self._recipe.batch_size)
        )

    def step(self, indices: torch.Tensor) -> torch.Tensor:
        """Take a training step for the global batch of these samples.

        Returns this rank's part of the batch's mean loss: the sum over all ranks is the loss.
        """
        way, recipe = self.strategy, self._recipe
        drawn = torch.zeros(0)
        if recipe.augmentation != "none":
            drawn = torch.rand(len(indices), DRAWS_PER_SAMPLE, generator=self._generator)

        def load(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = self._train_samples.get_batch(indices[positions])
            if recipe.augmentation != "none":
                inputs = augment_images(inputs, drawn[positions], recipe.augmentation)
            return inputs, targets

        self._optimizer.zero_grad()
        loss = way.compute_gradients(GlobalBatch(load, len(indices), self._steps, recipe.training_loss))
        way.scaler.unscale_(self._optimizer)
        if recipe.clip:
            clip_grads_with_norm_((p for _, p in way.named_parameters()), recipe.clip, way.compute_total_norm())
        scale = way.scaler.get_scale()
        way.scaler.step(self._optimizer)
        way.scaler.update()
        if way.scaler.get_scale() >= scale:  # else gradients in float16 were infinite, and the step is left out
            self._lr_scheduler.step()
        self._steps += 1
        return loss

    def make_state(self, network: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what it takes to go on, on the leader, the same in each way; called by all ranks together.

        `network` is what the way's `state_dict` returns.
        """
        state = self._optimizer.state
        own = {
            f"{key}:{name}": tensor
            for name, parameter in self.strategy.named_parameters()
            for key, tensor in state.get(parameter, {}).items()
            if tensor is not None
        }
        return {
            "network": network,
            "optimizer": self.strategy.gather_tensors(own),
            "lr": self._optimizer.param_groups[0]["lr"],
            "schedule": self._lr_scheduler.last_epoch,
            "scaler": self.strategy.scaler.state_dict(),
            "drawn": self._generator.get_state(),
            "steps": self._steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which each rank has, on any number of ranks and in any way."""
        self.load_parent_state(state)
        for group in self._optimizer.param_groups:
            group["lr"] = state["lr"]
        self._lr_scheduler.last_epoch = state["schedule"]

    def load_parent_state(self, state: Mapping[str, Any]) -> None:
        """Begin with what another training has learned and drawn, with a learning rate and a schedule of its own."""
        self.strategy.load_state_dict(state["network"])
        self._load_optimizer(state["optimizer"])
        self.strategy.scaler.load_state_dict(state["scaler"])
        self._generator.set_state(state["drawn"])
        self._steps = state["steps"]

    def _load_optimizer(self, whole: Mapping[str, torch.Tensor]) -> None:
        names = {parameter: name for name, parameter in self.strategy.named_parameters()}
        of_parameters: dict[str, dict[str, torch.Tensor]] = {}
        for place, tensor in whole.items():
            key, _, name = place.partition(":")
            of_parameters.setdefault(name, {})[key] = tensor
        own: dict[int, dict[str, torch.Tensor]] = {}
        for number, parameter in enumerate(p for group in self._optimizer.param_groups for p in group["params"]):
            tensors = of_parameters.get(names[parameter], {})
            # What is not of the parameter's shape, the number of steps, each rank has.
            own[number] = {
                key: self.strategy.select_shard(parameter, t) if t.dim() else t for key, t in tensors.items()
            }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": own})


def evaluate(way: ParallelStrategy, samples: Samples, recipe: Recipe) -> tuple[float, dict[str, float]]:
    """Return the mean loss over samples, and the mean of each metric."""
    measures = [recipe.loss, *recipe.metrics.values()]
    sums = way.compute_sums(samples.get_batch, len(samples), recipe.validation_batch, measures)
    loss, *metrics = (sums / len(samples)).tolist()
    return loss, dict(zip(recipe.metrics, metrics, strict=True))
