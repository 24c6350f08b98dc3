from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from hpo.training import ImageDataset
from search_spaces import cifar10_resnet

pytestmark = pytest.mark.slow  # torchvision is slow


def resnet18(image_shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    data = SimpleNamespace(image_shape=image_shape, num_classes=classes)
    return cifar10_resnet.build_network(cast(ImageDataset, data))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)])
def test_resnet18_has_torchvision_weight_names(shape: tuple[int, int, int]) -> None:
    import torchvision.models

    torch.manual_seed(0)
    network = resnet18(shape, 7)
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(num_classes=7)
    theirs.conv1, theirs.maxpool = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.Identity()
    theirs.load_state_dict(network.state_dict(), strict=True)
    images = torch.rand(5, *shape)
    torch.testing.assert_close(network.eval()(images), theirs.eval()(images))
    assert network(images).shape == (5, 7)
    assert network[:4](images).shape == (5, 64, *shape[1:]), "nothing is left out before the stages"


def test_resnet18_parts_match_torchvision_and_form_stages() -> None:
    network, images = resnet18((3, 32, 32), 10), torch.rand(4, 3, 32, 32)
    stages = ["layer1", "layer2", "layer3", "layer4"]
    names = ["conv1", "bn1", "relu", *stages, "avgpool", "flatten", "fc"]
    assert list(dict(network.named_children())) == names
    assert all(isinstance(network.get_submodule(stage), nn.Sequential) for stage in stages)
    network.eval()
    torch.testing.assert_close(network[5:](network[:5](images)), network(images))


def test_resnet18_learns_small_images() -> None:
    torch.manual_seed(0)
    network, images = resnet18((1, 8, 8), 2), torch.rand(16, 1, 8, 8)
    labels = (images.mean(dim=(1, 2, 3)) > images.mean()).long()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
