"""The reference problem: `Net` and its four hyperparameters, trained on the data that a worker holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hpo.training.fit import Schedule, fit
from hpo.training.net import Net

if TYPE_CHECKING:
    from hpo.evaluation.worker import Worker


class FitSettings(Protocol):
    """Settings of a search over the reference network."""

    @property
    def epochs(self) -> int:
        """The most epochs to train."""
        ...

    @property
    def batch_size(self) -> int:
        """The global batch size."""
        ...

    @property
    def patience(self) -> int:
        """The epochs in a row without a new best loss after which training ends."""
        ...


def fit_net(
    params: Mapping[str, Any], worker: Worker, settings: FitSettings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train a `Net` on `worker.data`, a Dataset, and yield what `fit` yields.

    `params` has conv_layers, activation, lr and gamma; `settings` has epochs, batch_size and patience.
    """
    data = worker.data
    network = Net(data.image_shape, data.classes, params["conv_layers"], params["activation"])
    schedule = Schedule(settings.epochs, settings.batch_size, settings.patience, params["lr"], params["gamma"])
    return fit(network, data, worker, schedule)
