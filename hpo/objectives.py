"""The objectives of a search: the loss, and metrics to be minimised or maximised.

The numbers that are reported for them are checked here.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hpo.text_format import make_printable

LOSS = "loss"
NOT_FINITE_PREFIX = "the validation loss is"
"""The start of the message about a loss that is not finite."""
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


def parse_objectives(objectives: Any) -> tuple[Objectives, str]:
    """Return the objectives that a user declares, and the name of the first if it is maximised.

    Raise a ValueError unless they are a tuple or list of names that begins with "loss", or with a
    metric that is maximised.
    """
    if not isinstance(objectives, (tuple, list)) or not objectives:
        raise ValueError(
            f"objectives must be a tuple of names, such as {_EXAMPLE_OBJECTIVES}, got "
            f"{objectives!r}"
        )
    first, *others = objectives
    score = ""
    if isinstance(first, MaximizedMetric) and first.name != LOSS:
        score = first.name
        objectives = [LOSS, *others]
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
    return Objectives(tuple(names), tuple(maximized)), score


def parse_report(loss: Any, metrics: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the loss and the metrics of a report as floats, without metrics that are not finite.

    Raises TypeError if the loss or a metric is not a number, and ValueError if the loss is not
    finite.
    """
    plain = unwrap_scalar(loss)
    if not isinstance(plain, Real):
        raise TypeError(f"the loss must be a number, got {reprlib.repr(loss)}")
    if not math.isfinite(plain):
        raise ValueError(f"{NOT_FINITE_PREFIX} {float(plain)}")
    finite = {}
    for name, metric in metrics.items():
        number = unwrap_scalar(metric)
        if not isinstance(number, Real):
            raise TypeError(f"metric {str(name)!r} must be a number, got {reprlib.repr(metric)}")
        if math.isfinite(number):
            finite[str(name)] = float(number)
    return float(plain), finite


def unwrap_scalar(value: Any) -> Any:
    """Return the number in a tensor or array of one element; return any other value unchanged.

    Errors of the device are raised: kernels run asynchronously, so this may be the first call that
    waits for them.
    """
    if not hasattr(value, "item"):
        return value
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    return value.item() if count == 1 else value
