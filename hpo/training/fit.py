"""Training a network on a worker's ranks, as one process would train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from hpo.training.augment import NUMBERS, augmented
from hpo.training.parallel import ParallelSettings, share
from hpo.training.parallel.way import Batch, Way, split
from hpo.training.recipe import Recipe, optimizer_of, schedule_of
from hpo.training.samples import Data, Samples

if TYPE_CHECKING:
    from hpo.evaluation.worker import Worker


def fit(
    network: nn.Module,
    data: Data,
    worker: Worker,
    recipe: Recipe,
    settings: ParallelSettings | None = None,
    costs: Mapping[str, float] | None = None,
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a network, and yield the validation loss and the recipe's metrics after each epoch.

    The ranks share it in the way that `settings` says, and the losses are the same on any number of ranks and in each
    way, to rounding: the order of the samples, augmentation and dropout follow from the worker's seed. (Statistics of
    batch normalisation are those of each part of a batch, where `settings` divides it.) The whole network's weights are
    offered before each yield. `network` is taken over, as `share` says, which `costs` is for, too.
    """
    way = share(network, worker, settings or ParallelSettings(), costs)
    del network  # a rank may have no room for all of it
    train, validation = data.on(worker.device)
    training = Training(way, train, recipe, worker.seed)
    best, epochs_since_best = float("inf"), 0
    for _ in range(recipe.epochs):
        for batch in training.batches():
            training.step(batch)
        loss, metrics = evaluate(way, validation, recipe)
        worker.offer(way.state_dict)
        yield loss, metrics
        best, epochs_since_best = (loss, 0) if loss < best else (best, epochs_since_best + 1)
        if 0 < recipe.patience <= epochs_since_best:
            return


class Training:
    """A training: a network that ranks share, its optimizer, and what is drawn for each epoch and each batch."""

    def __init__(self, way: Way, train: Samples, recipe: Recipe, seed: int) -> None:
        self.way = way
        self._train = train
        self._recipe = recipe
        self._drawn = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._optimizer = optimizer_of(recipe, way.named_parameters())
        self._schedule = schedule_of(recipe, self._optimizer, -(-len(train) // recipe.batch_size))

    def batches(self) -> Iterator[torch.Tensor]:
        """Return the indices of an epoch's global batches, in a new order: the same on all ranks."""
        return iter(split(torch.randperm(len(self._train), generator=self._drawn), self._recipe.batch_size))

    def step(self, indices: torch.Tensor) -> torch.Tensor:
        """Take a training step for the global batch of these samples.

        Returns this rank's part of the batch's mean loss: the sum over all ranks is the loss.
        """
        way, recipe = self.way, self._recipe
        drawn = torch.zeros(0)
        if recipe.augmentation != "none":
            drawn = torch.rand(len(indices), NUMBERS, generator=self._drawn)

        def load(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, targets = self._train.batch(indices[positions])
            if recipe.augmentation != "none":
                inputs = augmented(inputs, drawn[positions], recipe.augmentation)
            return inputs, targets

        self._optimizer.zero_grad()
        loss = way.gradients(Batch(load, len(indices), self._steps, recipe.training_loss))
        way.scaler.unscale_(self._optimizer)
        if recipe.clip:
            clip_grads_with_norm_((p for _, p in way.named_parameters()), recipe.clip, way.total_norm())
        scale = way.scaler.get_scale()
        way.scaler.step(self._optimizer)
        way.scaler.update()
        if way.scaler.get_scale() >= scale:  # else gradients in float16 were infinite, and the step is left out
            self._schedule.step()
        self._steps += 1
        return loss


def evaluate(way: Way, samples: Samples, recipe: Recipe) -> tuple[float, dict[str, float]]:
    """Return the mean loss over samples, and the mean of each metric."""
    measures = [recipe.loss, *recipe.metrics.values()]
    sums = way.sums(samples.batch, len(samples), recipe.validation_batch, measures)
    loss, *metrics = (sums / len(samples)).tolist()
    return loss, dict(zip(recipe.metrics, metrics, strict=True))
