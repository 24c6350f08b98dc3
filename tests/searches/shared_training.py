"""A training whose ranks share a network, for any data and optimizer."""

import math

import torch
from torch.nn.functional import cross_entropy

from hpo.training import (
    DropoutMasks,
    SharedGradScaler,
    augment_images,
    clip_gradients,
    compute_means,
    gather_state,
    gather_weights,
    load_state,
    make_autocast,
    replace_dropout,
    split_batch,
)
from search_spaces import cifar10_resnet

vars(cifar10_resnet)["COSTS"] = None  # These networks have other blocks.


def compute_losses(outputs, targets, smoothing=0.0):
    """Return the mean cross-entropy of each sample, which may have several targets."""
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    losses = cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    return losses.view(len(targets), math.prod(targets.shape[1:])).mean(1)


class SharedTraining:
    """A network that ranks share, its optimizer, and the order of samples."""

    def __init__(self, network, data, worker, settings, make_optimizer, batch_size):
        self.worker, self.settings, self.batch_size = worker, settings, batch_size
        self.train, self.validation = data
        self.masks = DropoutMasks(worker.seed)
        replace_dropout(network, self.masks)
        self.model = cifar10_resnet.share(network, worker, settings)
        self.optimizer = make_optimizer(self.model)
        self.scaler = SharedGradScaler(worker.device, settings.precision)
        self.order = torch.Generator().manual_seed(worker.seed)
        self.is_pipeline = settings.parallel == "pipeline"
        self.losses, self.steps = [], 0
        self.smoothing, self.clip, self.augmentation = 0.0, 0.0, "none"

    def iterate_batches(self):
        return torch.randperm(len(self.train), generator=self.order).split(self.batch_size)

    def step(self, batch):
        """Take one step, and return this rank's part of the mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        drawn = (
            torch.rand(len(batch), 3, generator=self.order)
            if self.augmentation != "none"
            else batch
        )

        def compute_loss(outputs, targets):
            nonlocal total
            loss = compute_losses(outputs, targets, self.smoothing).sum() / len(batch)
            total += loss.item()
            return self.scaler.scale(loss)

        self.model.train()
        self.optimizer.zero_grad()
        for positions in split_batch(len(batch), self.worker, self.settings):
            inputs, targets = self.train.get_batch(batch[positions])
            inputs = augment_images(inputs, drawn[positions], self.augmentation)
            if self.is_pipeline:
                self.model.backward(inputs, targets, positions, self.steps, compute_loss)
                continue
            self.masks.begin_forward(self.steps, positions, self.worker.device)
            with make_autocast(self.settings.precision, self.worker.device):
                outputs = self.model(inputs)
            (compute_loss(outputs, targets) * self.worker.size).backward()
        self.scaler.unscale_(self.optimizer)
        if self.clip:
            clip_gradients(self.model, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        return total

    def validate(self):
        """Return the mean loss and the accuracy."""

        def measure(indices):
            inputs, targets = self.validation.get_batch(indices)
            with make_autocast(self.settings.precision, self.worker.device):
                outputs = self.model(inputs)
            right = (outputs.argmax(-1) == targets).float()
            return compute_losses(outputs, targets), right.view(
                len(right), math.prod(right.shape[1:])
            ).mean(1)

        self.model.eval()
        return compute_means(
            measure, len(self.validation), self.worker, is_shared=not self.is_pipeline
        )

    def make_state(self):
        state = {
            "model": gather_state(self.model, self.optimizer),
            "scaler": self.scaler.state_dict(),
        }
        return {
            **state,
            "order": self.order.get_state(),
            "steps": self.steps,
            "losses": self.losses,
        }

    def resume(self):
        """Load the checkpoint of this evaluation, or of its parent."""
        checkpoint = self.worker.checkpoint
        if state := checkpoint or self.worker.parent_checkpoint:
            load_state(self.model, self.optimizer, state["model"])
            self.scaler.load_state_dict(state["scaler"])
            self.order.set_state(state["order"])
            self.steps = state["steps"]
        if checkpoint:
            self.losses = checkpoint["losses"]

    def fit(self, epochs):
        """Train, save checkpoints, and yield the loss and the accuracy after each epoch."""
        self.resume()
        while len(self.losses) < epochs:
            for batch in self.iterate_batches():
                self.step(batch)
            loss, accuracy = self.validate()
            self.losses.append(loss)
            self.worker.offer_weights(lambda: gather_weights(self.model))
            self.worker.save_checkpoint(self.make_state)
            yield loss, {"accuracy": accuracy}
