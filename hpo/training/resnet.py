"""ResNet-18 for small images."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Return torchvision's ResNet-18 (He et al. 2016) for small images, from scratch, as a sequence of its parts.

    As usual for CIFAR-10, the first convolution is 3x3 and takes each pixel, and no pooling follows. The sequence has
    torchvision's names, `conv1`, `bn1`, `relu`, `layer1` to `layer4`, `avgpool`, `flatten` and `fc`; and so has its
    state dict. `image_shape` is the channels, the height and the width of an image. It takes images (N, channels,
    height, width) and returns logits (N, classes). Images of 8x8 are one pixel in `layer4`: normalising these needs two
    images at least to train on.

    Raises ValueError for a size below 1.

    ::

        network = resnet18(image_shape=(3, 32, 32), classes=10)
        network(torch.zeros(64, 3, 32, 32))  # shape (64, 10)
    """
    import torchvision.models  # takes 1.4 s of CPU

    if min(image_shape) < 1 or classes < 1:
        raise ValueError(f"images of shape {image_shape} in {classes} classes: each size must be at least 1")
    network = torchvision.models.resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(image_shape[0], 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")  # as torchvision does
    parts = OrderedDict(network.named_children())
    del parts["maxpool"]
    fc = parts.pop("fc")
    return nn.Sequential(OrderedDict([*parts.items(), ("flatten", nn.Flatten()), ("fc", fc)]))
