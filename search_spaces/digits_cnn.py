"""A small convolutional network on the handwritten digits of scikit-learn. It needs no download and no GPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpo import Categorical, Float, Int, Prediction, SearchSpace, Worker
from hpo.training import ImageDataset, check_positive, evaluate_net, fit_net, load_data, load_test_data

space = SearchSpace(
    conv_layers=Int(1, 6),
    activation=Categorical("relu", "sigmoid", "tanh"),
    lr=Float(0.05, 20.0, log=True, mutable=True),
    gamma=Float(0.5, 1.0, mutable=True),
)


@dataclass(frozen=True)
class Settings:
    """Settings of this search. A user changes them with --set, for example --set epochs=3."""

    epochs: int = 10
    batch_size: int = 64
    patience: int = 5

    def __post_init__(self) -> None:
        check_positive(self, "epochs", "batch_size", "patience")


def prepare(_: Settings) -> ImageDataset:
    """Load the data. It is called once per host before the search, and its result is `worker.data`."""
    return load_data("digits")


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one model on the ranks of a worker, and yield its validation loss and accuracy after each epoch."""
    return fit_net(params, worker, settings)


def test(
    params: dict[str, Any], weights: Mapping[str, Tensor], _: Settings
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best model. It is called once, after the search."""
    return evaluate_net(params, weights, load_data("digits"), load_test_data("digits"))
