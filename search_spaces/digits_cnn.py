"""A small convolutional network on scikit-learn's digits. It needs no download or GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from hpo import Categorical, Float, Int, Prediction, SearchSpace, Worker
from hpo.training import check_positive, compute_means, select_predictions, should_stop_early

space = SearchSpace(
    conv_layers=Int(1, 6),
    activation=Categorical("relu", "sigmoid", "tanh"),
    lr=Float(0.05, 20.0, log=True, mutable=True),
    gamma=Float(0.5, 1.0, mutable=True),
)

ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Settings:
    """Settings of this search. A user changes them with --set, for example --set epochs=3."""

    epochs: int = 10
    batch_size: int = 64
    """Samples of a training step, over all ranks."""
    patience: int = 5
    """Stop a training after this many epochs without a new lowest loss."""

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch_size", "patience")


class Net(nn.Module):
    """Convolutions with activations, and a linear layer that gives log-probabilities."""

    def __init__(self, conv_layers: int, activation: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in [1] + [10] * (conv_layers - 1):
            layers += [nn.Conv2d(channels, 10, kernel_size=3, padding=1), ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(10 * 8 * 8, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, shape (N, 1, 8, 8), to log-probabilities, shape (N, 10)."""
        return torch.log_softmax(self.classifier(self.features(images).flatten(1)), dim=1)


def load_part(part: str) -> tuple[Tensor, Tensor]:
    """Load images, shape (N, 1, 8, 8), and labels: "train", "validation" or "test"."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    tests = np.arange(4, len(digits.target), 5)
    others = np.random.default_rng(0).permutation(
        np.setdiff1d(np.arange(len(digits.target)), tests)
    )
    parts = {"train": others[360:], "validation": others[:360], "test": tests}
    train = digits.images[parts["train"]]
    images = (digits.images[parts[part], None] - train.mean()) / train.std()
    return torch.from_numpy(images).float(), torch.from_numpy(digits.target[parts[part]])


def prepare(_: Settings) -> dict[str, tuple[Tensor, Tensor]]:
    """Load the data, once per host before the search. The result is `worker.data`."""
    return {part: load_part(part) for part in ("train", "validation")}


def objective(
    params: dict[str, Any], worker: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network, and yield its validation loss and accuracy after each epoch."""
    images, labels = (tensor.to(worker.device) for tensor in worker.data["train"])
    network = Net(params["conv_layers"], params["activation"]).to(worker.device)
    network.to(memory_format=torch.channels_last)  # Convolutions are faster.
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adadelta(network.parameters(), lr=params["lr"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, params["gamma"])
    order = torch.Generator().manual_seed(worker.seed)  # The same order of samples on all ranks.
    losses: list[float] = []

    if state := worker.checkpoint:  # It was interrupted.
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        order.set_state(state["order"])
        losses = state["losses"]
    # With --pbt, it continues its parent's training, with its own lr.
    elif parent := worker.parent_checkpoint:
        network.load_state_dict(parent["network"])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": parent["optimizer"]["state"]})
        order.set_state(parent["order"])

    while len(losses) < settings.epochs and not should_stop_early(losses, settings.patience):
        for batch in torch.randperm(len(labels), generator=order).split(settings.batch_size):
            mine = batch[worker.rank :: worker.size]  # The last batch may have none for this rank.
            optimizer.zero_grad()
            loss = nll_loss(model(images[mine]), labels[mine], reduction="sum")
            (loss * worker.size / len(batch)).backward()  # DDP averages gradients over the ranks.
            optimizer.step()
        schedule.step()

        validation_loss, accuracy = validate(network, worker)
        losses.append(validation_loss)
        worker.offer_weights(network.state_dict())
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "order": order.get_state(), "losses": losses}
        worker.save_checkpoint(state)
        yield validation_loss, {"accuracy": accuracy}


def validate(network: Net, worker: Worker) -> list[float]:
    """Return the mean loss and the accuracy. The ranks share the samples."""
    images, labels = (tensor.to(worker.device) for tensor in worker.data["validation"])

    def measure(indices: Tensor) -> tuple[Tensor, Tensor]:
        outputs = network(images[indices])
        return nll_loss(outputs, labels[indices], reduction="none"), outputs.argmax(1) == labels[
            indices
        ]

    return compute_means(measure, len(labels), worker)


def test(
    params: dict[str, Any], weights: dict[str, Tensor], _: Settings
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best network. It is called once, after the search."""
    images, labels = load_part("test")
    network = Net(params["conv_layers"], params["activation"])
    network.load_state_dict(weights)
    with torch.no_grad():
        outputs = network(images)
    metrics = {
        "loss": nll_loss(outputs, labels).item(),
        "accuracy": (outputs.argmax(1) == labels).double().mean().item(),
    }
    return metrics, select_predictions(images, outputs.exp(), labels, "0123456789")
