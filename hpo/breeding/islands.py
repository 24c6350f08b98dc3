"""Propulate's islands over the workers: built, filled with what the record knows, run until the budget is spent."""

from __future__ import annotations

import io
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from hpo.breeding.upstream import Individual, Islands
from hpo.layout import Layout
from hpo.ranks.communicator import SleepingComm
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.store.record import Record
    from hpo.store.trials import Evaluation

# Evaluates hyperparameters on a worker: what was evaluated and its loss, or None where the budget is spent.
Evaluate = Callable[..., "tuple[dict[str, Any], float] | None"]


class _BudgetSpent(Exception):  # noqa: N818 - the end, and no error
    """Ends Propulate's loop on all ranks of a worker; it has no other end than a number of generations per worker."""


def run_islands(
    space: SearchSpace,
    evaluate: Evaluate,
    layout: Layout,
    world: SleepingComm,
    *,
    worker: int,
    propagators: Sequence[str],
    record: Record | None,
    migration_probability: float = 0.9,
    pollination: bool = True,
    seed: int = 0,
) -> None:
    """Breed and evaluate individuals on all islands until `evaluate` says that the budget is spent; collective.

    The islands take the propagators in turn. `record` is needed on leaders; the individuals of the evaluations that it
    already holds are put back on their islands. Returns on all ranks at the same time.
    """
    island = layout.island_of(worker)
    bred_by = propagators[island % len(propagators)]
    past = record.evaluations() if record else []
    rng = random.Random(f"{seed}/{worker}/{len(past)}")
    propagator = None
    if record:  # the other ranks do not breed, and spare the imports
        from hpo.breeding.past import Past
        from hpo.breeding.propagators import New, make

        known = Past(space, record.news)
        place = worker - layout.first_worker(island)
        propagator = New(make(bred_by, known, rng, layout.island_size(island), place), known, rng)

    def breed_again() -> dict[str, Any] | None:
        assert propagator is not None
        population, _ = propulator._get_active_individuals()
        params = space.decode(propagator(population))
        return None if known.knows(params) else params

    def loss_of(individual: Individual, _: Any = None) -> float:
        evaluated = evaluate(
            space.decode(individual),
            breed_again,
            island=island,
            worker=worker,
            generation=int(individual.generation),
            propagator=bred_by,
            immigrants=_immigrants(propulator, island) if record else {},
        )
        if evaluated is None:
            raise _BudgetSpent
        if record:
            # What was replaced breeds no more; Propulate would look through it several times in every generation.
            propulator.population = [one for one in propulator.population if one.active]
        params, loss = evaluated
        for name, gene in space.encode(params).items():
            individual[name] = gene
        return loss

    propulator = _build(
        loss_fn=loss_of,
        propagator=propagator,
        rng=rng,
        generations=-1,
        num_islands=layout.islands,
        migration_probability=migration_probability,
        pollination=pollination,
        ranks_per_worker=layout.ranks_per_worker,
    )
    if propulator.propulate_comm is not None:
        _restore(propulator, space, layout, past, island)
    world.barrier()
    with suppress(_BudgetSpent):
        propulator.propulate(logging_interval=1000, debug=0)
    if propulator.propulate_comm is not None:
        propulator.propulate_comm.drain()
        propulator.island_comm.drain()
    world.barrier()


def _immigrants(propulator: Any, island: int) -> dict[str, int]:
    """Count the individuals of other islands that live on this one, by the island that bred them."""
    return Counter(str(one.island) for one in propulator.population if one.active and one.island != island)


def _build(**arguments: Any) -> Any:
    """Make Propulate's islands and return this rank's part in them; waits sleep, and there are no checkpoints."""
    # Propulate unpickles what it finds at its checkpoint path: a folder that is new and empty holds nothing.
    with tempfile.TemporaryDirectory() as empty, redirect_stdout(io.StringIO()):
        propulator = Islands(**arguments, checkpoint_path=empty).propulator
    propulator._dump_checkpoint = lambda: None
    for name in ("worker_sub_comm", "island_comm", "propulate_comm"):
        if getattr(propulator, name) is not None:
            setattr(propulator, name, SleepingComm(getattr(propulator, name)))
    return propulator


def _restore(propulator: Any, space: SearchSpace, layout: Layout, past: Sequence[Evaluation], island: int) -> None:
    """Put finished evaluations back as individuals, the same on all workers of an island, and count generations on.

    With fewer islands or workers than before, those that are gone are dealt to those that are left. A worker's
    generations are counted anew, so that island, worker and generation still tell individuals apart, as Propulate
    needs.
    """
    size = layout.island_size(island)
    limits, generations = space.limits(), [0] * size
    for evaluation in past:
        if not evaluation.finished or evaluation.island % layout.islands != island:
            continue
        place = (evaluation.worker - layout.first_worker(island)) % size
        individual = Individual(dict(space.encode(evaluation.params)), limits)
        individual.loss = evaluation.loss
        individual.generation = generations[place]
        individual.rank = individual.current = place
        individual.island = island
        individual.migration_steps = 0
        individual.migration_history = str(island)
        individual.evalperiod = evaluation.seconds
        propulator.population.append(individual)
        generations[place] += 1
    propulator.generation = generations[propulator.island_comm.rank]
