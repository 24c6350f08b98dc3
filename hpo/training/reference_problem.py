"""The reference problem: `Net` and its four hyperparameters, trained on the data that a worker holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hpo.training.fit import fit
from hpo.training.recipe import Recipe
from hpo.training.reference_net import Net

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker


class FitSettings(Protocol):
    """Settings of a search space that trains a `Net`."""

    @property
    def epochs(self) -> int:
        """How long to train."""
        ...

    @property
    def batch_size(self) -> int:
        """The size of the global batch."""
        ...

    @property
    def patience(self) -> int:
        """How many epochs without a new best loss end the training."""
        ...


def fit_net(
    params: Mapping[str, Any], worker: Worker, settings: FitSettings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a `Net` on `worker.data`, a Dataset, and yield what `fit` yields.

    `params` has conv_layers, activation, lr and gamma; `settings` has epochs, batch_size and patience. As in the
    published problem, the optimizer is Adadelta, and `gamma` multiplies its rate after each epoch.
    """
    data = worker.data
    network = Net(data.image_shape, data.num_classes, params["conv_layers"], params["activation"])
    recipe = Recipe(
        settings.epochs,
        settings.batch_size,
        params["lr"],
        optimizer="adadelta",
        schedule="step",
        gamma=params["gamma"],
        patience=settings.patience,
    )
    return fit(network, data, worker, recipe)
