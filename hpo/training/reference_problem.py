"""The reference problem: train a `Net` on the worker's data, with four hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hpo.training.fit import fit
from hpo.training.recipe import Recipe
from hpo.training.reference_net import Net

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker


class FitSettings(Protocol):
    """Settings of a search file that trains a `Net`."""

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        ...

    @property
    def batch_size(self) -> int:
        """The size of the global batch, in samples."""
        ...

    @property
    def patience(self) -> int:
        """The training ends after this number of epochs without a new lowest loss; 0 disables early stopping."""
        ...


def fit_net(
    params: Mapping[str, Any], worker: Worker, settings: FitSettings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a `Net` on `worker.data`, an `ImageDataset`, with Adadelta. Collective: call on all ranks.

    Before each yield, weights are offered and a checkpoint is saved, as in `fit`.

    Args:
        params: The hyperparameters: ``conv_layers`` and ``activation`` of the `Net`, the learning rate ``lr``, and
            ``gamma``, by which the learning rate is multiplied after each epoch.
        worker: The worker that the objective gets.
        settings: An object with the attributes ``epochs``, ``batch_size`` and ``patience``, as in `Recipe`.

    Returns:
        An iterator that trains one epoch per step, and yields the validation loss in nats and ``{"accuracy": ...}``.

    Raises:
        ValueError: A hyperparameter or a setting has a value that `Net` or `Recipe` does not accept.

    Example:
        ::

            def objective(params, worker, settings):
                return fit_net(params, worker, settings)
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
