"""What a search minimises or maximises: the loss, and which of the metrics that are reported with it."""

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
    """A metric of which more is better."""

    name: str


def maximize(name: str) -> MaximizedMetric:
    """Mark a metric of which more is better, among the objectives of a search space file.

    ::

        objectives = ("loss", maximize("images_per_second"))
    """
    return MaximizedMetric(name)


@dataclass(frozen=True)
class Objectives:
    """The objectives of a search by their `names`, of which some are `maximized`; the first is always the loss.

    An individual's `values` are those that were reported, shape (objectives,), and its `costs` the same with the signs
    of those that are maximised turned round: the lower, the better.
    """

    names: tuple[str, ...] = (LOSS,)
    maximized: tuple[str, ...] = ()

    @property
    def is_multi_objective(self) -> bool:
        """Whether there is more to trade than the loss."""
        return len(self.names) > 1

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of all but the loss, which are names of metrics."""
        return self.names[1:]

    def find_missing(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the names of the objectives that are not among these metrics."""
        return [name for name in self.metric_names if name not in metrics]

    def select_metric_values(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return the values of all objectives but the loss; there are none where one of them is missing."""
        return () if self.find_missing(metrics) else tuple(float(metrics[name]) for name in self.metric_names)

    def compute_costs(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the costs of values; all are infinite where one is missing or not finite."""
        if len(values) != len(self.names) or not all(map(math.isfinite, values)):
            return (math.inf,) * len(self.names)
        return tuple(
            -value if name in self.maximized else value for name, value in zip(self.names, values, strict=True)
        )

    def describe(self) -> list[str]:
        """Return a text for each objective, in one line."""
        return [make_printable(name) + (" (maximised)" if name in self.maximized else "") for name in self.names]


ONLY_LOSS = Objectives()


def parse_objectives(objectives: Any) -> Objectives:
    """Return the objectives that a search space file declares; raises ValueError where they are not valid."""
    if not isinstance(objectives, (tuple, list)) or not objectives:
        raise ValueError(f"objectives must be a tuple of names, such as {_EXAMPLE_OBJECTIVES}, not {objectives!r}")
    names = [one.name if isinstance(one, MaximizedMetric) else one for one in objectives]
    for one, name in zip(objectives, names, strict=True):
        if not isinstance(name, str) or not name:
            raise ValueError(f"objectives must be names of metrics, such as {_EXAMPLE_OBJECTIVES}: {one!r} is none")
    if objectives[0] != LOSS:
        raise ValueError(
            f"the first of the objectives must be 'loss', not {objectives[0]!r}: the loss that is yielded says when a "
            "network is at its best, and is minimised"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"objectives name {twice!r} twice")
    return Objectives(tuple(names), tuple(one.name for one in objectives if isinstance(one, MaximizedMetric)))
