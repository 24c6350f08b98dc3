"""Evaluate a trained network on test data: compute metrics, sample predictions and generated text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hpo.prediction import Prediction, TextSample
from hpo.training.image_data import ImageDataset, ImagesOnDevice, LabelledImages
from hpo.training.parallel.strategy import split_by_size, sum_measures
from hpo.training.per_sample_losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.text_data import Pieces, TextDataset, TextOnDevice
from hpo.training.transformer import generate
from hpo.training.validation import select_predictions

_BATCH_SIZE = 256
_TEMPERATURE = 0.7  # A network that has learned little generates more readable text below 1.


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
    metrics = {
        "loss": F.nll_loss(output, labels).item(),
        "accuracy": (output.argmax(1) == labels).double().mean().item(),
    }
    return metrics, select_predictions(torch.from_numpy(test.images), output.exp(), labels, data.class_names)


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
