"""A convolutional network on MNIST or Fashion-MNIST, with the search space of Propulate's PyTorch example."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpo import Categorical, Float, Int, Prediction, SearchSpace, Worker
from hpo.training import ImageDataset, check_positive, evaluate_net, fit_net, load_data, load_test_data

space = SearchSpace(
    conv_layers=Int(2, 10),
    activation=Categorical("relu", "sigmoid", "tanh"),
    lr=Float(1e-4, 1e-2, mutable=True),
    gamma=Float(0.5, 0.999, mutable=True),
)


@dataclass(frozen=True)
class Settings:
    """Settings of this search. A user changes them with --set, for example --set dataset=fashion-mnist."""

    dataset: str = "mnist"
    """Name of the data set, which is mnist or fashion-mnist."""
    data_dir: str = "data"
    """Folder of the four IDX files, or the folder of torchvision's data sets. Missing files are downloaded into it."""
    epochs: int = 20
    batch_size: int = 16
    patience: int = 5
    train_samples: int = 0
    """Number of training samples. 0 means all 50,000."""
    validation_samples: int = 0
    """Number of validation samples. 0 means all 10,000."""

    def __post_init__(self) -> None:
        if self.dataset not in ("mnist", "fashion-mnist"):
            raise ValueError(f"dataset must be mnist or fashion-mnist, not {self.dataset}")
        check_positive(self, "epochs", "batch_size", "patience")


def prepare(settings: Settings) -> ImageDataset:
    """Load the data. It is called once per host before the search, and its result is `worker.data`."""
    return load_data(
        settings.dataset,
        settings.data_dir,
        train_samples=settings.train_samples,
        validation_samples=settings.validation_samples,
    )


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one model on the ranks of a worker, and yield its validation loss and accuracy after each epoch."""
    return fit_net(params, worker, settings)


def test(
    params: dict[str, Any], weights: Mapping[str, Tensor], settings: Settings
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best model. It is called once, after the search."""
    data = prepare(settings)  # Test images are normalised as in training.
    return evaluate_net(params, weights, data, load_test_data(settings.dataset, settings.data_dir))
