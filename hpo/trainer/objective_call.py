"""Call an objective on one rank: start it, run it from loss to loss, and close it."""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from hpo.process.user_frames import UserFrames, extract_generator_frames

if TYPE_CHECKING:
    from hpo.trainer.search_file import BoundSearch
    from hpo.trainer.worker import Worker


_NOT_FINITE_PREFIX = "the validation loss is"


class ObjectiveCall:
    """One call of the search file's objective with the hyperparameters `params`. The first `advance_to_loss` starts it.

    ``has_loss`` is whether a loss was yielded or reported, and ``has_ended`` whether the objective has ended.
    """

    def __init__(self, search: BoundSearch, params: Mapping[str, Any]) -> None:
        self._search = search
        self._params = dict(params)
        self._user_frames = UserFrames(search.file.location)
        self._losses: GeneratorType[Any, Any, Any] | None = None
        self.has_loss = False
        self.has_ended = False

    def advance_to_loss(self, worker: Worker) -> tuple[float, dict[str, float]] | None:
        """Run the objective to the next loss that it yields or returns, and return the loss with its metrics.

        Returns None if the objective has ended without another loss. If the objective has called `worker.report`, its
        return value is ignored.
        """
        if self.has_ended:
            return None
        if self._losses is None:
            result = self._search.call_objective(self._params, worker)
            if not isinstance(result, GeneratorType):
                self.has_ended = True
                return None if self.has_loss else parse_loss(result)
            self._losses = result
        try:
            value = next(self._losses)
        except StopIteration as end:
            self.has_ended = True
            if self.has_loss:
                return None
            value = end.value
            returned = "" if value is None else f", but returned {reprlib.repr(value)}: it has a yield somewhere"
            raise ValueError(f"the objective yielded no loss{returned}") from None
        self.has_loss = True
        return parse_loss(value)

    def list_frames(self) -> list[traceback.FrameSummary]:
        """Return the stack frames of the `yield` at which the objective waits; an empty list if it has returned."""
        return extract_generator_frames(self._losses) if self._losses is not None else []

    def call_gather_function(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function that the objective has passed to `offer_weights` or `save_checkpoint`.

        In a traceback, the frame of this method marks where the user's code begins.
        """
        return function()

    def find_line(self, frames: Sequence[traceback.FrameSummary]) -> str:
        """Return the innermost line of the user's code in these stack frames, such as "my_search.py:33".

        Without user code, return the innermost line of a library, or an empty text.
        """
        return self._user_frames.find_position(frames)

    def list_definition_frames(self) -> list[traceback.FrameSummary]:
        """Return a stack frame at the first line of the objective, for a failure that has no frame in the objective."""
        code = getattr(self._losses, "gi_code", None) or getattr(self._search.file.objective, "__code__", None)
        return [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)] if code else []

    def close(self) -> None:
        """End the objective if it has not ended by itself."""
        self.has_ended = True
        if self._losses is not None:
            self._losses.close()


def parse_loss(value: Any) -> tuple[float, dict[str, float]]:
    """Split a value that an objective has yielded, a loss or a tuple (loss, metrics), into the loss and finite metrics.

    Raises TypeError if the value is neither, and ValueError if the loss is not finite.
    """
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(_unwrap_scalar(loss), Real):
        raise TypeError(f"an objective must yield its validation loss, a number, got {reprlib.repr(value)}")
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a dict of numbers by name, got {reprlib.repr(metrics)}. Yield loss, {{'accuracy': 0.9}}"
        )
    return parse_report(loss, metrics)


def parse_report(loss: Any, metrics: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """Return the loss and the metrics of a report as floats. Metrics that are not finite are left out.

    Raises TypeError if the loss or a metric is not a number, and ValueError if the loss is not finite.
    """
    plain = _unwrap_scalar(loss)
    if not isinstance(plain, Real):
        raise TypeError(f"the loss of worker.report must be a number, got {reprlib.repr(loss)}")
    if not math.isfinite(plain):
        raise ValueError(f"{_NOT_FINITE_PREFIX} {float(plain)}")
    numbers = {str(name): _to_number(name, metric) for name, metric in metrics.items()}
    return float(plain), {name: metric for name, metric in numbers.items() if math.isfinite(metric)}


def has_diverged(error: BaseException) -> bool:
    """Return whether an error means that a loss is not finite."""
    return isinstance(error, ValueError) and bool(error.args) and str(error.args[0]).startswith(_NOT_FINITE_PREFIX)


def _to_number(name: object, metric: Any) -> float:
    plain = _unwrap_scalar(metric)
    if not isinstance(plain, Real):
        raise TypeError(f"metric {str(name)!r} must be a number, got {reprlib.repr(metric)}")
    return float(plain)


def _unwrap_scalar(value: Any) -> Any:
    """Return the number in a tensor or numpy array of one element; return any other value unchanged.

    Errors of the device are raised: kernels run asynchronously, so this may be the first call that waits for them.
    """
    if not hasattr(value, "item"):
        return value
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    return value.item() if count == 1 else value
