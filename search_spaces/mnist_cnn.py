"""A convolutional network on MNIST, with the space of Propulate's PyTorch example."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from hpo import Categorical, Float, Int, Prediction, SearchSpace, Worker, training

space = SearchSpace(
    conv_layers=Int(2, 10),
    activation=Categorical("relu", "sigmoid", "tanh"),
    lr=Float(1e-4, 1e-2, mutable=True),
    gamma=Float(0.5, 0.999, mutable=True),
)

ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Settings:
    """Settings of this search. Set them with --set, for example --set dataset=fashion-mnist."""

    dataset: str = "mnist"
    """Name of the data set, which is mnist or fashion-mnist."""
    data_dir: str = "data"
    """Folder of the four IDX files, or of torchvision's data sets. Missing files are downloaded."""
    epochs: int = 20
    batch_size: int = 16
    """Samples of a training step, over all ranks."""
    patience: int = 5
    """Stop a training after this many epochs without a new lowest loss."""
    train_samples: int = 0
    """Number of training samples. 0 means all 50,000."""
    validation_samples: int = 0
    """Number of validation samples. 0 means all 10,000."""

    def __post_init__(self) -> None:
        training.check_choice("dataset", self.dataset, ("mnist", "fashion-mnist"))
        training.check_positive(self, "epochs", "batch_size", "patience")


class Net(nn.Module):
    """Convolutions of 10 channels, each with an activation, and a linear layer."""

    def __init__(self, conv_layers: int, activation: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in [1] + [10] * (conv_layers - 1):
            layers += [nn.Conv2d(channels, 10, kernel_size=3, padding=1), ACTIVATIONS[activation]()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(10 * 28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, shape (N, 1, 28, 28), to log-probabilities, shape (N, 10)."""
        return torch.log_softmax(self.classifier(self.features(images).flatten(1)), dim=1)


def prepare(settings: Settings) -> training.ImageDataset:
    """Load the data, once per host before the search. The result is `worker.data`."""
    return training.load_data(
        settings.dataset,
        settings.data_dir,
        train_samples=settings.train_samples,
        validation_samples=settings.validation_samples,
    )


def objective(
    params: dict[str, Any], worker: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network, and yield its validation loss and accuracy after each epoch."""
    train, validation = worker.data.splits(worker.device)
    network = Net(params["conv_layers"], params["activation"]).to(worker.device)
    network.to(memory_format=torch.channels_last)  # Convolutions are faster.
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adadelta(network.parameters(), lr=params["lr"], foreach=True)
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

    def measure(indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = validation.get_batch(indices)
        outputs = network(images)
        return nll_loss(outputs, labels, reduction="none"), outputs.argmax(1) == labels

    while len(losses) < settings.epochs:
        if training.should_stop_early(losses, settings.patience):
            break
        for batch in torch.randperm(len(train), generator=order).split(settings.batch_size):
            images, labels = train.get_batch(batch[worker.rank :: worker.size])
            optimizer.zero_grad()
            loss = nll_loss(model(images), labels, reduction="sum")
            (loss * worker.size / len(batch)).backward()  # DDP averages gradients over the ranks.
            optimizer.step()
        schedule.step()

        validation_loss, accuracy = training.compute_means(measure, len(validation), worker)
        losses.append(validation_loss)
        worker.offer_weights(network.state_dict())
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "order": order.get_state(), "losses": losses}
        worker.save_checkpoint(state)
        yield validation_loss, {"accuracy": accuracy}


@torch.no_grad()
def test(
    params: dict[str, Any], weights: dict[str, Tensor], settings: Settings
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best network. It is called once, after the search."""
    data = prepare(settings)  # Test images are normalised as in training.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    network = Net(params["conv_layers"], params["activation"]).to(device)
    network.load_state_dict(weights)
    pictures = training.load_test_data(settings.dataset, settings.data_dir)
    images, labels = training.ImagesOnDevice(pictures, data, device).get_batch(
        torch.arange(len(pictures))
    )
    outputs = torch.cat([network(batch) for batch in images.split(256)])
    metrics = {
        "loss": nll_loss(outputs, labels).item(),
        "accuracy": (outputs.argmax(1) == labels).double().mean().item(),
    }
    return metrics, training.select_predictions(
        torch.from_numpy(pictures.images), outputs.exp(), labels, data.class_names
    )
