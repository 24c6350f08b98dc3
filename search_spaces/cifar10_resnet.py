"""ResNet-18 on CIFAR-10, or on Fashion-MNIST or handwritten digits, which need less time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpo import Categorical, Float, Prediction, SearchSpace, Worker
from hpo.training import (
    ImageDataset,
    LabelledImages,
    ParallelSettings,
    Recipe,
    check_choice,
    check_positive,
    evaluate_classifier,
    fit,
    load_data,
    load_test_data,
    resnet18,
)

space = SearchSpace(
    optimizer=Categorical("sgd", "adamw"),
    lr=Float(1e-2, 1.0, log=True, mutable=True, when={"optimizer": "sgd"}),
    momentum=Float(0.5, 0.99, mutable=True, when={"optimizer": "sgd"}),
    weight_decay=Float(1e-5, 1e-2, log=True, mutable=True, when={"optimizer": "sgd"}),
    adamw_lr=Float(1e-4, 1e-2, log=True, mutable=True, when={"optimizer": "adamw"}),
    adamw_decay=Float(1e-3, 1.0, log=True, mutable=True, when={"optimizer": "adamw"}),
    label_smoothing=Float(0.0, 0.2, mutable=True),
    augmentation=Categorical("none", "crop", "crop-and-flip"),
    schedule=Categorical("step", "cosine", "one-cycle"),
)

# The share of all steps in which the learning rate rises, before it falls as the schedule says.
WARMUP = {"step": 0.0, "cosine": 0.05, "one-cycle": 0.3}

# What the blocks cost to compute, for the stages of a pipeline: their parameters, most in layer4, say little of it.
COSTS = {f"layer{layer}.{block}": 1.0 for layer in range(1, 5) for block in range(2)}


@dataclass(frozen=True)
class Settings(ParallelSettings):
    """Options of this search: --set dataset=fashion-mnist."""

    dataset: str = "cifar10"
    """cifar10, fashion-mnist or digits"""
    data_dir: str = "data"
    """A folder that holds the data set's files, or into which they are downloaded; digits needs none."""
    epochs: int = 30
    batch_size: int = 128
    """The global batch, which the ranks share."""
    patience: int = 0
    """How many epochs in a row without a new best loss end a training; 0: none do"""
    train_samples: int = 0
    """0: all, 40,000 of CIFAR-10"""
    validation_samples: int = 0
    """0: all, 10,000 of CIFAR-10"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dataset", self.dataset, ("cifar10", "fashion-mnist", "digits"))
        check_positive(self, "epochs", "batch_size")


def prepare(settings: Settings) -> ImageDataset:
    """Load the data, once per host and before anything starts; the objective finds it as `worker.data`."""
    return load_data(
        settings.dataset,
        settings.data_dir,
        train_samples=settings.train_samples,
        validation_samples=settings.validation_samples,
    )


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network on the worker's ranks; yield its validation loss and accuracy after each epoch."""
    data, is_sgd = worker.data, params["optimizer"] == "sgd"
    recipe = Recipe(
        settings.epochs,
        settings.batch_size,
        params["lr"] if is_sgd else params["adamw_lr"],
        optimizer=params["optimizer"],
        momentum=params["momentum"] if is_sgd else 0.0,
        weight_decay=params["weight_decay"] if is_sgd else params["adamw_decay"],
        label_smoothing=params["label_smoothing"],
        augmentation=params["augmentation"],
        schedule=params["schedule"],
        warmup=WARMUP[params["schedule"]],
        gamma=0.01 ** (1 / settings.epochs),  # a hundredth at the end
        patience=settings.patience,
    )
    return fit(resnet18(data.image_shape, data.num_classes), data, worker, recipe, settings, COSTS)


def test(
    params: dict[str, Any],  # noqa: ARG001 - the network is always the same
    weights: Mapping[str, Tensor],
    settings: Settings,
) -> tuple[dict[str, float], list[Prediction]]:
    """Judge the best network by test images, which the search has not seen; called once, when the search has ended."""
    data = prepare(settings)  # the mean and the deviation that the network was trained with
    network = resnet18(data.image_shape, data.num_classes)
    network.load_state_dict(dict(weights))
    images = load_test_data(settings.dataset, settings.data_dir)
    if settings.validation_samples:  # a search that is kept small is tested with as many
        images = LabelledImages(
            images.images[: settings.validation_samples], images.labels[: settings.validation_samples]
        )
    return evaluate_classifier(network, data, images)
