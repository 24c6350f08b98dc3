"""Test the networks, the data and the tests of digits_cnn and mnist_cnn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpo.training import load_data, load_test_data
from search_spaces import digits_cnn, mnist_cnn


@pytest.mark.parametrize(("net", "size"), [(digits_cnn.Net, 8), (mnist_cnn.Net, 28)])
@pytest.mark.parametrize("conv_layers", [1, 2, 10])
def test_net_has_the_requested_layers(
    net: type[digits_cnn.Net], size: int, conv_layers: int
) -> None:
    network = net(conv_layers, "tanh")
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.in_channels for layer in convolutions] == [1] + [10] * (conv_layers - 1)
    assert {(layer.out_channels, layer.kernel_size, layer.padding) for layer in convolutions} == {
        (10, (3, 3), (1, 1))
    }
    assert sum(isinstance(layer, nn.Tanh) for layer in network.modules()) == conv_layers
    (linear,) = (layer for layer in network.modules() if isinstance(layer, nn.Linear))
    assert (linear.in_features, linear.out_features) == (10 * size * size, 10)
    output = network(torch.rand(5, 1, size, size))
    assert output.shape == (5, 10)
    assert output.exp().sum(dim=1).tolist() == pytest.approx([1.0] * 5)


def test_digits_of_digits_cnn_have_the_parts_of_load_data() -> None:
    data, test = load_data("digits"), load_test_data("digits")
    for part, split in {"train": data.train, "validation": data.validation, "test": test}.items():
        images, labels = digits_cnn.load_part(part)
        assert images.dtype == torch.float32
        np.testing.assert_allclose(
            images.numpy(), (split.images - data.mean) / data.std, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_array_equal(labels.numpy(), split.labels)
    prepared = digits_cnn.prepare(digits_cnn.Settings())
    assert list(prepared) == ["train", "validation"], "the search does not see test data"


def test_digits_cnn_tests_the_best_network_on_test_images() -> None:
    images = load_test_data("digits")
    data = load_data("digits")
    torch.manual_seed(0)
    network = digits_cnn.Net(1, "relu")
    params = {"conv_layers": 1, "activation": "relu"}
    metrics, predictions = digits_cnn.test(params, network.state_dict(), digits_cnn.Settings())
    with torch.no_grad():
        inputs = (torch.from_numpy(images.images).float() - torch.tensor(data.mean)) / torch.tensor(
            data.std
        )
        output, labels = network(inputs), torch.from_numpy(images.labels)
    assert metrics["loss"] == pytest.approx(
        torch.nn.functional.nll_loss(output, labels).item(), rel=1e-5
    )
    assert metrics["accuracy"] == pytest.approx((output.argmax(1) == labels).float().mean().item())
    wrong = [one for one in predictions if not one.is_correct]
    assert len(wrong) == len(predictions) - len(wrong) == 20
    assert [one.confidence for one in wrong] == sorted(
        (one.confidence for one in wrong), reverse=True
    )
    sure = output.exp().max(1)
    assert wrong[0].confidence == pytest.approx(
        sure.values[sure.indices != labels].max().item(), rel=1e-5
    )
    assert all(one.image.shape == (8, 8) and one.image.max() == 255 for one in predictions)
