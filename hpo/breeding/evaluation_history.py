"""Collect the evaluations of a run for propagators: known hyperparameters, samples for surrogates, and new draws."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpo.breeding.parent_pool import ParentPool
from hpo.breeding.surrogate_data import EvaluationRows, SurrogateSample, Vector
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.space import Categorical, Int, SearchSpace, Value
from hpo.space.constraints import iterate_batches
from hpo.space.search_space import list_individuals

if TYPE_CHECKING:
    from hpo.breeding.prior_model import PriorModel
    from hpo.store.evaluations import Evaluation

_LARGEST_GENE_ERROR = 1e-9  # Genes of integers up to a billion on a logarithmic scale differ by more.
_PRIOR_SHARE = 1 / 3  # Of random draws, unless evaluations contradict the priors (benchmarks/priors.md).
_PRIOR_TRIES = 20  # Draws from the priors before uniform ones.
_TRIES = 100  # Random draws before all remaining individuals are listed.
_MOST_TRIES = 10_000  # Random draws if the individuals cannot be listed.
_MOST_SECONDS = 60.0  # Time limit for the list, and for the draws after it.


class EvaluationHistory:
    """The evaluations of a run on all islands.

    With population based training, an evaluation may start from the checkpoint of another evaluation, its parent.
    Founders are evaluations without a parent, and heirs are evaluations with a parent. They are stored separately,
    because their losses cannot be compared.

    Args:
        source: A function that returns the evaluations that have started or ended since its previous call.
        is_stopping: A function that returns whether the run is being stopped. If so, no new hyperparameters are drawn.
        parent_pool: The possible parents. Default: an empty pool.
        compute_scarcity: A function of the number of ended evaluations, which returns how scarce time is, from 0 to 1.
            Default: never.

    Attributes:
        space: The search space of the run.
        parent_pool: The possible parents.
        objectives: The objectives of the run.
        low: The lower limits of the genes, shape `(genes,)`.
        high: The upper limits of the genes, shape `(genes,)`.
        unordered: Whether each gene belongs to a categorical parameter, shape `(genes,)`.
        mutable: Whether each gene of an heir may differ from the gene of its parent, shape `(genes,)`.
        continuous: Whether each gene may have any value between its limits, shape `(genes,)`. Other genes are integers.
        listeners: Functions that are called with each evaluation that has started or ended.
    """

    def __init__(
        self,
        space: SearchSpace,
        source: Callable[[], Iterable[Evaluation]],
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
        parent_pool: ParentPool | None = None,
        compute_scarcity: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self.space = space
        self.parent_pool = parent_pool or ParentPool(space)
        self.objectives = objectives
        self._read_new = source
        self._is_stopping = is_stopping
        self._compute_scarcity = compute_scarcity
        self._remaining: list[dict[str, Value]] | None = None  # None until random draws find nothing new.
        limits = space.list_gene_limits().values()
        self.low: Vector = np.array([low for low, _ in limits], float)
        self.high: Vector = np.array([high for _, high in limits], float)
        parameters = list(space.parameters.values())
        self.unordered = np.array([isinstance(parameter, Categorical) for parameter in parameters])
        self.mutable = np.array([parameter.mutable for parameter in parameters])
        self.continuous = np.array([parameter.is_continuous for parameter in parameters])
        self._logarithmic_ints = [
            (gene, parameter)
            for gene, parameter in enumerate(parameters)
            if isinstance(parameter, Int) and parameter.is_continuous
        ]
        self._conditions = _list_conditions(space)
        self.listeners: list[Callable[[Evaluation], None]] = []
        # Rows of heirs also have a context of two numbers: the parent's loss and the age.
        parts = (len(self.low), len(objectives.names))
        self._founders, self._heirs = EvaluationRows(*parts), EvaluationRows(*parts, 2)
        self._prior_model: PriorModel | None = None
        self._known: set[tuple[Value | None, ...]] = set()

    def update(self) -> None:
        """Add the evaluations that have started or ended since the previous call."""
        self.add_evaluations(self._read_new())

    def add_evaluations(self, evaluations: Iterable[Evaluation]) -> None:
        """Add evaluations that have started or ended."""
        for evaluation in evaluations:
            self.parent_pool.add_evaluation(evaluation)
            for listener in self.listeners:
                listener(evaluation)
            self._known.add(self._make_key(evaluation.params))
            self._prior_model = None  # It must be fitted again.
            for rows in (self._founders, self._heirs):
                rows.remove_running(evaluation.trial)
                if evaluation.state == "interrupted":
                    rows.remove_ended(evaluation.trial)
            self._add_row(evaluation)

    @property
    def ended_count(self) -> int:
        """The number of evaluations that ended by themselves (complete, pruned, paused or failed, not interrupted)."""
        return self._founders.count + self._heirs.count

    @property
    def time_scarcity(self) -> float:
        """How scarce time is: from 0, so that durations do not matter, to 1."""
        return self._compute_scarcity(self.ended_count)

    def make_founder_sample(self) -> SurrogateSample:
        """Return the founders (evaluations without a parent) as a sample for a surrogate.

        The costs of founders depend on their hyperparameters alone.
        """
        rows, (running, contexts) = self._founders, self._founders.running
        return SurrogateSample(rows.genes, rows.costs, running, rows.contexts, contexts, rows.seconds, np.empty(0))

    def make_heir_sample(self, parent: Evaluation) -> SurrogateSample:
        """Return the heirs (evaluations with a parent) as a sample for a surrogate.

        The sample also has the context of the next heir of `parent`. The cost of an heir is the change of the loss,
        relative to the parent's loss. The context of an heir is two numbers from 0 to 1. The first is the position of
        the parent's loss among the losses of all parents. The second is the number of ancestors, divided by the highest
        number.

        Args:
            parent: The parent of the next evaluation.
        """
        rows, (running, contexts) = self._heirs, self._heirs.running
        all_contexts = np.vstack([rows.contexts, contexts, [self.parent_pool.make_next_context(parent)]])
        all_contexts[:, 0] = np.unique(all_contexts[:, 0], return_inverse=True)[1]
        all_contexts /= np.maximum(all_contexts.max(axis=0), 1)
        return SurrogateSample(
            rows.genes,
            rows.costs,
            running,
            all_contexts[: rows.count],
            all_contexts[rows.count : -1],
            rows.seconds,
            all_contexts[-1],
        )

    def fit_prior_model(self) -> PriorModel | None:
        """Return the priors, and how far founders agree with them; None if the space has no priors."""
        if self._prior_model is None and self.space.priors:
            from hpo.breeding.prior_model import PriorModel  # Imports scipy.
            from hpo.breeding.success_model import find_informative

            sample = self.make_founder_sample()
            informative = find_informative(sample.succeeded)
            genes = sample.genes[informative]
            self._prior_model = PriorModel(self.space)
            self._prior_model.fit(genes, self.find_active(genes), sample.costs[informative])
        return self._prior_model

    @property
    def prior_share(self) -> float:
        """The share of random draws that are drawn from the priors. It is 0 if the space has none."""
        model = self.fit_prior_model()
        return 0.0 if model is None else _PRIOR_SHARE * model.trust

    def is_known(self, params: Mapping[str, Value]) -> bool:
        """Return whether the run has an evaluation of these hyperparameters, in any state."""
        return self._make_key(params) in self._known

    def encode_params(self, params: Mapping[str, Value]) -> Vector:
        """Return the genes (numbers) that encode hyperparameters, shape `(genes,)`."""
        return np.array(list(self.space.encode(params).values()), float)

    def decode_genes(self, genes: Vector) -> dict[str, Value]:
        """Return the hyperparameters that genes encode."""
        return self.space.decode(dict(zip(self.space.parameters, genes.tolist(), strict=True)))

    def iterate_allowed(self, genes: Vector, indices: Iterable[int], first_size: int = 1) -> Iterator[int]:
        """Yield the indices of individuals that satisfy the constraints of the search space.

        Constraints are checked in batches of growing size, each only when it is needed.

        Args:
            genes: The genes of all individuals, shape `(individuals, genes)`.
            indices: The indices of the individuals to check, in this order.
            first_size: The size of the first batch. Each further batch is twice as large.
        """
        if not self.space.constraint_texts:
            yield from indices
            return
        for batch in iterate_batches(indices, first_size):
            yield from compress(batch, self.space.are_allowed([self.decode_genes(genes[index]) for index in batch]))

    def round_genes(self, genes: Vector) -> Vector:
        """Return the genes that encode the nearest valid values, shape `(individuals, genes)`."""
        nearest = genes.copy()
        for gene, parameter in self._logarithmic_ints:
            values = np.clip(np.rint(np.exp(genes[:, gene])), parameter.low, parameter.high)
            nearest[:, gene] = np.log(values)
        return nearest

    def find_active(self, genes: Vector) -> npt.NDArray[np.bool_]:
        """Return whether each gene of each individual is active, shape `(individuals, genes)`.

        Args:
            genes: The genes, as `round_genes` returns them, shape `(individuals, genes)`.
        """
        active = np.ones(genes.shape, bool)
        for gene, parent, values in self._conditions:
            first, end = (
                np.searchsorted(values, genes[:, parent] + shift)
                for shift in (-_LARGEST_GENE_ERROR, _LARGEST_GENE_ERROR)
            )
            active[:, gene] &= active[:, parent] & (first < end)  # The gene equals one of the values.
        return active

    def draw_new(self, rng: random.Random) -> dict[str, Value] | None:
        """Draw random hyperparameters that are new to the run.

        If random draws find nothing new, all individuals of the space are listed once. New hyperparameters are then
        drawn from this list.

        Args:
            rng: The random number generator.

        Returns:
            The hyperparameters; None if nothing new is left or was found, or if the run is being stopped.
        """
        if self._remaining is None:
            if (params := self._draw_unknown(rng, _TRIES)) is not None or self._is_stopping():
                return params
            individuals = list_individuals(self.space, math.inf, _MOST_SECONDS, self._is_stopping)
            if individuals is None and (params := self._draw_unknown(rng, _MOST_TRIES, _MOST_SECONDS)) is not None:
                return params
            self._remaining = individuals or []
        self._remaining = [params for params in self._remaining if not self.is_known(params)]
        return rng.choice(self._remaining) if self._remaining else None

    def _draw_unknown(self, rng: random.Random, tries: int, seconds: float = math.inf) -> dict[str, Value] | None:
        """Return hyperparameters that are new to the run; None after too many tries or seconds."""
        until = time.monotonic() + seconds
        share = self.prior_share
        expected = self.space.draw_from_priors(rng, _PRIOR_TRIES) if share and rng.random() < share else []
        for params in chain(expected, islice(self.space.iterate_draws(rng), tries)):
            if not self.is_known(params):
                return params
            if self._is_stopping() or time.monotonic() > until:
                break
        return None

    def _make_key(self, params: Mapping[str, Any]) -> tuple[Value | None, ...]:
        return tuple(params.get(name) for name in self.space.parameters)

    def _add_row(self, evaluation: Evaluation) -> None:
        known = self.parent_pool.find_context(evaluation)
        rows, context = (self._founders, np.empty(0)) if known is None else (self._heirs, np.array(known))
        genes = self.encode_params(evaluation.params)
        if evaluation.state in ("running", "waiting"):
            rows.add_running(evaluation.trial, genes, context)
        elif evaluation.is_finished:
            values = evaluation.values if known is None else (self.parent_pool.compute_cost(evaluation),)
            # A pruned evaluation was short because it was bad, and another run may have had a faster machine.
            is_whole = evaluation.state == "complete" and not evaluation.imported_from
            seconds = np.array([evaluation.seconds if is_whole else math.nan])
            rows.add_ended(evaluation, genes, np.array(self.objectives.compute_costs(values)), context, seconds)


def _list_conditions(space: SearchSpace) -> list[tuple[int, int, Vector]]:
    """Return the conditions of genes: the gene's index, the index of another gene, and the values of the other gene.

    The gene is active only if the other gene has one of these values. If a gene has several conditions, all must hold.
    """
    indices = {name: index for index, name in enumerate(space.parameters)}
    return [
        (indices[name], indices[parent], np.array(sorted(map(space.parameters[parent].encode, values)), float))
        for name, condition in space.conditions.items()
        for parent, values in condition.items()
    ]
