"""The network of the reference problem: a small convolutional classifier."""

from __future__ import annotations

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}

_CHANNELS = 10


class Net(nn.Module):
    """A convolutional classifier: convolutions (10 channels, 3x3, padding 1), one linear layer, and a log-softmax.

    An activation follows each convolution. Weights are torch's default initial weights.

    Args:
        image_shape: Channels, height and width of an image, in pixels.
        classes: Number of classes.
        conv_layers: Number of convolutions, at least 1.
        activation: "relu", "sigmoid" or "tanh".

    Raises:
        ValueError: `conv_layers` is less than 1, or `activation` is unknown.

    Example:
        ::

            net = Net(image_shape=(1, 28, 28), classes=10, conv_layers=2, activation="relu")
            net(torch.zeros(64, 1, 28, 28))  # log-probabilities, shape (64, 10)
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int, conv_layers: int, activation: str) -> None:
        super().__init__()
        if conv_layers < 1:
            raise ValueError(f"conv_layers must be at least 1, got {conv_layers}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        for inputs in [channels] + [_CHANNELS] * (conv_layers - 1):
            layers += [nn.Conv2d(inputs, _CHANNELS, kernel_size=3, padding=1), ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(_CHANNELS * height * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the log-probabilities of the classes.

        Args:
            images: Images, float of shape (N, channels, height, width).

        Returns:
            Log-probabilities, shape (N, classes).
        """
        features = self.features(images)
        return torch.log_softmax(self.classifier(features.flatten(start_dim=1)), dim=1)
