"""The recipe of a training: optimizer, learning rate schedule, regularisation and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from hpo.training.augmentation import AUGMENTATIONS
from hpo.training.parallel.strategy import PerSampleFunction
from hpo.training.per_sample_losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.setting_checks import check_choice, check_positive

OPTIMIZERS = ("sgd", "adamw", "adadelta")
SCHEDULES = ("constant", "step", "cosine", "one-cycle")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training by `fit`.

    Fields that the chosen optimizer or schedule does not use are ignored, so they can be searched together.

    Raises:
        ValueError: A field has a value that is not allowed.

    Example:
        ::

            recipe = Recipe(epochs=10, batch_size=128, lr=1e-3, optimizer="adamw", schedule="cosine", warmup=0.1)
    """

    epochs: int
    """The largest number of epochs."""
    batch_size: int
    """The number of samples of the global batch, which the ranks share."""
    lr: float
    """The learning rate. With the schedules "cosine" and "one-cycle", it is the highest learning rate."""
    optimizer: str = "sgd"
    """The optimizer, "sgd" (Nesterov), "adamw" (Loshchilov and Hutter 2019) or "adadelta" (Zeiler 2012)."""
    momentum: float = 0.9
    """The momentum of the optimizer "sgd"."""
    weight_decay: float = 0.0
    """The weight decay. It does not apply to biases and to the parameters of norms."""
    schedule: str = "constant"
    """The learning rate schedule, "constant", "step", "cosine" or "one-cycle".

    "step" multiplies the learning rate by `gamma` after each epoch. "cosine" lowers it to 0 along half a cosine
    (Loshchilov and Hutter 2017), after a linear warmup. "one-cycle" raises it from ``lr / 25`` along half a cosine, and
    lowers it to almost 0 along another (Smith and Topin 2018).
    """
    gamma: float = 1.0
    """The factor by which the schedule "step" multiplies the learning rate after each epoch."""
    warmup: float = 0.0
    """The fraction of all steps in which "cosine" and "one-cycle" raise the learning rate, 0 to 1."""
    clip: float = 0.0
    """The maximum total norm of the gradients. Gradients with a larger norm are scaled down to it; 0 disables it."""
    label_smoothing: float = 0.0
    """The label smoothing in training, 0 to 1, only for the default `loss`."""
    augmentation: str = "none"
    """The augmentation of training images, "none", "crop" or "crop-and-flip"."""
    patience: int = 0
    """The training ends after this number of epochs in a row without a new lowest validation loss; 0 disables it."""
    validation_batch: int = 256
    """The number of samples that a rank evaluates at a time."""
    loss: PerSampleFunction = per_sample_cross_entropy
    """A function from outputs and targets to the loss of each sample, shape (N,)."""
    metrics: Mapping[str, PerSampleFunction] = field(default_factory=lambda: {"accuracy": per_sample_accuracy})
    """Metrics by their names. Each is a function like `loss`. Its mean over the validation part is reported."""

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("augmentation", self.augmentation, AUGMENTATIONS)
        check_positive(self, "epochs", "batch_size", "validation_batch")
        for name in ("lr", "momentum", "weight_decay", "gamma", "clip", "patience"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.label_smoothing and self.loss is not per_sample_cross_entropy:
            raise ValueError(
                f"label_smoothing must be 0 for a loss other than per_sample_cross_entropy, got {self.label_smoothing}"
            )

    @property
    def training_loss(self) -> PerSampleFunction:
        """The function that computes the loss of each sample in training."""
        return partial(per_sample_cross_entropy, smoothing=self.label_smoothing) if self.label_smoothing else self.loss


def make_optimizer(recipe: Recipe, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make the recipe's optimizer for named parameters."""
    trained = [p for _, p in parameters if p.requires_grad]
    # Biases and the weights of norms are vectors, and get no weight decay.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=recipe.momentum, nesterov=recipe.momentum > 0),
        "adamw": torch.optim.AdamW,
        "adadelta": torch.optim.Adadelta,
    }
    # Updating all parameters in one call saves 4% of the step of a small network, and 2% of a sharded one (two cores).
    # Fused AdamW needs real parameters; torch has no fused Adadelta, and no fused SGD for sharded parameters.
    fused = recipe.optimizer == "adamw" and all(p.is_floating_point() for p in trained)
    at_once = {"fused": True} if fused else {"foreach": True}
    # A pipeline stage has no trained parameters if its part of the network is frozen.
    used = [group for group in groups if group["params"]] or groups[:1]
    return kinds[recipe.optimizer](used, lr=recipe.lr, **at_once)


def make_lr_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LRScheduler:
    """Make the recipe's learning rate schedule; call its `step` after each training step."""
    steps = recipe.epochs * steps_per_epoch
    if recipe.schedule == "step":
        return StepLR(optimizer, steps_per_epoch, recipe.gamma)
    if recipe.schedule == "one-cycle":
        return OneCycleLR(optimizer, recipe.lr, steps, pct_start=recipe.warmup, cycle_momentum=False)
    if recipe.schedule == "cosine":
        return LambdaLR(optimizer, partial(_compute_cosine_factor, steps=steps, warmup=round(recipe.warmup * steps)))
    return LambdaLR(optimizer, lambda _: 1.0)


def _compute_cosine_factor(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
