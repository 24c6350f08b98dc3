"""ResNet-18 on CIFAR-10, Fashion-MNIST or handwritten digits. The last two take less time."""

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

# Fraction of all steps in which the learning rate rises, by schedule.
WARMUP = {"step": 0.0, "cosine": 0.05, "one-cycle": 0.3}

# Costs of the blocks for pipeline stages. Numbers of parameters are a poor estimate: layer4 has most of them.
COSTS = {f"layer{layer}.{block}": 1.0 for layer in range(1, 5) for block in range(2)}


@dataclass(frozen=True)
class Settings(ParallelSettings):
    """Settings of this search. A user changes them with --set, for example --set dataset=fashion-mnist."""

    dataset: str = "cifar10"
    """Name of the data set, which is cifar10, fashion-mnist or digits."""
    data_dir: str = "data"
    """Folder of the files of the data set. Missing files are downloaded into it. Not used for digits."""
    epochs: int = 30
    batch_size: int = 128
    """Size of the global batch, over all ranks."""
    patience: int = 0
    """Stop a training after this many epochs without a new lowest loss. 0 means never."""
    train_samples: int = 0
    """Number of training samples. 0 means all, which are 40,000 of CIFAR-10."""
    validation_samples: int = 0
    """Number of validation samples. 0 means all, which are 10,000 of CIFAR-10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dataset", self.dataset, ("cifar10", "fashion-mnist", "digits"))
        check_positive(self, "epochs", "batch_size")


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
        gamma=0.01 ** (1 / settings.epochs),  # The learning rate ends at 1% of lr.
        patience=settings.patience,
    )
    return fit(resnet18(data.image_shape, data.num_classes), data, worker, recipe, settings, COSTS)


def test(
    params: dict[str, Any],  # noqa: ARG001 - the architecture does not depend on hyperparameters
    weights: Mapping[str, Tensor],
    settings: Settings,
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best model. It is called once, after the search."""
    data = prepare(settings)  # Test images are normalised as in training.
    network = resnet18(data.image_shape, data.num_classes)
    network.load_state_dict(dict(weights))
    images = load_test_data(settings.dataset, settings.data_dir)
    if settings.validation_samples:  # A small search is tested on equally few images.
        images = LabelledImages(
            images.images[: settings.validation_samples], images.labels[: settings.validation_samples]
        )
    return evaluate_classifier(network, data, images)
