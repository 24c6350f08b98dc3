"""ResNet-18 for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Make an untrained ResNet-18 (He et al. 2016) for small images, as a sequence of torchvision's parts.

    As usual for CIFAR-10, the first convolution is 3x3 with stride 1, and no pooling follows. The parts and the state
    dict have torchvision's names: `conv1`, `bn1`, `relu`, `layer1` to `layer4`, `avgpool`, `flatten`, `fc`. An image
    of 8x8 pixels is one pixel in `layer4`; batch normalisation then needs at least two images per batch in training.

    Args:
        image_shape: Channels, height and width of an image.
        classes: Number of classes.

    Returns:
        A network from images, shape (N, channels, height, width), to logits, shape (N, classes).

    Raises:
        ValueError: A size is less than 1.

    Example:
        ::

            network = resnet18(image_shape=(3, 32, 32), classes=10)
            network(torch.zeros(64, 3, 32, 32))  # shape (64, 10)
    """
    import torchvision.models  # The import takes 1.4 s of CPU time.

    if min(image_shape) < 1 or classes < 1:
        raise ValueError(f"image_shape and classes must be at least 1, got {image_shape} and {classes}")
    network = torchvision.models.resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(image_shape[0], 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # torchvision does the same.
    parts = OrderedDict(network.named_children())
    del parts["maxpool"]
    fc = parts.pop("fc")
    return nn.Sequential(OrderedDict([*parts.items(), ("flatten", nn.Flatten()), ("fc", fc)]))
