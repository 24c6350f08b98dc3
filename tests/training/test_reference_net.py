from __future__ import annotations

import pytest
import torch
from torch import nn

from hpo.training import Net


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 20)])
@pytest.mark.parametrize("conv_layers", [1, 2, 10])
def test_net_has_the_requested_layers(shape: tuple[int, int, int], conv_layers: int) -> None:
    net = Net(shape, classes=7, conv_layers=conv_layers, activation="tanh")
    channels, height, width = shape
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.in_channels for layer in convolutions] == [channels] + [10] * (conv_layers - 1)
    assert {(layer.out_channels, layer.kernel_size, layer.padding) for layer in convolutions} == {(10, (3, 3), (1, 1))}
    assert sum(isinstance(layer, nn.Tanh) for layer in net.modules()) == conv_layers
    (linear,) = (layer for layer in net.modules() if isinstance(layer, nn.Linear))
    assert (linear.in_features, linear.out_features) == (10 * height * width, 7)
    output = net(torch.rand(5, *shape))
    assert output.shape == (5, 7)
    assert output.exp().sum(dim=1).tolist() == pytest.approx([1.0] * 5)


def test_net_with_wrong_arguments_raises() -> None:
    with pytest.raises(ValueError, match="relu, sigmoid, tanh, got 'gelu'"):
        Net((1, 8, 8), 10, conv_layers=2, activation="gelu")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Net((1, 8, 8), 10, conv_layers=0, activation="relu")
