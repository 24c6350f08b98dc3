"""Train a network on the ranks of a worker, with the same losses as a training in one process.

A global batch has the samples of one training step, which the ranks share. A strategy (`ParallelStrategy`) is the way
in which they share the network: replicas, shards of its parameters, or pipeline stages.
"""

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


# The workers that have begun a training. Each evaluation has its own `Worker`.
_trained_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def fit(
    network: nn.Module,
    data: Data,
    worker: Worker,
    recipe: Recipe,
    settings: ParallelSettings | None = None,
    stage_costs: Mapping[str, float] | None = None,
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a network on the worker's ranks, and yield a loss after each epoch. Collective: call on all ranks.

    The losses are the same on any number of ranks and for each `settings.parallel`, up to rounding: the order of the
    samples, augmentation and dropout follow from `worker.seed`. Batch normalisation is an exception if
    `settings.accumulate` or `settings.microbatches` is above 1: each part of a batch has its own statistics.

    Before each yield, `fit` calls `worker.offer_weights` and `worker.save_checkpoint`. It resumes from
    `worker.checkpoint`, or begins with the weights and the optimizer state of `worker.parent_checkpoint`. If an
    objective calls `fit` several times, only the first call saves and loads checkpoints.

    Args:
        network: The network. Do not use it afterwards: `fit` moves and modifies it, and may split it over the ranks.
        data: The data set: an `ImageDataset`, a `TextDataset`, or another object with the method ``splits`` of `Data`.
        worker: The worker that the objective gets.
        recipe: The settings of the training.
        settings: How the ranks share the training; by default, replicas in float32.
        stage_costs: Cost of each block of a pipeline by its name, in any unit. By default, the number of parameters.

    Yields:
        The validation loss, and the recipe's metrics by their names; both are means over the validation part.

    Raises:
        ValueError: The network does not fit `settings`, or a loss function does not return one number per sample.

    Example:
        ::

            def objective(params, worker, settings):
                network = resnet18((3, 32, 32), classes=10)
                recipe = Recipe(epochs=10, batch_size=128, lr=params["lr"])
                return fit(network, worker.data, worker, recipe, settings)
    """
    strategy = parallelize(network, worker, settings or ParallelSettings(), stage_costs)
    del network  # A rank may lack the memory for the whole network.
    train, validation = data.splits(worker.device)
    training = Training(strategy, train, recipe, worker.seed)
    losses: list[float] = []
    epochs_before = 0  # Epochs of the ancestors whose weights it has inherited.
    is_first = worker not in _trained_workers
    _trained_workers.add(worker)
    if is_first and (checkpoint := worker.checkpoint):
        training.load_state(checkpoint["training"])
        losses, epochs_before = checkpoint["losses"], checkpoint["before"]
    elif is_first and (checkpoint := worker.parent_checkpoint):
        training.load_parent_state(checkpoint["training"])
        epochs_before = checkpoint["before"] + len(checkpoint["losses"])
    checkpoint = None  # A rank may lack the memory to keep it.

    while len(losses) < recipe.epochs and not should_stop_early(losses, recipe.patience):
        seed_epoch(worker.seed, epochs_before + len(losses))
        for batch in training.iterate_batches():
            training.step(batch)
        loss, metrics = evaluate(strategy, validation, recipe)
        losses.append(loss)
        network_state = cache(strategy.state_dict)  # Weights and checkpoint share one gathered copy.
        worker.offer_weights(network_state)
        if is_first:
            worker.save_checkpoint(partial(_make_state, training, network_state, losses, epochs_before))
        yield loss, metrics
        del network_state  # It holds the whole network.


def _make_state(
    training: Training, network_state: Callable[[], Mapping[str, torch.Tensor]], losses: list[float], epochs_before: int
) -> dict[str, Any]:
    return {"training": training.make_state(network_state()), "losses": losses, "before": epochs_before}


def should_stop_early(losses: Sequence[float], patience: int) -> bool:
    """Return whether none of the latest `patience` losses is below all earlier losses; False if `patience` is 0."""
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def seed_epoch(number: int, epoch: int) -> None:
    """Seed the global random generators of torch, numpy and Python with a hash of `number` and `epoch`.

    Networks and data may use these generators. So an epoch draws the same numbers after a resume in another process.
    Epoch 0 is not seeded, since the trainer seeds each evaluation.
    """
    if epoch:
        number = int.from_bytes(hashlib.sha256(f"{number}/{epoch}".encode()).digest()[:8], "little")
        seed_torch(number >> 1)
        np.random.seed(number % 2**32)
        random.seed(number)


class Training:
    """The state of a training: the network, its optimizer and learning rate schedule, and the generator of batches."""

    def __init__(self, strategy: ParallelStrategy, train: Samples, recipe: Recipe, seed: int) -> None:
        self.strategy = strategy
        self._train_samples = train
        self._recipe = recipe
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._optimizer = make_optimizer(recipe, strategy.named_parameters())
        self._lr_scheduler = make_lr_scheduler(recipe, self._optimizer, -(-len(train) // recipe.batch_size))

    def iterate_batches(self) -> Iterator[torch.Tensor]:
        """Return the global batches of one epoch: indices of samples in a new random order, the same on all ranks."""
        return iter(
            split_by_size(torch.randperm(len(self._train_samples), generator=self._generator), self._recipe.batch_size)
        )

    def step(self, indices: torch.Tensor) -> torch.Tensor:
        """Take one training step, and return this rank's part of the mean loss. Collective: call on all ranks.

        Args:
            indices: Indices of the samples of the global batch, int64 of shape (N,).

        Returns:
            A float64 scalar; its sum over all ranks is the mean loss of the global batch.
        """
        strategy, recipe = self.strategy, self._recipe
        drawn = torch.zeros(0)
        if recipe.augmentation != "none":
            drawn = torch.rand(len(indices), DRAWS_PER_SAMPLE, generator=self._generator)

        def load(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = self._train_samples.get_batch(indices[positions])
            if recipe.augmentation != "none":
                inputs = augment_images(inputs, drawn[positions], recipe.augmentation)
            return inputs, targets

        self._optimizer.zero_grad()
        loss = strategy.compute_gradients(GlobalBatch(load, len(indices), self._steps, recipe.training_loss))
        scaler = strategy.scaler
        scaler.unscale_(self._optimizer)
        if recipe.clip:
            parameters = (parameter for _, parameter in strategy.named_parameters())
            clip_grads_with_norm_(parameters, recipe.clip, strategy.compute_total_norm())
        scale = scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # The scale falls if float16 gradients were infinite and the step was skipped.
            self._lr_scheduler.step()
        self._steps += 1
        return loss

    def make_state(self, network: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the state for a checkpoint, complete only on the leader. Collective: call on all ranks.

        Its format does not depend on the strategy or on the number of ranks. `network` is the result of the strategy's
        `state_dict`.
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
        """Resume a training from a state that `make_state` returned. Each rank must have the whole state.

        The interrupted training may have had another strategy or number of ranks.
        """
        self.load_parent_state(state)
        for group in self._optimizer.param_groups:
            group["lr"] = state["lr"]
        self._lr_scheduler.last_epoch = state["schedule"]

    def load_parent_state(self, state: Mapping[str, Any]) -> None:
        """Load weights, optimizer state and generator of another training. Keep the learning rate and its schedule."""
        self.strategy.load_state_dict(state["network"])
        self._load_optimizer(state["optimizer"])
        self.strategy.scaler.load_state_dict(state["scaler"])
        self._generator.set_state(state["drawn"])
        self._steps = state["steps"]

    def _load_optimizer(self, whole: Mapping[str, torch.Tensor]) -> None:
        names = {parameter: name for name, parameter in self.strategy.named_parameters()}
        of_parameters: dict[str, dict[str, torch.Tensor]] = {}
        for entry, tensor in whole.items():
            key, _, name = entry.partition(":")
            of_parameters.setdefault(name, {})[key] = tensor
        own: dict[int, dict[str, torch.Tensor]] = {}
        for number, parameter in enumerate(p for group in self._optimizer.param_groups for p in group["params"]):
            tensors = of_parameters.get(names[parameter], {})
            # A scalar, the number of steps, is not sharded.
            own[number] = {
                key: self.strategy.select_shard(parameter, t) if t.dim() else t for key, t in tensors.items()
            }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": own})


def evaluate(strategy: ParallelStrategy, samples: Samples, recipe: Recipe) -> tuple[float, dict[str, float]]:
    """Return the mean loss and the mean of each metric over the samples. Collective: call on all ranks."""
    measures = [recipe.loss, *recipe.metrics.values()]
    sums = strategy.compute_sums(samples.get_batch, len(samples), recipe.validation_batch, measures)
    loss, *metrics = (sums / len(samples)).tolist()
    return loss, dict(zip(recipe.metrics, metrics, strict=True))
