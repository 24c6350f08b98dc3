"""What a run knows of itself when it breeds: which hyperparameters are tried or in flight, and what came of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpo.space import Categorical, SearchSpace, Value

if TYPE_CHECKING:
    from hpo.store.trials import Evaluation

Vector = npt.NDArray[np.float64]

_TRIES = 100  # before the hyperparameters that are left are counted


class Past:
    """The evaluations of a run, on all of its islands; `source` gives those that have started or ended since.

    ``tried`` are the genes of what has ended by itself, shape (evaluations, parameters), and
    ``losses`` their losses, infinite where it failed; ``running`` the genes of what is in flight. ``low`` and ``high``
    are the limits of the genes, ``unordered`` says which are of categorical parameters.
    """

    def __init__(self, space: SearchSpace, source: Callable[[], Iterable[Evaluation]]) -> None:
        self.space = space
        self._source = source
        limits = space.limits().values()
        self.low: Vector = np.array([low for low, _ in limits], float)
        self.high: Vector = np.array([high for _, high in limits], float)
        self.unordered = np.array([isinstance(parameter, Categorical) for parameter in space.parameters.values()])
        self.listeners: list[Callable[[Evaluation], None]] = []
        self._count = 0
        self._genes: Vector = np.empty((64, len(self.low)))
        self._losses: Vector = np.empty(64)
        self._running: dict[int, Vector] = {}
        self._known: set[tuple[Value, ...]] = set()

    def update(self) -> None:
        """Learn what is new."""
        for evaluation in self._source():
            for listener in self.listeners:
                listener(evaluation)
            self._known.add(self._key(evaluation.params))
            self._running.pop(evaluation.trial, None)
            if evaluation.state in ("running", "waiting"):
                self._running[evaluation.trial] = self.genes_of(evaluation.params)
            elif evaluation.finished:
                self._append(self.genes_of(evaluation.params), evaluation.loss)

    @property
    def tried(self) -> Vector:
        """The genes of what has ended by itself."""
        return self._genes[: self._count]

    @property
    def losses(self) -> Vector:
        """The losses of what has ended by itself."""
        return self._losses[: self._count]

    @property
    def running(self) -> Vector:
        """The genes of what is in flight."""
        return np.array(list(self._running.values())).reshape(-1, len(self.low))

    def knows(self, params: Mapping[str, Value]) -> bool:
        """Tell whether these hyperparameters were tried, or are in flight."""
        return self._key(params) in self._known

    def genes_of(self, params: Mapping[str, Value]) -> Vector:
        """Return the genes of hyperparameters."""
        return np.array(list(self.space.encode(params).values()), float)

    def params_of(self, genes: Vector) -> dict[str, Value]:
        """Return the hyperparameters of genes."""
        return self.space.decode(dict(zip(self.space.parameters, genes.tolist(), strict=True)))

    def draw_new(self, rng: random.Random) -> dict[str, Value] | None:
        """Draw hyperparameters that are new to the run; None where there are none any more."""
        for _ in range(_TRIES):
            params = self.space.draw(rng)
            if not self.knows(params):
                return params
        if self.space.size > _TRIES * (1 + len(self._known)):
            return None  # almost all would be new: these are floats of a range with a few digits
        left = [params for params in self.space.everything() if not self.knows(params)]
        return rng.choice(left) if left else None

    def _key(self, params: Mapping[str, Any]) -> tuple[Value, ...]:
        return tuple(params[name] for name in self.space.parameters)

    def _append(self, genes: Vector, loss: float) -> None:
        if self._count == len(self._losses):
            self._genes = np.concatenate([self._genes, np.empty_like(self._genes)])
            self._losses = np.concatenate([self._losses, np.empty_like(self._losses)])
        self._genes[self._count], self._losses[self._count] = genes, loss
        self._count += 1
