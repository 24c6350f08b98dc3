"""How a network is trained: optimizer, schedule of the learning rate, regularisation, and when to stop."""

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
    """How a network is trained; raises ValueError for values that cannot be.

    `batch_size` is the size of the global batch, which the ranks share. Training ends after `epochs` epochs, or after
    `patience` epochs in a row without a new best validation loss (0: it does not end early).

    `optimizer` is "sgd", with Nesterov's `momentum`, "adamw" (Loshchilov and Hutter 2019) or "adadelta" (Zeiler 2012).
    `weight_decay` is for weights alone, not for biases and the parameters of norms.

    `schedule` says what becomes of `lr`: "constant"; "step": times `gamma` after every epoch; "cosine": it falls to 0
    like half a cosine (Loshchilov and Hutter 2017); "one-cycle": it rises from a 25th like half a cosine, and falls to
    nothing like another (Smith and Topin 2018). The rise takes the share `warmup` of all steps; before a "cosine" it is
    linear. What a schedule or an optimizer has no use for is ignored, so that all of them can be searched together.

    `clip` is the largest norm of the gradients of all parameters (0: any). `loss` and `metrics` are functions of
    outputs and targets that return a number for each sample; `label_smoothing` is for training alone, and for
    cross-entropy. `augmentation`, of images, is "none", "crop" or "crop-and-flip". A rank computes `validation_batch`
    samples at a time where it takes no gradients.
    """

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    gamma: float = 1.0
    warmup: float = 0.0
    clip: float = 0.0
    label_smoothing: float = 0.0
    augmentation: str = "none"
    patience: int = 0
    validation_batch: int = 256
    loss: PerSampleFunction = per_sample_cross_entropy
    metrics: Mapping[str, PerSampleFunction] = field(default_factory=lambda: {"accuracy": per_sample_accuracy})

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("augmentation", self.augmentation, AUGMENTATIONS)
        check_positive(self, "epochs", "batch_size", "validation_batch")
        for name in ("lr", "momentum", "weight_decay", "gamma", "clip", "patience"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but it is {getattr(self, name)}")
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if self.label_smoothing and self.loss is not per_sample_cross_entropy:
            raise ValueError(f"label_smoothing={self.label_smoothing} is for cross-entropy, not for a loss of your own")

    @property
    def training_loss(self) -> PerSampleFunction:
        """The loss of a sample in training."""
        return partial(per_sample_cross_entropy, smoothing=self.label_smoothing) if self.label_smoothing else self.loss


def make_optimizer(recipe: Recipe, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the recipe's optimizer of these parameters, with their names."""
    trained = [p for _, p in parameters if p.requires_grad]
    # Biases, and the weights of norms, are vectors.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, momentum=recipe.momentum, nesterov=recipe.momentum > 0),
        "adamw": torch.optim.AdamW,
        "adadelta": torch.optim.Adadelta,
    }
    # One call for all parameters: a step of a small network takes 4% less, one of a network in shards 2% (two cores). A
    # fused AdamW is for real numbers; torch has no fused Adadelta, and no fused SGD of what is sharded.
    fused = recipe.optimizer == "adamw" and all(p.is_floating_point() for p in trained)
    at_once = {"fused": True} if fused else {"foreach": True}
    # A stage of a pipeline may have none, where a part of the network is not trained.
    used = [group for group in groups if group["params"]] or groups[:1]
    return kinds[recipe.optimizer](used, lr=recipe.lr, **at_once)


def make_lr_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LRScheduler:
    """Return the recipe's schedule, to be stepped after each training step."""
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
