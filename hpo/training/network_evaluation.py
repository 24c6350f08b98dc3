"""Evaluate a trained network on test data: compute metrics, sample predictions and generated text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from hpo.prediction import Prediction, TextSample
from hpo.training.image_data import ImageDataset, ImagesOnDevice, LabelledImages
from hpo.training.parallel.strategy import split_by_size, sum_measures
from hpo.training.per_sample_losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.reference_net import Net
from hpo.training.text_data import Pieces, TextDataset, TextOnDevice
from hpo.training.transformer import generate

_BATCH_SIZE = 256
_TEMPERATURE = 0.7  # A network that has learned little generates more readable text below 1.
_MAX_PREDICTIONS = 20  # The most correct predictions, and the most wrong ones.


def evaluate_net(
    params: Mapping[str, Any], weights: Mapping[str, torch.Tensor], data: ImageDataset, test: LabelledImages
) -> tuple[dict[str, float], list[Prediction]]:
    """Evaluate a `Net` with given weights on test images.

    Args:
        params: The hyperparameters, with ``conv_layers`` and ``activation`` of the `Net`.
        weights: The state dict of the `Net`.
        data: The data set, for its classes, mean and standard deviation.
        test: The test images.

    Returns:
        The metrics ``"loss"`` and ``"accuracy"``, and sample predictions, as `evaluate_classifier` returns them.

    Raises:
        RuntimeError: The weights do not fit the `Net`.

    Example:
        ::

            def test(params, weights, settings):
                return evaluate_net(params, weights, load_data("digits"), load_test_data("digits"))
    """
    network = Net(data.image_shape, data.num_classes, params["conv_layers"], params["activation"])
    network.load_state_dict(dict(weights))
    return evaluate_classifier(network, data, test)


def evaluate_classifier(
    network: nn.Module, data: ImageDataset, test: LabelledImages
) -> tuple[dict[str, float], list[Prediction]]:
    """Evaluate an image classifier on test images, on a GPU if one is available.

    Args:
        network: A network from images, shape (N, channels, height, width), to logits or log-probabilities, shape
            (N, classes). It is moved to the device, and switched to evaluation mode.
        data: The data set, for its classes, mean and standard deviation.
        test: The test images.

    Returns:
        Metrics and sample predictions. The metrics are ``"loss"``, the mean cross-entropy in nats, and ``"accuracy"``,
        from 0 to 1. The predictions are the 20 wrong ones with the highest confidence, and 20 correct ones, evenly
        spaced.

    Example:
        ::

            def test(params, weights, settings):
                network = resnet18((3, 32, 32), classes=10)
                network.load_state_dict(weights)
                return evaluate_classifier(network, load_data("cifar10"), load_test_data("cifar10"))
    """
    output = F.log_softmax(_compute_outputs(network, ImagesOnDevice(test, data, _choose_device())), dim=1)
    labels = torch.from_numpy(test.labels)
    confidence, predicted = output.exp().max(dim=1)
    metrics = {
        "loss": F.nll_loss(output, labels).item(),
        "accuracy": (predicted == labels).double().mean().item(),
    }
    right, wrong = torch.nonzero(predicted == labels).flatten(), torch.nonzero(predicted != labels).flatten()
    worst = wrong[confidence[wrong].argsort(descending=True)][:_MAX_PREDICTIONS]
    correct = right[torch.linspace(0, max(0, len(right) - 1), min(_MAX_PREDICTIONS, len(right))).long()]
    predictions = [
        Prediction(
            _make_picture(test.images[i]),
            data.class_names[labels[i]],
            data.class_names[predicted[i]],
            confidence[i].item(),
        )
        for i in [*worst.tolist(), *correct.tolist()]
    ]
    return metrics, predictions


@torch.no_grad()
def evaluate_language_model(
    network: nn.Module, text: TextDataset, test: Pieces, prompts: Sequence[str]
) -> tuple[dict[str, float], list[TextSample]]:
    """Evaluate a character language model on test pieces, and generate text, on a GPU if one is available.

    Args:
        network: A network such as `make_transformer` returns. It is moved to the device, and switched to evaluation
            mode.
        text: The data set, for its symbols and its context.
        test: The test pieces, uint8 of shape (N, context + 1).
        prompts: The texts to continue.

    Returns:
        The metrics ``"loss"``, in nats per character, and ``"accuracy"``, 0 to 1; and for each prompt, a text of
        ``2 * text.context`` generated characters.

    Example:
        ::

            def test(params, weights, settings):
                text = load_text(context=128)
                network = make_transformer(text.vocabulary_size, 128, depth=4, width=128, heads=4, dropout=0.0)
                network.load_state_dict(weights)
                return evaluate_language_model(network, text, load_test_text(128), ["def ", "import "])
    """
    pieces = TextOnDevice(test, _choose_device())
    network = network.to(pieces.device).eval()
    sums = torch.zeros(2, dtype=torch.float64, device=pieces.device)
    for batch in split_by_size(torch.arange(len(pieces)), _BATCH_SIZE):
        inputs, targets = pieces.get_batch(batch)
        sums += sum_measures(network(inputs), targets, [per_sample_cross_entropy, per_sample_accuracy])
    loss, right = (sums / len(pieces)).tolist()
    length = 2 * text.context
    samples = [
        TextSample(prompt, generate(network, text, prompt, length, _TEMPERATURE, seed))
        for seed, prompt in enumerate(prompts)
    ]
    return {"loss": loss, "accuracy": right}, samples


@torch.no_grad()
def _compute_outputs(network: nn.Module, images: ImagesOnDevice) -> torch.Tensor:
    network = network.to(images.device).eval()
    batches = split_by_size(torch.arange(len(images)), _BATCH_SIZE)
    return torch.cat([network(images.get_batch(batch)[0]).double().cpu() for batch in batches])


def _choose_device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _make_picture(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an image (channels, height, width) for display, with its values scaled to 0 to 255."""
    lowest, highest = int(image.min()), int(image.max())
    scaled = (image.astype(np.float32) - lowest) * (255 / max(1, highest - lowest))
    return np.moveaxis(scaled.astype(np.uint8), 0, -1).squeeze(-1 if image.shape[0] == 1 else ())
