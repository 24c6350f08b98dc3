"""The reference network."""

from __future__ import annotations

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}

_CHANNELS = 10


class Net(nn.Module):
    """Convolutions of one width and a linear classifier, for images of any size.

    `conv_layers` convolutions (10 channels, 3x3, padding 1), each followed by the activation, one linear layer, and a
    log-softmax. Raises ValueError for less than one layer, or an activation that is none of relu, sigmoid and tanh.

    ::

        net = Net(image_shape=(1, 28, 28), classes=10, conv_layers=2, activation="relu")
        net(torch.zeros(64, 1, 28, 28))  # log-probabilities, shape (64, 10)
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int, conv_layers: int, activation: str) -> None:
        super().__init__()
        if conv_layers < 1:
            raise ValueError(f"conv_layers must be at least 1, not {conv_layers}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        for inputs in [channels] + [_CHANNELS] * (conv_layers - 1):
            layers += [nn.Conv2d(inputs, _CHANNELS, kernel_size=3, padding=1), ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(_CHANNELS * height * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities, shape (N, classes), of images, shape (N, C, H, W)."""
        features = self.features(images)
        return torch.log_softmax(self.classifier(features.flatten(start_dim=1)), dim=1)
