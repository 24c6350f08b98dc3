"""What a run knows of itself when it breeds: which hyperparameters are tried or in flight, and what came of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpo.listing import list_individuals
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.parameters import Categorical, Int, Value
from hpo.rules import batches
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.store.evaluations import Evaluation

Vector = npt.NDArray[np.float64]

_SAME = 1e-9  # genes of integers on a logarithmic scale are further apart, up to a billion
_TRIES = 100  # random draws, before all hyperparameters that are left are listed
_MOST_TRIES = 10_000  # if they cannot be listed
_MOST_SECONDS = 60.0  # to list them, and for draws after that


class Past:
    """The evaluations of a run, on all islands; `source` returns those that started or ended since its last call.

    Nothing new is drawn once `is_stopping()` is true.

    ``tried`` are the genes of the evaluations that have ended by themselves, shape (evaluations, parameters), and
    ``costs`` what they have of each of the `objectives`, infinite where one failed; ``running`` the genes of those in
    flight. ``low`` and ``high`` are the limits of the genes, ``unordered`` says which genes are of categorical
    parameters, and ``continuous`` which may lie anywhere between their limits; all others are integers.
    """

    def __init__(
        self,
        space: SearchSpace,
        source: Callable[[], Iterable[Evaluation]],
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.space = space
        self.objectives = objectives
        self._source = source
        self._is_stopping = is_stopping
        self._left: list[dict[str, Value]] | None = None  # None until draws find nothing new
        limits = space.limits().values()
        self.low: Vector = np.array([low for low, _ in limits], float)
        self.high: Vector = np.array([high for _, high in limits], float)
        parameters = list(space.parameters.values())
        self.unordered = np.array([isinstance(parameter, Categorical) for parameter in parameters])
        self.continuous = np.array([parameter.continuous for parameter in parameters])
        self._whole = [(gene, one) for gene, one in enumerate(parameters) if isinstance(one, Int) and one.continuous]
        self._conditions = _conditions(space)
        self.listeners: list[Callable[[Evaluation], None]] = []
        self._count = 0
        self._places: dict[int, int] = {}  # of evaluations that are paused, by trial
        self._genes: Vector = np.empty((64, len(self.low)))
        self._costs: Vector = np.empty((64, len(objectives.names)))
        self._running: dict[int, Vector] = {}
        self._known: set[tuple[Value | None, ...]] = set()

    def update(self) -> None:
        """Take in the evaluations that have started or ended since the last update."""
        self.take(self._source())

    def take(self, evaluations: Iterable[Evaluation]) -> None:
        """Take in evaluations that have started or ended."""
        for evaluation in evaluations:
            for listener in self.listeners:
                listener(evaluation)
            self._known.add(self._key(evaluation.params))
            self._running.pop(evaluation.trial, None)
            if evaluation.state in ("running", "waiting"):
                self._running[evaluation.trial] = self.genes_of(evaluation.params)
            elif evaluation.finished:
                self._take(evaluation)

    @property
    def tried(self) -> Vector:
        """The genes of the evaluations that have ended by themselves, shape (evaluations, parameters)."""
        return self._genes[: self._count]

    @property
    def costs(self) -> Vector:
        """The costs of the evaluations that have ended by themselves, shape (evaluations, objectives)."""
        return self._costs[: self._count]

    @property
    def running(self) -> Vector:
        """The genes of the evaluations in flight, shape (evaluations, parameters)."""
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

    def allowed(self, genes: Vector, indices: Iterable[int], first: int = 1) -> Iterator[int]:
        """Yield the indices of the individuals, shape (individuals, parameters), that obey the rules of the space.

        Rules are asked about `first` individuals, then about twice as many, and so on, each time as they are needed.
        """
        if not self.space.rules:
            yield from indices
            return
        for batch in batches(indices, first):
            yield from compress(batch, self.space.allowed([self.params_of(genes[index]) for index in batch]))

    def rounded(self, genes: Vector) -> Vector:
        """Return the genes of individuals, shape (individuals, parameters), as those of the nearest values."""
        nearest = genes.copy()
        for gene, parameter in self._whole:
            values = np.clip(np.rint(np.exp(genes[:, gene])), parameter.low, parameter.high)
            nearest[:, gene] = np.log(values)
        return nearest

    def existing(self, genes: Vector) -> npt.NDArray[np.bool_]:
        """Tell of each individual's genes which belong to parameters that exist, both shape (individuals, parameters).

        Genes are those of values, as `rounded` returns them.
        """
        exist = np.ones(genes.shape, bool)
        for gene, other, values in self._conditions:
            first, behind = (np.searchsorted(values, genes[:, other] + shift) for shift in (-_SAME, _SAME))
            exist[:, gene] &= exist[:, other] & (first < behind)  # one of the values is the same
        return exist

    def draw_new(self, rng: random.Random) -> dict[str, Value] | None:
        """Return hyperparameters, drawn at random, that are new to the run; None if no such are left, or found.

        If draws find nothing new, all that are left are listed, once.
        """
        if self._left is None:
            if (params := self._draw(rng, _TRIES)) is not None or self._is_stopping():
                return params
            everything = list_individuals(self.space, math.inf, _MOST_SECONDS, self._is_stopping)
            if everything is None and (params := self._draw(rng, _MOST_TRIES, _MOST_SECONDS)) is not None:
                return params
            self._left = everything or []
        self._left = [params for params in self._left if not self.knows(params)]
        return rng.choice(self._left) if self._left else None

    def _draw(self, rng: random.Random, tries: int, seconds: float = math.inf) -> dict[str, Value] | None:
        """Return hyperparameters that are new to the run; None if some tries find none, or take too long."""
        until = time.monotonic() + seconds
        for params in islice(self.space.draws(rng), tries):
            if not self.knows(params):
                return params
            if self._is_stopping() or time.monotonic() > until:
                break
        return None

    def _key(self, params: Mapping[str, Any]) -> tuple[Value | None, ...]:
        return tuple(params.get(name) for name in self.space.parameters)

    def _take(self, evaluation: Evaluation) -> None:
        """Take in an evaluation that has ended, in the place of the paused one from which it was promoted."""
        place = None if evaluation.repeats is None else self._places.pop(evaluation.repeats, None)
        if place is None:
            place = self._count
            self._count += 1
        if place == len(self._costs):
            self._genes = np.concatenate([self._genes, np.empty_like(self._genes)])
            self._costs = np.concatenate([self._costs, np.empty_like(self._costs)])
        self._genes[place] = self.genes_of(evaluation.params)
        self._costs[place] = self.objectives.costs(evaluation.values)
        if evaluation.state == "paused":
            self._places[evaluation.trial] = place


def _conditions(space: SearchSpace) -> list[tuple[int, int, Vector]]:
    """Return each gene that depends on another, that other one, and the genes of which it must have one."""
    places = {name: place for place, name in enumerate(space.parameters)}
    return [
        (places[name], places[other], np.array(sorted(map(space.parameters[other].encode, values)), float))
        for name, condition in space.conditions.items()
        for other, values in condition.items()
    ]
