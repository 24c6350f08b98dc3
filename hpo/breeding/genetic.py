"""The default propagator `ga`: a genetic search that screens the offspring with a surrogate.

The parents of offspring pass on genes. With population based training, `parent` also means the
evaluation from whose checkpoint another evaluation starts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController

from hpo.breeding.encoding import Mask, Vector
from hpo.breeding.evaluation_history import EvaluationHistory, SurrogateSample
from hpo.breeding.population import Individual, collect_costs
from hpo.breeding.propagators import Propagator
from hpo.dominance import sort_best_first
from hpo.space import Gene, Value

if TYPE_CHECKING:
    from hpo.breeding.surrogate import Surrogate
    from hpo.store.evaluations import Evaluation

_PARENTS = 10
_OFFSPRING = 100
_NEWCOMERS = 50  # Random candidates, so that the whole space can be reached.
_GENERATIONS = 10  # Generations that are bred on the surrogate alone.
_PROMISING = 20  # Parents of these generations.
_FINEST_STEP = 1000.0  # The smallest step of a float is a thousandth of its range.


class GeneticPropagator(Propagator):
    """Breeds candidates, and returns the candidate to which a surrogate gives the highest merit.

    Parents are the best of the island's population. Offspring take each gene from one of two
    parents (uniform crossover). At least one gene mutates, and each active gene mutates with
    probability 1 / active genes. A category mutates to any other category. A number moves by a step
    whose logarithm is uniform, so that all scales are equally likely (Muehlenbein and
    Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993). An inactive gene
    of a parent is in the middle of its range, and may mutate, too.

    The most promising candidates become the parents of further generations, which are not
    evaluated, and are judged only by the surrogate. Each worker has its own candidates and its own
    surrogate. All surrogates learn from all islands.
    """

    def __init__(
        self, history: EvaluationHistory, rng: random.Random, worker: int = 0, workers: int = 1
    ) -> None:
        super().__init__(history, rng, worker, workers)
        self._encoding = history.encoding
        self._range: Vector = self._encoding.high - self._encoding.low
        self._is_grid = ~self._encoding.continuous & ~self._encoding.unordered
        self._is_movable = self._range > 0
        self._log_steps: Vector = np.log(np.where(self._is_grid, self._range + 1, _FINEST_STEP))
        self._finest_steps: Vector = self._range / _FINEST_STEP
        self._generator = np.random.default_rng(rng.getrandbits(64))
        self._surrogates: dict[int, Surrogate] = {}  # By the size of the context.

    def breed(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of the best new candidate.

        They are None if too few evaluations have ended, or if no candidate is new.
        """
        parents = self._select_parents(population)
        if self.history.ended_count <= len(self._range) or not len(parents):
            return None
        pool = self.history.parent_pool
        parent = pool.draw_parent(self.rng)
        if parent is None:
            sample = self.history.make_founder_sample()
            if sample.succeeded.any():
                candidates = self._screen_candidates(sample, parents, self._is_movable)
                if chosen := self._find_first_new(candidates, has_parent=False):
                    return chosen
        if pool.parents:
            return self._choose_heir(parent or pool.parents[0], parents)
        return None

    @cached_property
    def _threads(self) -> ThreadpoolController:
        """Limits the threads of BLAS libraries that were loaded before its first use."""
        return ThreadpoolController()

    def _choose_heir(self, parent: Evaluation, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best new heir of `parent`; None if there is none.

        The heir differs from `parent` only in mutable genes. These are bred from `parents`, or
        drawn at random while few heirs have ended. A candidate in which they activate an immutable
        gene has no parent, and is skipped.
        """
        sample = self.history.make_heir_sample(parent)
        mutable = self._encoding.mutable
        own = self._encoding.encode_params(parent.params)
        if sample.succeeded.sum() <= mutable.sum():
            candidates = np.where(mutable, self._draw_newcomers(), own)
        else:
            same = np.unique(np.where(mutable, parents, own), axis=0)
            free = self._is_movable & mutable
            candidates = self._screen_candidates(sample, same, free)
        return self._find_first_new(candidates, has_parent=True)

    def _find_first_new(self, candidates: Vector, has_parent: bool) -> dict[str, Gene] | None:
        """Return the genes of the first heir or founder that is new to the run and is allowed."""

        def is_wanted(params: dict[str, Value]) -> bool:
            is_heir = self.history.parent_pool.find_parent(params) is not None
            return not self.history.is_known(params) and is_heir == has_parent

        decode = self._encoding.decode_genes
        new = (index for index, genes in enumerate(candidates) if is_wanted(decode(genes)))
        chosen = next(self._encoding.iterate_allowed(candidates, new), None)
        return None if chosen is None else self._encoding.name_genes(candidates[chosen])

    def _screen_candidates(self, sample: SurrogateSample, parents: Vector, free: Mask) -> Vector:
        """Return candidates that differ from parents only in `free` genes, the best first."""
        # Imports scipy, which would delay each start by 0.15 s.
        from hpo.breeding.surrogate import Surrogate

        # One surrogate learns from founders, and one from heirs, with their contexts.
        context_size = len(sample.context)
        if context_size not in self._surrogates:
            surrogate = Surrogate(self.history, self._generator, context_size)
            self._surrogates[context_size] = surrogate
        # The matrices are small. One thread per core on all ranks of a host would take ten times
        # longer.
        with self._threads.limit(limits=1, user_api="blas"):
            compute_merits = self._surrogates[context_size].learn(sample)
            return self._breed_generations(compute_merits, parents, free)

    def _breed_generations(
        self, compute_merits: Callable[..., Vector], parents: Vector, free: Mask
    ) -> Vector:
        """Return the offspring of all generations and random newcomers, the best first."""
        chances = self._draw_chances(1 + _GENERATIONS)
        newcomers = np.where(free, self._draw_newcomers(), parents[0])
        bred = [np.vstack([self._make_offspring(parents, next(chances), free), newcomers])]
        merits = [compute_merits(bred[0], precision=np.float32)]
        promising, hopes = self._select_promising(bred[0], merits[0])
        for chance in chances if len(promising) else ():
            bred.append(self._make_offspring(promising, chance, free))
            useless = hopes[-1] if len(hopes) == _PROMISING else -math.inf
            merits.append(compute_merits(bred[-1], useless, np.float32))
            promising, hopes = self._select_promising(
                np.vstack([promising, bred[-1]]), np.append(hopes, merits[-1])
            )
        best_first = np.vstack(bred)[np.argsort(-np.concatenate(merits), kind="stable")]
        if not len(promising):
            return best_first
        # Merits in single precision are inexact. For noiseless functions, they select another best
        # candidate in up to one of six suggestions.
        ahead = promising[np.argsort(-compute_merits(promising), kind="stable")]
        return np.vstack([ahead, best_first])

    def _select_promising(self, candidates: Vector, merits: Vector) -> tuple[Vector, Vector]:
        """Return at most 20 candidates that are allowed, and their merits, the best first."""
        order = np.argsort(-merits, kind="stable")
        allowed = self._encoding.iterate_allowed(candidates, order, _PROMISING)
        best_first = np.fromiter(itertools.islice(allowed, _PROMISING), int)
        return candidates[best_first], merits[best_first]

    def _select_parents(self, population: list[Individual]) -> Vector:
        """Return the genes of the best individuals without duplicates, shape `(parents, genes)`.

        A population has duplicates, because islands exchange copies of individuals.
        """
        losses = np.fromiter((individual.loss for individual in population), float, len(population))
        is_finite = np.isfinite(losses)
        if self.history.objectives.is_multi_objective and is_finite.any():
            succeeded = [population[index] for index in np.flatnonzero(is_finite)]
            different = list({one.position.tobytes(): one for one in succeeded}.values())
            order = sort_best_first(collect_costs(different), _PARENTS)
            best_first = [different[index] for index in order]
        else:
            # Parents have the lowest losses. Sorting all losses would take most of the time for
            # 10,000 individuals.
            lowest = np.unique(losses[is_finite])[:_PARENTS]
            best = np.flatnonzero(np.isin(losses, lowest))
            order = best[np.argsort(losses[best], kind="stable")]
            best_first = [population[index] for index in order]
        parents: dict[bytes, Vector] = {}
        for individual in best_first:
            if len(parents) == _PARENTS:
                break
            parents.setdefault(individual.position.tobytes(), individual.position)
        return np.array(list(parents.values()), float)

    def _draw_chances(self, generations: int) -> Iterator[tuple[Vector, ...]]:
        """Draw the `chances` of each generation, all at once, which is faster."""
        draws = self._generator
        shape = (5, generations, _OFFSPRING, len(self._range))
        mixing, mutating, choosing, moving, shifting = draws.random(shape)
        signed = 2 * moving - 1
        sizes = np.exp(np.abs(signed) * self._log_steps)
        lengths = np.where(self._is_grid, np.floor(sizes), sizes * self._finest_steps)
        steps = np.copysign(lengths, signed)
        shifts = 1 + np.floor(shifting * np.maximum(self._range, 1))
        couples = draws.random((generations, 2, _OFFSPRING))
        return zip(couples, mixing, mutating, choosing, steps, shifts, strict=True)

    def _make_offspring(self, parents: Vector, chances: tuple[Vector, ...], free: Mask) -> Vector:
        couples, mixing, mutating, choosing, steps, shifts = chances
        mothers, fathers = parents[(couples * len(parents)).astype(int)]
        offspring = np.where(mixing < 0.5, mothers, fathers)
        active = self._encoding.find_active(offspring)
        mutated = mutating < 1 / active.sum(axis=1, keepdims=True)
        mutated[np.arange(_OFFSPRING), np.argmax(choosing * (active & free), axis=1)] = True
        low = self._encoding.low
        high = self._encoding.high
        # Numerical genes move by a step, which is reversed if it would leave the range.
        target = offspring + steps
        reverse = np.maximum(np.minimum(offspring - steps, high), low)
        moved = np.where((target < low) | (target > high), reverse, target)
        # Categorical genes move by a number of choices, cyclically.
        shifted = (offspring + shifts) % (self._range + 1)
        mutants = np.where(self._encoding.unordered, shifted, moved)
        return self._encoding.round_genes(np.where(mutated & free, mutants, offspring))

    def _draw_newcomers(self) -> Vector:
        draws = self._generator.random((_NEWCOMERS, len(self._range)))
        whole = np.floor(draws * (self._range + 1))
        distances = np.where(self._encoding.continuous, draws * self._range, whole)
        newcomers: Vector = self._encoding.low + distances
        if priors := self.history.fit_prior_model():
            expected = slice(round(_NEWCOMERS * self.history.prior_share))
            newcomers[expected] = priors.draw_genes(newcomers[expected], self._generator)
        return self._encoding.round_genes(newcomers)
