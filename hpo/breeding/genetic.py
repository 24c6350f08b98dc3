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

from hpo.breeding.past import Past
from hpo.breeding.rows import Sample, Vector
from hpo.breeding.selection import costs_of
from hpo.breeding.upstream import Individual, Propagator
from hpo.dominance import best_first
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


class Genetic(Propagator):  # type: ignore[misc]
    """Breeds many individuals, and returns the one of which a surrogate hopes most.

    Parents are the best of the island's population. Offspring take each gene from one of two parents (uniform
    crossover), and one gene or more is mutated, each with probability 1 / genes, of those that exist: a category
    becomes any other, a number moves by a step whose logarithm is uniform, so that small steps are as likely as large
    ones at every scale (Muehlenbein and Schlierkamp-Voosen, Predictive models for the breeder genetic algorithm, 1993).
    A gene that does not exist is inherited, and may mutate, all the same.

    The most promising candidates are bred on for some generations, on the surrogate alone. Each worker has candidates
    and a surrogate of its own; all surrogates know all islands.
    """

    def __init__(self, past: Past, rng: random.Random) -> None:
        super().__init__(-1, 1, rng)
        self._past = past
        self._limits = past.space.limits()
        self._width: Vector = past.high - past.low
        self._grid = ~past.continuous & ~past.unordered
        self._movable = self._width > 0
        self._log_steps: Vector = np.log(np.where(self._grid, self._width + 1, _FINEST_STEP))
        self._finest: Vector = self._width / _FINEST_STEP
        self._draws = np.random.default_rng(rng.getrandbits(64))

    def __call__(self, population: list[Individual]) -> Individual:
        """Breed one individual."""
        space = self._past.space
        genes = self._choose(population)
        if genes is None:
            genes = space.encode(self._past.draw_new(self.rng) or space.draw(self.rng))
        return Individual(genes, self._limits)

    @cached_property
    def _surrogate(self) -> Surrogate:
        """The surrogate of evaluations without a parent."""
        return self._make_surrogate(0)

    @cached_property
    def _surrogate_of_heirs(self) -> Surrogate:
        """The surrogate of evaluations that inherit. It also uses the parent's loss and the age."""
        return self._make_surrogate(2)

    def _make_surrogate(self, facts: int) -> Surrogate:
        """Import scipy when it is needed: it would delay each start by 0.15 s."""
        from hpo.breeding.surrogate import Surrogate

        return Surrogate(self._past, self._draws, facts)

    @cached_property
    def _threads(self) -> ThreadpoolController:
        """The threads of the libraries that are loaded when this is first asked for."""
        return ThreadpoolController()

    def _choose(self, population: list[Individual]) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that is new; None if too little is known, or no candidate is."""
        parents = self._parents(population)
        if self._past.count <= len(self._width) or not len(parents):
            return None
        parent = self._past.lines.draw_parent(self.rng)
        chosen = self._choose_founder(parents) if parent is None else None
        if chosen is None and self._past.lines.parents:
            chosen = self._choose_heir(parent or self._past.lines.parents[0], parents)
        return chosen

    def _choose_founder(self, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that has no parent."""
        sample = self._past.founders()
        if not len(sample.costs):
            return None
        candidates = self._screened(self._surrogate, sample, parents, self._movable)
        return self._first_new(candidates, lambda params: self._past.lines.parent_of(params) is None)

    def _choose_heir(self, parent: Evaluation, parents: Vector) -> dict[str, Gene] | None:
        """Return the genes of the best candidate that inherits from a parent: only mutable genes differ."""
        sample, mutable = self._past.heirs(parent), self._past.mutable
        own = self._past.genes_of(parent.params)
        if len(sample.costs) <= mutable.sum():
            return self._first_new(np.where(mutable, self._newcomers(), own))
        same = np.unique(np.where(mutable, parents, own), axis=0)
        return self._first_new(self._screened(self._surrogate_of_heirs, sample, same, self._movable & mutable))

    def _first_new(
        self, candidates: Vector, is_wanted: Callable[[dict[str, Value]], bool] = lambda _: True
    ) -> dict[str, Gene] | None:
        """Return the genes of the first candidate that is new to the run, wanted, and obeys the rules of the space."""
        past = self._past
        everything = ((index, past.params_of(genes)) for index, genes in enumerate(candidates))
        new = (index for index, params in everything if not past.knows(params) and is_wanted(params))
        chosen = next(past.allowed(candidates, new), None)
        if chosen is None:
            return None
        return past.space.rounded(dict(zip(self._limits, candidates[chosen].tolist(), strict=True)))

    def _screened(self, surrogate: Surrogate, sample: Sample, parents: Vector, free: Mask) -> Vector:
        """Return candidates that differ from parents in `free` genes, the best first by a surrogate of a sample."""
        # The matrices are small: if all ranks of a host used a thread per core, this would take ten times longer.
        with self._threads.limit(limits=1, user_api="blas"):
            return self._bred_on(surrogate.learn(sample), parents, free)

    def _bred_on(self, merits_of: Callable[..., Vector], parents: Vector, free: Mask) -> Vector:
        """Return offspring, newcomers, and what some generations bred of the most promising of them, the best first."""
        chances = self._chances(1 + _GENERATIONS)
        newcomers = np.where(free, self._newcomers(), parents[0])
        bred = [np.vstack([self._offspring(parents, next(chances), free), newcomers])]
        merits = [merits_of(bred[0], precision=np.float32)]
        promising, hopes = self._most_promising(bred[0], merits[0])
        for chance in chances if len(promising) else ():
            bred.append(self._offspring(promising, chance, free))
            merits.append(merits_of(bred[-1], hopes[-1] if len(hopes) == _PROMISING else -math.inf, np.float32))
            promising, hopes = self._most_promising(np.vstack([promising, bred[-1]]), np.append(hopes, merits[-1]))
        # Of noiseless functions, screening takes another one than the best for it in up to one of six suggestions.
        ahead = promising[np.argsort(-merits_of(promising), kind="stable")] if len(promising) else promising
        return np.vstack([ahead, np.vstack(bred)[np.argsort(-np.concatenate(merits), kind="stable")]])

    def _most_promising(self, candidates: Vector, merits: Vector) -> tuple[Vector, Vector]:
        """Return the best of the candidates that obey the rules of the space, and their merits, the best first."""
        allowed = self._past.allowed(candidates, np.argsort(-merits, kind="stable"), _PROMISING)
        best_first = np.fromiter(itertools.islice(allowed, _PROMISING), int)
        return candidates[best_first], merits[best_first]

    def _parents(self, population: list[Individual]) -> Vector:
        """Return the genes of the best individuals, shape (parents, genes), each once: islands exchange copies."""
        parents: dict[bytes, Vector] = {}
        for individual in self._ranked(population):
            if len(parents) == _PARENTS:
                break
            parents.setdefault(individual.position.tobytes(), individual.position)
        return np.array(list(parents.values()), float)

    def _ranked(self, population: list[Individual]) -> list[Individual]:
        """Return the individuals that succeeded and can be parents, the best first."""
        losses = np.fromiter((individual.loss for individual in population), float, len(population))
        if self._past.objectives.are_several:
            succeeded = [population[place] for place in np.flatnonzero(np.isfinite(losses))]
            different = list({one.position.tobytes(): one for one in succeeded}.values())
            return [different[place] for place in best_first(costs_of(different), _PARENTS)] if different else []
        # Parents have no more than so many losses; to sort the others would take most of the time with 10,000 known.
        lowest = np.unique(losses[np.isfinite(losses)])[:_PARENTS]
        best = np.flatnonzero(np.isin(losses, lowest))
        return [population[place] for place in best[np.argsort(losses[best], kind="stable")]]

    def _chances(self, generations: int) -> Iterator[tuple[Vector, ...]]:
        """Draw for some generations at once what chance decides of their offspring: small arrays take more time."""
        draws, shape = self._draws, (generations, _OFFSPRING, len(self._width))
        mixing, mutating, choosing, moving, shifting = draws.random((5, *shape))
        signed = 2 * moving - 1
        sizes = np.exp(np.abs(signed) * self._log_steps)
        steps = np.copysign(np.where(self._grid, np.floor(sizes), sizes * self._finest), signed)
        shifts = 1 + np.floor(shifting * np.maximum(self._width, 1))
        return zip(draws.random((generations, 2, _OFFSPRING)), mixing, mutating, choosing, steps, shifts, strict=True)

    def _offspring(self, parents: Vector, chances: tuple[Vector, ...], free: Mask) -> Vector:
        couples, mixing, mutating, choosing, steps, shifts = chances
        mothers, fathers = parents[(couples * len(parents)).astype(int)]
        offspring = np.where(mixing < 0.5, mothers, fathers)
        existing = self._past.existing(offspring)
        mutated = mutating < 1 / existing.sum(axis=1, keepdims=True)
        mutated[np.arange(_OFFSPRING), np.argmax(choosing * (existing & free), axis=1)] = True
        mutants: Vector = np.where(mutated & free, self._mutated(offspring, steps, shifts), offspring)
        return self._past.rounded(mutants)

    def _mutated(self, genes: Vector, steps: Vector, shifts: Vector) -> Vector:
        """Return all genes mutated; a step that would leave the range goes the other way, at most to its end."""
        past, there = self._past, genes + steps
        back = np.maximum(np.minimum(genes - steps, past.high), past.low)
        moved = np.where((there < past.low) | (there > past.high), back, there)
        mutants: Vector = np.where(past.unordered, (genes + shifts) % (self._width + 1), moved)
        return mutants

    def _newcomers(self) -> Vector:
        draws = self._draws.random((_NEWCOMERS, len(self._width)))
        whole = np.floor(draws * (self._width + 1))
        newcomers: Vector = self._past.low + np.where(self._past.continuous, draws * self._width, whole)
        return self._past.rounded(newcomers)
