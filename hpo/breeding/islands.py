"""Propulate's islands over the workers: built, filled with what the record knows, run until the budget is spent."""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpo.breeding.upstream import Individual, Islands
from hpo.errors import KnownError
from hpo.layout import Layout
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.ranks.communicator import SleepingComm
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.breeding.propagators import New
    from hpo.store.recorder import Recorder
    from hpo.store.trials import Assignment, Evaluation

# Evaluates on all ranks of a worker what its leader claims: returns hyperparameters, loss and metrics; None at the end.
Evaluate = Callable[
    ["Callable[[], Assignment | None] | None"], "tuple[dict[str, Any], float, Mapping[str, float]] | None"
]


class _BudgetSpent(Exception):  # noqa: N818 - the end, and no error
    """Ends Propulate's loop on all ranks of a worker; by itself, it ends only after a number of generations."""


@dataclass(frozen=True)
class Archipelago:
    """The islands of a run: which workers they have, how they breed, and how they exchange individuals.

    The propagators are dealt to the islands in turn.
    """

    space: SearchSpace
    layout: Layout
    propagators: Sequence[str]
    migration_probability: float = 0.9
    pollination: bool = True
    seed: int = 0
    objectives: Objectives = ONLY_LOSS

    def evolve(self, world: SleepingComm, worker: int, recorder: Recorder | None, evaluate: Evaluate) -> None:
        """Breed, claim and evaluate individuals on all islands until there is nothing more to claim; collective.

        `worker` is the number of this rank's worker; `recorder` is None on all ranks but leaders. The individuals of
        the evaluations that the record already holds are put back on their islands. Returns on all ranks at the same
        time, when all is durable.
        """
        island = self.layout.island_of(worker)
        past = recorder.news() if recorder else []
        rng = random.Random(f"{self.seed}/{worker}/{len(past)}")
        breeder = Breeder(self, worker, recorder, rng, past) if recorder else None

        def loss_of(individual: Individual, _: Any = None) -> float:
            evaluated = evaluate(partial(breeder.claim, individual, propulator) if breeder else None)
            if evaluated is None:
                raise _BudgetSpent
            if breeder:
                # Replaced individuals breed no more; Propulate would look through them several times a generation.
                propulator.population = [one for one in propulator.population if one.active]
            params, loss, metrics = evaluated
            genes = self.space.encode(params)
            individual.costs = self.objectives.costs((loss, *self.objectives.of(metrics)))
            for name in params:  # what does not exist keeps its gene, to be inherited
                individual[name] = genes[name]
            return loss

        propulator = _build(
            loss_fn=loss_of,
            propagator=breeder.propagator if breeder else None,
            rng=rng,
            generations=-1,
            num_islands=self.layout.islands,
            migration_probability=self.migration_probability,
            pollination=self.pollination,
            ranks_per_worker=self.layout.ranks_per_worker,
            **self._exchange(rng),
        )
        is_leader = propulator.propulate_comm is not None
        if is_leader:
            _restore(propulator, self, past, island)
        world.barrier()
        if is_leader:
            with suppress(_BudgetSpent):
                propulator.propulate(logging_interval=1000, debug=0)
            propulator.propulate_comm.drain()
            propulator.island_comm.drain()
        else:
            while evaluate(None) is not None:
                pass
        if recorder:
            recorder.settle()
        world.barrier()

    def _exchange(self, rng: random.Random) -> dict[str, Any]:
        """Return who leaves an island, and who makes room there, where losses alone do not say it."""
        if not self.objectives.are_several:
            return {}
        from hpo.breeding.selection import Emigrants, Replaced

        return {"emigration_propagator": partial(Emigrants, rng=rng), "immigration_propagator": Replaced}


class Breeder:
    """Breeds on a worker's leader, and claims what it has bred."""

    def __init__(
        self,
        islands: Archipelago,
        worker: int,
        recorder: Recorder,
        rng: random.Random,
        known: Sequence[Evaluation],
    ) -> None:
        from hpo.breeding.past import Past  # not needed on ranks that are no leaders
        from hpo.breeding.propagators import New, make

        layout = islands.layout
        self._space = islands.space
        self._worker = worker
        self._island = layout.island_of(worker)
        self._name = islands.propagators[self._island % len(islands.propagators)]
        self._recorder = recorder
        self._past = Past(islands.space, recorder.news, islands.objectives)
        place = worker - layout.first_worker(self._island)
        bred_by = make(self._name, self._past, rng, layout.island_size(self._island), place)
        self.propagator: New = New(bred_by, self._past, rng)
        self._past.take(known)

    def claim(self, individual: Individual, propulator: Any) -> Assignment | None:
        """Claim an individual that Propulate has bred, or if the run knows it, another one; None at the end."""
        attributes = {
            "island": self._island,
            "worker": self._worker,
            "generation": int(individual.generation),
            "propagator": self._name,
            "immigrants": self._immigrants(propulator),
        }
        params = self._space.decode(individual)
        while True:
            with suppress(KnownError):
                return self._recorder.claim(params, **attributes)
            params = self._space.decode(self.propagator(propulator.population))
            if self._past.knows(params):  # there is nothing new to breed
                return self._recorder.claim_waiting(**attributes)

    def _immigrants(self, propulator: Any) -> dict[str, int]:
        """Return how many individuals of other islands live on this one, by the island that bred them."""
        own = self._island
        islands = Counter([one.island for one in propulator.population if one.island != own and one.active])
        return {str(island): count for island, count in islands.items()}


def _build(**arguments: Any) -> Any:
    """Make Propulate's islands and return this rank's part in them; waits sleep, and there are no checkpoints."""
    # Propulate unpickles what it finds at its checkpoint path, and finds nothing in a new folder.
    with tempfile.TemporaryDirectory() as empty, redirect_stdout(io.StringIO()):
        propulator = Islands(**arguments, checkpoint_path=empty).propulator
    propulator._dump_checkpoint = lambda: None
    # Propulate asks six times a generation, five of them for its log; propagator and `loss_of` leave out the others.
    propulator._get_active_individuals = lambda: (propulator.population, len(propulator.population))
    propulator.worker_sub_comm = MPI.COMM_SELF  # the other ranks of a worker have no part in breeding
    for name in ("island_comm", "propulate_comm"):
        if getattr(propulator, name) is not None:
            setattr(propulator, name, SleepingComm(getattr(propulator, name)))
    return propulator


def _restore(propulator: Any, islands: Archipelago, past: Sequence[Evaluation], island: int) -> None:
    """Put finished evaluations back as individuals, the same on all workers of an island, and continue generations.

    With fewer islands or workers than before, the individuals of those that are gone are dealt to those that are left.
    Each worker's generations are numbered anew, so that island, worker and generation still identify an individual, as
    Propulate needs.
    """
    space, layout = islands.space, islands.layout
    size = layout.island_size(island)
    limits, generations = space.limits(), [0] * size
    for evaluation in past:
        if not evaluation.finished or evaluation.island % layout.islands != island:
            continue
        place = (evaluation.worker - layout.first_worker(island)) % size
        individual = Individual(dict(space.encode(evaluation.params)), limits)
        individual.loss = evaluation.loss
        individual.costs = islands.objectives.costs(evaluation.values)
        individual.generation = generations[place]
        individual.rank = individual.current = place
        individual.island = island
        individual.migration_steps = 0
        individual.migration_history = str(island)
        individual.evalperiod = evaluation.seconds
        propulator.population.append(individual)
        generations[place] += 1
    propulator.generation = generations[propulator.island_comm.rank]
