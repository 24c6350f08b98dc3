"""The objectives of a search: the loss, and metrics to be minimised or maximised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.text_format import make_printable

LOSS = "loss"
_EXAMPLE_OBJECTIVES = 'objectives = ("loss", "parameters")'


@dataclass(frozen=True)
class MaximizedMetric:
    """A metric that is maximised. The function `maximize` returns it."""

    name: str


def maximize(name: str) -> MaximizedMetric:
    """Declare that a metric is to be maximised. Use it in the `objectives` of a search file.

    As the first objective, it is the score that the objective yields instead of a loss. The loss is
    then the negative score, and the score is a metric of this name.

    Args:
        name: The name of a metric that the objective reports with the loss.

    Returns:
        An entry for `objectives`.

    Example:
        ::

            objectives = ("loss", maximize("images_per_second"))
    """
    return MaximizedMetric(name)


@dataclass(frozen=True)
class Objectives:
    """The objectives of a search.

    The *values* of an individual are the loss and metrics that it reported, in the order of
    `names`. Its *costs* are the values with the opposite sign for each maximised objective, so that
    lower is always better.
    """

    names: tuple[str, ...] = (LOSS,)
    """The names of all objectives. The first is always the loss."""
    maximized: tuple[str, ...] = ()

    @property
    def is_multi_objective(self) -> bool:
        """Whether there are objectives in addition to the loss."""
        return len(self.names) > 1

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all objectives except the loss. Each is the name of a metric."""
        return self.names[1:]

    def find_missing(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the names of the objectives, except the loss, that are missing in `metrics`."""
        return [name for name in self.metric_names if name not in metrics]

    def select_metric_values(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return the values of all objectives except the loss, or () if a metric is missing."""
        if self.find_missing(metrics):
            return ()
        return tuple(float(metrics[name]) for name in self.metric_names)

    def compute_costs(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the costs of an individual from its values of all objectives.

        All costs are infinite if a value is missing or not finite.
        """
        if len(values) != len(self.names) or not all(map(math.isfinite, values)):
            return (math.inf,) * len(self.names)
        named = zip(self.names, values, strict=True)
        return tuple(-value if name in self.maximized else value for name, value in named)

    def describe(self) -> list[str]:
        """Return the name of each objective, followed by "(maximised)" if it is maximised."""
        return [
            make_printable(name) + (" (maximised)" if name in self.maximized else "")
            for name in self.names
        ]


ONLY_LOSS = Objectives()


def parse_objectives(objectives: Any) -> Objectives:
    """Return the objectives that a search file declares as `objectives`.

    Raise a ValueError unless it is a tuple or list of names that begins with "loss".
    """
    if not isinstance(objectives, (tuple, list)) or not objectives:
        raise ValueError(
            f"objectives must be a tuple of names, such as {_EXAMPLE_OBJECTIVES}, got "
            f"{objectives!r}"
        )
    names = [entry.name if isinstance(entry, MaximizedMetric) else entry for entry in objectives]
    for entry, name in zip(objectives, names, strict=True):
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"objectives must be names of metrics, such as {_EXAMPLE_OBJECTIVES}, got {entry!r}"
            )
    if objectives[0] != LOSS:
        raise ValueError(
            f"the first objective must be 'loss', got {objectives[0]!r}. The loss is minimised, "
            "and its lowest value shows when a network is at its best. "
            'For a score, write maximize("accuracy") instead'
        )
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"objectives must differ from each other, got {duplicate!r} twice")
    maximized = [entry.name for entry in objectives if isinstance(entry, MaximizedMetric)]
    return Objectives(tuple(names), tuple(maximized))
