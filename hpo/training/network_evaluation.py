"""Judging a trained network by test data: metrics, images whose predictions are right or wrong, and written text."""

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
_TEMPERATURE = 0.7  # below 1: a network that has learnt little writes more of what it is sure of
_MAX_PREDICTIONS = 20  # right predictions at most, and as many wrong ones


def evaluate_net(
    params: Mapping[str, Any], weights: Mapping[str, torch.Tensor], data: ImageDataset, test: LabelledImages
) -> tuple[dict[str, float], list[Prediction]]:
    """Return what `judge` returns for a `Net` with these weights; `params` has its conv_layers and activation."""
    network = Net(data.image_shape, data.num_classes, params["conv_layers"], params["activation"])
    network.load_state_dict(dict(weights))
    return evaluate_classifier(network, data, test)


evaluate_net.__test__ = False  # type: ignore[attr-defined]


def evaluate_classifier(
    network: nn.Module, data: ImageDataset, test: LabelledImages
) -> tuple[dict[str, float], list[Prediction]]:
    """Return the mean loss and the accuracy of a network on test images, by their names, and some predictions.

    `network` returns logits or log-probabilities, shape (N, classes). The predictions are up to 20 wrong ones, those
    with the highest confidence, and up to 20 right ones, taken evenly from the images.
    """
    output = F.log_softmax(_compute_outputs(network, ImagesOnDevice(test, data, _choose_device())), dim=1)
    labels = torch.from_numpy(test.labels)
    sure, predicted = output.exp().max(dim=1)
    metrics = {
        "loss": F.nll_loss(output, labels).item(),
        "accuracy": (predicted == labels).double().mean().item(),
    }
    right, wrong = torch.nonzero(predicted == labels).flatten(), torch.nonzero(predicted != labels).flatten()
    worst = wrong[sure[wrong].argsort(descending=True)][:_MAX_PREDICTIONS]
    some = right[torch.linspace(0, max(0, len(right) - 1), min(_MAX_PREDICTIONS, len(right))).long()]
    shown = [
        Prediction(
            _make_picture(test.images[i]), data.class_names[labels[i]], data.class_names[predicted[i]], sure[i].item()
        )
        for i in [*worst.tolist(), *some.tolist()]
    ]
    return metrics, shown


@torch.no_grad()
def evaluate_language_model(
    network: nn.Module, text: TextDataset, test: Pieces, prompts: Sequence[str]
) -> tuple[dict[str, float], list[TextSample]]:
    """Return the mean loss of a network, in nats per character, and its accuracy on pieces of text; and what it writes.

    `network` is one that `transformer` returns, and `test` pieces, uint8 of shape (N, context + 1). It writes
    as many characters after each prompt as it reads, twice over.
    """
    pieces = TextOnDevice(test, _choose_device())
    network = network.to(pieces.device).eval()
    sums = torch.zeros(2, dtype=torch.float64, device=pieces.device)
    for batch in split_by_size(torch.arange(len(pieces)), _BATCH_SIZE):
        inputs, targets = pieces.get_batch(batch)
        sums += sum_measures(network(inputs), targets, [per_sample_cross_entropy, per_sample_accuracy])
    loss, right = (sums / len(pieces)).tolist()
    length = 2 * text.context
    written = [
        TextSample(prompt, generate(network, text, prompt, length, _TEMPERATURE, seed))
        for seed, prompt in enumerate(prompts)
    ]
    return {"loss": loss, "accuracy": right}, written


@torch.no_grad()
def _compute_outputs(network: nn.Module, images: ImagesOnDevice) -> torch.Tensor:
    network = network.to(images.device).eval()
    batches = split_by_size(torch.arange(len(images)), _BATCH_SIZE)
    return torch.cat([network(images.get_batch(batch)[0]).double().cpu() for batch in batches])


def _choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _make_picture(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return an image (channels, height, width) as one that can be shown, scaled to the whole range of a byte."""
    lowest, highest = int(image.min()), int(image.max())
    scaled = (image.astype(np.float32) - lowest) * (255 / max(1, highest - lowest))
    return np.moveaxis(scaled.astype(np.uint8), 0, -1).squeeze(-1 if image.shape[0] == 1 else ())
