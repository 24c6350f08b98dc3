"""The default propagator: a genetic search whose offspring is screened by a surrogate of all evaluations of the run."""

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
from hpo.parameters import Gene, Value

if TYPE_CHECKING:
    from hpo.breeding.surrogate import Surrogate
    from hpo.store.evaluations import Evaluation

Mask = npt.NDArray[np.bool_]

_PARENTS = 10
_OFFSPRING = 100
_NEWCOMERS = 50  # drawn at random and screened along with the offspring, so that nothing is out of reach
_GENERATIONS = 10  # for which the most promising are bred on, on the surrogate
_PROMISING = 20
_FINEST_STEP = 1000.0  # of a float: a thousandth of its range


class GeneticPropagator(Propagator):  # type: ignore[misc]
    """Breeds many individuals, and returns the one of which a surrogate hopes most.

    Parents are the best of the island's population. Offspring take each gene from one of two parents (uniform
    crossover), and one gene or more is mutated, each with probability 1 / genes, of those that exist: a category
    becomes any other, a number moves by a step whose logarithm is uniform, so that small steps are as likely as large
    ones at every scale (Muehlenbein and Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993).
    A gene that does not exist is inherited, and may mutate, all the same.

    The most promising candidates are bred on for some generations, on the surrogate alone. Each worker has candidates
    and a surrogate of its own; all surrogates know all islands.
    """

    def __init__(self, past: EvaluationHistory, rng: random.Random) -> None:
        super().__init__(-1, 1, rng)
        self._history = past
        self._limits = past.space.list_gene_limits()
        self._width: Vector = past.high - past.low
        self._is_grid = ~past.continuous & ~past.unordered
        self._is_movable = self._width > 0
        self._log_steps: Vector = np.log(np.where(self._is_grid, self._width + 1, _FINEST_STEP))
        self._finest_steps: Vector = self._width / _FINEST_STEP
        self._generator = np.random.default_rng(rng.getrandbits(64))

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        space = self._history.space
        genes = self._choose_genes(population)
        if genes is None:
            genes = space.encode(self._history.draw_new(self.rng) or space.draw(self.rng))
        return Individual(genes, self._limits)

    @cached_property
    def _surrogate(self) -> Surrogate:
        """The surrogate of evaluations without a parent."""
        return self._make_surrogate(0)

    @cached_property
    def _heir_surrogate(self) -> Surrogate:
        """The surrogate of evaluations that inherit. It also uses the parent's loss and the age."""
        return self._make_surrogate(2)

    def _make_surrogate(self, context_size: int) -> Surrogate:
        """Import scipy when it is needed: it would delay each start by 0.15 s."""
        from hpo.breeding.surrogate import Surrogate

        return Surrogate(self._history, self._generator, context_size)

    @cached_property
    def _threads(self) -> ThreadpoolController:
        """The threads of the libraries that are loaded when this is first asked for."""
        return ThreadpoolController()

    def _choose_genes(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that is new; None if too little is known, or no candidate is."""
        parents = self._select_parents(population)
        if self._history.ended_count <= len(self._width) or not len(parents):
            return None
        parent = self._history.parent_pool.draw_parent(self.rng)
        chosen = self._choose_founder(parents) if parent is None else None
        if chosen is None and self._history.parent_pool.parents:
            chosen = self._choose_heir(parent or self._history.parent_pool.parents[0], parents)
        return chosen

    def _choose_founder(self, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that has no parent."""
        sample = self._history.make_founder_sample()
        if not len(sample.costs):
            return None
        candidates = self._screen_candidates(self._surrogate, sample, parents, self._is_movable)
        return self._find_first_new(candidates, lambda params: self._history.parent_pool.find_parent(params) is None)

    def _choose_heir(self, parent: Evaluation, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that inherits from a parent: only mutable genes differ."""
        sample, mutable = self._history.make_heir_sample(parent), self._history.mutable
        own = self._history.encode_params(parent.params)
        if len(sample.costs) <= mutable.sum():
            return self._find_first_new(np.where(mutable, self._draw_newcomers(), own))
        same = np.unique(np.where(mutable, parents, own), axis=0)
        return self._find_first_new(
            self._screen_candidates(self._heir_surrogate, sample, same, self._is_movable & mutable)
        )

    def _find_first_new(
        self, candidates: Vector, is_wanted: Callable[[dict[str, Value]], bool] = lambda _: True
    ) -> dict[str, Gene] | None:
        """Return the genes of the first candidate that is new to the run, wanted, and obeys the rules of the space."""
        past = self._history
        everything = ((index, past.decode_genes(genes)) for index, genes in enumerate(candidates))
        new = (index for index, params in everything if not past.is_known(params) and is_wanted(params))
        chosen = next(past.iterate_allowed(candidates, new), None)
        if chosen is None:
            return None
        return past.space.round_genes(dict(zip(self._limits, candidates[chosen].tolist(), strict=True)))

    def _screen_candidates(self, surrogate: Surrogate, sample: SurrogateSample, parents: Vector, free: Mask) -> Vector:
        """Return candidates that differ from parents in `free` genes, the best first by a surrogate of a sample."""
        # The matrices are small: if all ranks of a host used a thread per core, this would take ten times longer.
        with self._threads.limit(limits=1, user_api="blas"):
            return self._breed_generations(surrogate.learn(sample), parents, free)

    def _breed_generations(self, compute_merits: Callable[..., Vector], parents: Vector, free: Mask) -> Vector:
        """Return offspring, newcomers, and what some generations bred of the most promising of them, the best first."""
        chances = self._draw_chances(1 + _GENERATIONS)
        newcomers = np.where(free, self._draw_newcomers(), parents[0])
        bred = [np.vstack([self._make_offspring(parents, next(chances), free), newcomers])]
        merits = [compute_merits(bred[0], precision=np.float32)]
        promising, hopes = self._select_promising(bred[0], merits[0])
        for chance in chances if len(promising) else ():
            bred.append(self._make_offspring(promising, chance, free))
            merits.append(compute_merits(bred[-1], hopes[-1] if len(hopes) == _PROMISING else -math.inf, np.float32))
            promising, hopes = self._select_promising(np.vstack([promising, bred[-1]]), np.append(hopes, merits[-1]))
        # Of noiseless functions, screening takes another one than the best for it in up to one of six suggestions.
        ahead = promising[np.argsort(-compute_merits(promising), kind="stable")] if len(promising) else promising
        return np.vstack([ahead, np.vstack(bred)[np.argsort(-np.concatenate(merits), kind="stable")]])

    def _select_promising(self, candidates: Vector, merits: Vector) -> tuple[Vector, Vector]:
        """Return the best of the candidates that obey the rules of the space, and their merits, the best first."""
        allowed = self._history.iterate_allowed(candidates, np.argsort(-merits, kind="stable"), _PROMISING)
        best_first = np.fromiter(itertools.islice(allowed, _PROMISING), int)
        return candidates[best_first], merits[best_first]

    def _select_parents(self, population: list[Individual]) -> Vector:
        """Return the genes of the best individuals, shape (parents, genes), each once: islands exchange copies."""
        parents: dict[bytes, Vector] = {}
        for individual in self._rank_individuals(population):
            if len(parents) == _PARENTS:
                break
            parents.setdefault(individual.position.tobytes(), individual.position)
        return np.array(list(parents.values()), float)

    def _rank_individuals(self, population: list[Individual]) -> list[Individual]:
        """Return the individuals that succeeded and can be parents, the best first."""
        losses = np.fromiter((individual.loss for individual in population), float, len(population))
        if self._history.objectives.is_multi_objective:
            succeeded = [population[place] for place in np.flatnonzero(np.isfinite(losses))]
            different = list({one.position.tobytes(): one for one in succeeded}.values())
            return (
                [different[place] for place in sort_best_first(collect_costs(different), _PARENTS)] if different else []
            )
        # Parents have no more than so many losses; to sort the others would take most of the time with 10,000 known.
        lowest = np.unique(losses[np.isfinite(losses)])[:_PARENTS]
        best = np.flatnonzero(np.isin(losses, lowest))
        return [population[place] for place in best[np.argsort(losses[best], kind="stable")]]

    def _draw_chances(self, generations: int) -> Iterator[tuple[Vector, ...]]:
        """Draw for some generations at once what chance decides of their offspring: small arrays take more time."""
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
        existing = self._history.find_active(offspring)
        mutated = mutating < 1 / existing.sum(axis=1, keepdims=True)
        mutated[np.arange(_OFFSPRING), np.argmax(choosing * (existing & free), axis=1)] = True
        mutants: Vector = np.where(mutated & free, self._mutate_genes(offspring, steps, shifts), offspring)
        return self._history.round_genes(mutants)

    def _mutate_genes(self, genes: Vector, steps: Vector, shifts: Vector) -> Vector:
        """Return all genes mutated; a step that would leave the range goes the other way, at most to its end."""
        past, there = self._history, genes + steps
        back = np.maximum(np.minimum(genes - steps, past.high), past.low)
        moved = np.where((there < past.low) | (there > past.high), back, there)
        mutants: Vector = np.where(past.unordered, (genes + shifts) % (self._width + 1), moved)
        return mutants

    def _draw_newcomers(self) -> Vector:
        draws = self._generator.random((_NEWCOMERS, len(self._width)))
        whole = np.floor(draws * (self._width + 1))
        newcomers: Vector = self._history.low + np.where(self._history.continuous, draws * self._width, whole)
        return self._history.round_genes(newcomers)
