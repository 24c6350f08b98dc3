"""The default propagator `ga`: a genetic search that screens the offspring with a surrogate.

The parents of offspring pass on genes. With population based training, `parent` also means the evaluation from whose
checkpoint another evaluation starts. An *heir* is an evaluation with such a parent, and a *founder* has none.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.propulate_compat import Individual, Propagator
from hpo.breeding.selection import collect_costs
from hpo.breeding.surrogate_data import SurrogateSample, Vector
from hpo.dominance import sort_best_first
from hpo.space import Gene, Value

if TYPE_CHECKING:
    from hpo.breeding.surrogate import Surrogate
    from hpo.store.evaluations import Evaluation

Mask = npt.NDArray[np.bool_]

_PARENTS = 10
_OFFSPRING = 100
_NEWCOMERS = 50  # Random candidates, screened together with the offspring, so that the whole space can be reached.
_GENERATIONS = 10  # Generations that are bred on the surrogate alone.
_PROMISING = 20  # Parents of these generations.
_FINEST_STEP = 1000.0  # The smallest step of a float is a thousandth of its range.


class GeneticPropagator(Propagator):  # type: ignore[misc]
    """Breeds candidates, and returns the candidate to which a surrogate gives the highest merit.

    Parents are the best of the island's population. Offspring take each gene from one of two parents (uniform
    crossover). At least one gene mutates, and each active gene mutates with probability 1 / active genes. A category
    mutates to any other category. A number moves by a step whose logarithm is uniform, so that all scales are equally
    likely (Muehlenbein and Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993). An inactive
    gene is inherited, and may mutate, too.

    The most promising candidates become the parents of further generations, which are not evaluated, and are judged
    only by the surrogate. Each worker has its own candidates and its own surrogate. All surrogates learn from all
    islands.

    Args:
        rng: The random number generator.
    """

    def __init__(self, history: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(-1, 1, rng)
        self._history = history
        self._limits = history.space.list_gene_limits()
        self._width: Vector = history.high - history.low
        self._is_grid = ~history.continuous & ~history.unordered
        self._is_movable = self._width > 0
        self._log_steps: Vector = np.log(np.where(self._is_grid, self._width + 1, _FINEST_STEP))
        self._finest_steps: Vector = self._width / _FINEST_STEP
        self._generator = np.random.default_rng(rng.getrandbits(64))

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual from the population of the island."""
        space = self._history.space
        genes = self._choose_genes(population)
        if genes is None:
            genes = space.encode(self._history.draw_new(self.rng) or space.draw(self.rng))
        return Individual(genes, self._limits)

    @cached_property
    def _surrogate(self) -> Surrogate:
        """The surrogate that learns from founders."""
        return self._make_surrogate(0)

    @cached_property
    def _heir_surrogate(self) -> Surrogate:
        """The surrogate that learns from heirs.

        It has two additional inputs, the context of an heir (see `EvaluationHistory.make_heir_sample`).
        """
        return self._make_surrogate(2)

    def _make_surrogate(self, context_size: int) -> Surrogate:
        from hpo.breeding.surrogate import Surrogate  # Imports scipy, which would delay each start by 0.15 s.

        return Surrogate(self._history, self._generator, context_size)

    @cached_property
    def _threads(self) -> ThreadpoolController:
        """Limits the threads of BLAS libraries. It finds only libraries that were loaded before its first use."""
        return ThreadpoolController()

    def _choose_genes(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of the best new candidate; None if too few evaluations have ended, or if none is new."""
        parents = self._select_parents(population)
        if self._history.ended_count <= len(self._width) or not len(parents):
            return None
        parent = self._history.parent_pool.draw_parent(self.rng)
        chosen = self._choose_founder(parents) if parent is None else None
        if chosen is None and self._history.parent_pool.parents:
            chosen = self._choose_heir(parent or self._history.parent_pool.parents[0], parents)
        return chosen

    def _choose_founder(self, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best new candidate for a founder, bred from `parents`; None if there is none."""
        sample = self._history.make_founder_sample()
        if not sample.succeeded.any():
            return None
        candidates = self._screen_candidates(self._surrogate, sample, parents, self._is_movable)
        return self._find_first_new(candidates, lambda params: self._history.parent_pool.find_parent(params) is None)

    def _choose_heir(self, parent: Evaluation, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best new candidate for an heir of `parent`; None if there is none.

        The candidate differs from `parent` only in mutable genes. These are bred from `parents`, or drawn at random
        while few heirs have ended. A candidate in which they activate an immutable gene has no parent, and is skipped.
        """

        def has_parent(params: dict[str, Value]) -> bool:
            return self._history.parent_pool.find_parent(params) is not None

        sample, mutable = self._history.make_heir_sample(parent), self._history.mutable
        own = self._history.encode_params(parent.params)
        if sample.succeeded.sum() <= mutable.sum():
            return self._find_first_new(np.where(mutable, self._draw_newcomers(), own), has_parent)
        same = np.unique(np.where(mutable, parents, own), axis=0)
        candidates = self._screen_candidates(self._heir_surrogate, sample, same, self._is_movable & mutable)
        return self._find_first_new(candidates, has_parent)

    def _find_first_new(
        self, candidates: Vector, is_wanted: Callable[[dict[str, Value]], bool] = lambda _: True
    ) -> dict[str, Gene] | None:
        """Return the genes of the first wanted candidate that is new to the run and satisfies the constraints."""
        history = self._history
        everything = ((index, history.decode_genes(genes)) for index, genes in enumerate(candidates))
        new = (index for index, params in everything if not history.is_known(params) and is_wanted(params))
        chosen = next(history.iterate_allowed(candidates, new), None)
        if chosen is None:
            return None
        return history.space.round_genes(dict(zip(self._limits, candidates[chosen].tolist(), strict=True)))

    def _screen_candidates(self, surrogate: Surrogate, sample: SurrogateSample, parents: Vector, free: Mask) -> Vector:
        """Return candidates that differ from parents only in `free` genes, the highest merit first."""
        # The matrices are small. One thread per core on all ranks of a host would take ten times longer.
        with self._threads.limit(limits=1, user_api="blas"):
            return self._breed_generations(surrogate.learn(sample), parents, free)

    def _breed_generations(self, compute_merits: Callable[..., Vector], parents: Vector, free: Mask) -> Vector:
        """Return the offspring of all generations and random newcomers, the highest merit first."""
        chances = self._draw_chances(1 + _GENERATIONS)
        newcomers = np.where(free, self._draw_newcomers(), parents[0])
        bred = [np.vstack([self._make_offspring(parents, next(chances), free), newcomers])]
        merits = [compute_merits(bred[0], precision=np.float32)]
        promising, hopes = self._select_promising(bred[0], merits[0])
        for chance in chances if len(promising) else ():
            bred.append(self._make_offspring(promising, chance, free))
            merits.append(compute_merits(bred[-1], hopes[-1] if len(hopes) == _PROMISING else -math.inf, np.float32))
            promising, hopes = self._select_promising(np.vstack([promising, bred[-1]]), np.append(hopes, merits[-1]))
        # Merits in single precision are inexact. For noiseless functions, they select another best candidate in up to
        # one of six suggestions.
        ahead = promising[np.argsort(-compute_merits(promising), kind="stable")] if len(promising) else promising
        return np.vstack([ahead, np.vstack(bred)[np.argsort(-np.concatenate(merits), kind="stable")]])

    def _select_promising(self, candidates: Vector, merits: Vector) -> tuple[Vector, Vector]:
        """Return at most 20 candidates that satisfy the constraints, and their merits, the best first."""
        allowed = self._history.iterate_allowed(candidates, np.argsort(-merits, kind="stable"), _PROMISING)
        best_first = np.fromiter(itertools.islice(allowed, _PROMISING), int)
        return candidates[best_first], merits[best_first]

    def _select_parents(self, population: list[Individual]) -> Vector:
        """Return the genes of the best individuals without duplicates, shape `(parents, genes)`.

        A population has duplicates, because islands exchange copies of individuals.
        """
        parents: dict[bytes, Vector] = {}
        for individual in self._rank_individuals(population):
            if len(parents) == _PARENTS:
                break
            parents.setdefault(individual.position.tobytes(), individual.position)
        return np.array(list(parents.values()), float)

    def _rank_individuals(self, population: list[Individual]) -> list[Individual]:
        """Return the individuals with a finite loss that can be parents, the best first."""
        losses = np.fromiter((individual.loss for individual in population), float, len(population))
        if self._history.objectives.is_multi_objective:
            succeeded = [population[index] for index in np.flatnonzero(np.isfinite(losses))]
            different = list({individual.position.tobytes(): individual for individual in succeeded}.values())
            return (
                [different[index] for index in sort_best_first(collect_costs(different), _PARENTS)] if different else []
            )
        # Parents have the lowest losses. Sorting all losses would take most of the time for 10,000 individuals.
        lowest = np.unique(losses[np.isfinite(losses)])[:_PARENTS]
        best = np.flatnonzero(np.isin(losses, lowest))
        return [population[index] for index in best[np.argsort(losses[best], kind="stable")]]

    def _draw_chances(self, generations: int) -> Iterator[tuple[Vector, ...]]:
        """Draw the random numbers for all generations at once, which is faster than separate draws.

        The iterator yields one tuple for each generation: the argument `chances` of `_make_offspring`.
        """
        draws, shape = self._generator, (generations, _OFFSPRING, len(self._width))
        mixing, mutating, choosing, moving, shifting = draws.random((5, *shape))
        signed = 2 * moving - 1
        sizes = np.exp(np.abs(signed) * self._log_steps)
        steps = np.copysign(np.where(self._is_grid, np.floor(sizes), sizes * self._finest_steps), signed)
        shifts = 1 + np.floor(shifting * np.maximum(self._width, 1))
        return zip(draws.random((generations, 2, _OFFSPRING)), mixing, mutating, choosing, steps, shifts, strict=True)

    def _make_offspring(self, parents: Vector, chances: tuple[Vector, ...], free: Mask) -> Vector:
        couples, mixing, mutating, choosing, steps, shifts = chances
        mothers, fathers = parents[(couples * len(parents)).astype(int)]
        offspring = np.where(mixing < 0.5, mothers, fathers)
        active = self._history.find_active(offspring)
        mutated = mutating < 1 / active.sum(axis=1, keepdims=True)
        mutated[np.arange(_OFFSPRING), np.argmax(choosing * (active & free), axis=1)] = True
        mutants: Vector = np.where(mutated & free, self._mutate_genes(offspring, steps, shifts), offspring)
        return self._history.round_genes(mutants)

    def _mutate_genes(self, genes: Vector, steps: Vector, shifts: Vector) -> Vector:
        """Return a mutation of each gene.

        Args:
            genes: The genes, shape `(individuals, genes)`.
            steps: Signed distances by which numerical genes move. A step that would leave the range is reversed.
            shifts: Numbers of choices by which categorical genes move, cyclically.
        """
        history, target = self._history, genes + steps
        reverse = np.maximum(np.minimum(genes - steps, history.high), history.low)
        moved = np.where((target < history.low) | (target > history.high), reverse, target)
        mutants: Vector = np.where(history.unordered, (genes + shifts) % (self._width + 1), moved)
        return mutants

    def _draw_newcomers(self) -> Vector:
        draws = self._generator.random((_NEWCOMERS, len(self._width)))
        whole = np.floor(draws * (self._width + 1))
        newcomers: Vector = self._history.low + np.where(self._history.continuous, draws * self._width, whole)
        if priors := self._history.fit_prior_model():
            expected = slice(round(_NEWCOMERS * self._history.prior_share))
            newcomers[expected] = priors.draw_genes(newcomers[expected], self._generator)
        return self._history.round_genes(newcomers)
