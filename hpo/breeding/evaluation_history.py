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

from hpo.breeding.parent_pool import ParentPool
from hpo.breeding.surrogate_data import EvaluationRows, SurrogateSample, Vector
from hpo.constraint_set import iterate_batches
from hpo.listing import list_individuals
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.parameters import Categorical, Int, Value
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.store.evaluations import Evaluation

_LARGEST_GENE_ERROR = 1e-9  # genes of integers on a logarithmic scale are further apart, up to a billion
_TRIES = 100  # random draws, before all hyperparameters that are left are listed
_MOST_TRIES = 10_000  # if they cannot be listed
_MOST_SECONDS = 60.0  # to list them, and for draws after that


class EvaluationHistory:
    """The evaluations of a run, on all islands; `source` returns those that started or ended since its last call.

    Nothing new is drawn once `is_stopping()` is true.

    Heirs are apart from founders, which have no parent: their losses do not compare. ``lines`` has the parents.
    ``low`` and ``high`` are the limits of the genes. ``unordered`` marks genes of categorical parameters, ``mutable``
    genes that may differ from the parent's, and ``continuous`` genes that may lie anywhere between their limits. All
    others are integers.
    """

    def __init__(
        self,
        space: SearchSpace,
        source: Callable[[], Iterable[Evaluation]],
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
        parent_pool: ParentPool | None = None,
    ) -> None:
        self.space = space
        self.parent_pool = parent_pool or ParentPool(space)
        self.objectives = objectives
        self._read_new = source
        self._is_stopping = is_stopping
        self._remaining: list[dict[str, Value]] | None = None  # None until draws find nothing new
        limits = space.list_gene_limits().values()
        self.low: Vector = np.array([low for low, _ in limits], float)
        self.high: Vector = np.array([high for _, high in limits], float)
        parameters = list(space.parameters.values())
        self.unordered = np.array([isinstance(parameter, Categorical) for parameter in parameters])
        self.mutable = np.array([parameter.mutable for parameter in parameters])
        self.continuous = np.array([parameter.is_continuous for parameter in parameters])
        self._logarithmic_ints = [
            (gene, one) for gene, one in enumerate(parameters) if isinstance(one, Int) and one.is_continuous
        ]
        self._conditions = _list_conditions(space)
        self.listeners: list[Callable[[Evaluation], None]] = []
        # Their rows have the genes, the costs, and for heirs the context: the parent's loss and the age.
        parts = (len(self.low), len(objectives.names))
        self._founders, self._heirs = EvaluationRows(*parts), EvaluationRows(*parts, 2)
        self._known: set[tuple[Value | None, ...]] = set()

    def update(self) -> None:
        """Take in the evaluations that have started or ended since the last update."""
        self.add_evaluations(self._read_new())

    def add_evaluations(self, evaluations: Iterable[Evaluation]) -> None:
        """Take in evaluations that have started or ended."""
        for evaluation in evaluations:
            self.parent_pool.add_evaluation(evaluation)
            for listener in self.listeners:
                listener(evaluation)
            self._known.add(self._make_key(evaluation.params))
            for rows in (self._founders, self._heirs):
                rows.remove_running(evaluation.trial)
            self._add_row(evaluation)

    @property
    def ended_count(self) -> int:
        """The number of evaluations that have ended by themselves."""
        return self._founders.count + self._heirs.count

    def make_founder_sample(self) -> SurrogateSample:
        """Return the evaluations without a parent as a sample. The loss is the merit of the hyperparameters."""
        rows, (running, nothing) = self._founders, self._founders.running
        return SurrogateSample(rows.genes, rows.costs, running, rows.contexts, nothing, context=np.empty(0))

    def make_heir_sample(self, parent: Evaluation) -> SurrogateSample:
        """Return the evaluations that inherit, as a sample for the next one that inherits from `parent`.

        A cost is the change of the loss. A context has the rank of the parent's loss and the age, both from 0 to 1.
        """
        rows, (running, contexts) = self._heirs, self._heirs.running
        every = np.vstack([rows.contexts, contexts, [self.parent_pool.make_next_context(parent)]])
        every[:, 0] = np.unique(every[:, 0], return_inverse=True)[1]
        every /= np.maximum(every.max(axis=0), 1)
        return SurrogateSample(rows.genes, rows.costs, running, every[: rows.count], every[rows.count : -1], every[-1])

    def is_known(self, params: Mapping[str, Value]) -> bool:
        """Tell whether these hyperparameters were tried, or are in flight."""
        return self._make_key(params) in self._known

    def encode_params(self, params: Mapping[str, Value]) -> Vector:
        """Return the genes of hyperparameters."""
        return np.array(list(self.space.encode(params).values()), float)

    def decode_genes(self, genes: Vector) -> dict[str, Value]:
        """Return the hyperparameters of genes."""
        return self.space.decode(dict(zip(self.space.parameters, genes.tolist(), strict=True)))

    def iterate_allowed(self, genes: Vector, indices: Iterable[int], first_size: int = 1) -> Iterator[int]:
        """Yield the indices of the individuals, shape (individuals, parameters), that obey the rules of the space.

        Rules are asked about `first` individuals, then about twice as many, and so on, each time as they are needed.
        """
        if not self.space.constraint_texts:
            yield from indices
            return
        for batch in iterate_batches(indices, first_size):
            yield from compress(batch, self.space.are_allowed([self.decode_genes(genes[index]) for index in batch]))

    def round_genes(self, genes: Vector) -> Vector:
        """Return the genes of individuals, shape (individuals, parameters), as those of the nearest values."""
        nearest = genes.copy()
        for gene, parameter in self._logarithmic_ints:
            values = np.clip(np.rint(np.exp(genes[:, gene])), parameter.low, parameter.high)
            nearest[:, gene] = np.log(values)
        return nearest

    def find_active(self, genes: Vector) -> npt.NDArray[np.bool_]:
        """Tell of each individual's genes which belong to parameters that exist, both shape (individuals, parameters).

        Genes are those of values, as `rounded` returns them.
        """
        exist = np.ones(genes.shape, bool)
        for gene, other, values in self._conditions:
            first, behind = (
                np.searchsorted(values, genes[:, other] + shift)
                for shift in (-_LARGEST_GENE_ERROR, _LARGEST_GENE_ERROR)
            )
            exist[:, gene] &= exist[:, other] & (first < behind)  # one of the values is the same
        return exist

    def draw_new(self, rng: random.Random) -> dict[str, Value] | None:
        """Return hyperparameters, drawn at random, that are new to the run; None if no such are left, or found.

        If draws find nothing new, all that are left are listed, once.
        """
        if self._remaining is None:
            if (params := self._draw_unknown(rng, _TRIES)) is not None or self._is_stopping():
                return params
            everything = list_individuals(self.space, math.inf, _MOST_SECONDS, self._is_stopping)
            if everything is None and (params := self._draw_unknown(rng, _MOST_TRIES, _MOST_SECONDS)) is not None:
                return params
            self._remaining = everything or []
        self._remaining = [params for params in self._remaining if not self.is_known(params)]
        return rng.choice(self._remaining) if self._remaining else None

    def _draw_unknown(self, rng: random.Random, tries: int, seconds: float = math.inf) -> dict[str, Value] | None:
        """Return hyperparameters that are new to the run; None if some tries find none, or take too long."""
        until = time.monotonic() + seconds
        for params in islice(self.space.iterate_draws(rng), tries):
            if not self.is_known(params):
                return params
            if self._is_stopping() or time.monotonic() > until:
                break
        return None

    def _make_key(self, params: Mapping[str, Any]) -> tuple[Value | None, ...]:
        return tuple(params.get(name) for name in self.space.parameters)

    def _add_row(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the founders or to the heirs."""
        known = self.parent_pool.find_context(evaluation)
        rows, context = (self._founders, np.empty(0)) if known is None else (self._heirs, np.array(known))
        genes = self.encode_params(evaluation.params)
        if evaluation.state in ("running", "waiting"):
            rows.add_running(evaluation.trial, genes, context)
        elif evaluation.is_finished:
            values = evaluation.values if known is None else (self.parent_pool.compute_cost(evaluation),)
            rows.add_ended(evaluation, genes, np.array(self.objectives.compute_costs(values)), context)


def _list_conditions(space: SearchSpace) -> list[tuple[int, int, Vector]]:
    """Return each gene that depends on another, that other one, and the genes of which it must have one."""
    places = {name: place for place, name in enumerate(space.parameters)}
    return [
        (places[name], places[other], np.array(sorted(map(space.parameters[other].encode, values)), float))
        for name, condition in space.conditions.items()
        for other, values in condition.items()
    ]
