"""A check from its options to its verdict, on all ranks together."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.errors import Exit
from hpo.layout import Layout
from hpo.parameters import Categorical, Value
from hpo.process.place import Places
from hpo.ranks.communicator import SleepingComm, leave_no_segments, same_host
from hpo.ranks.job import Job
from hpo.run.options import Options
from hpo.run.start import prepare
from hpo.space import SearchSpace

if TYPE_CHECKING:
    from hpo.check.bench import Bench, Outcome
    from hpo.evaluation.group import Group

_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def check(options: Options, layout: Layout, job: Job) -> int:
    """Check a search space, and return 0 if nothing is wrong, or else 1; collective over the job's ranks.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    world, host = job.world, same_host(job.world)
    leave_no_segments(host)
    request, problem, shared = prepare(options, layout, world, host)
    from hpo.check.bench import Bench
    from hpo.check.report import print_headline, print_outcomes, print_points
    from hpo.check.verdict import is_well, points_on
    from hpo.evaluation.evaluator import Task
    from hpo.evaluation.group import Group
    from hpo.evaluation.host import Host

    places, patience = Places(problem.file.location), options.collective_timeout
    with ExitStack() as held:
        task = Task(problem, held.enter_context(shared), 0)
        params, folder = None, None
        if request is not None:
            job.watch.speak_for_the_run(lambda: None, lambda: Exit.CUT_SHORT)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-")))
            params = request.given[0] if request.given else middle(problem.space)
            print_headline(problem.file.path, params, world.size)
        bench, here = Bench(task, job, places, folder, params), held.enter_context(Host(host))

        def group_of(comm: SleepingComm, index: int) -> Group:
            job.watch.join(comm, index, places, patience)
            job.printed.join(index, comm.rank)
            return Group(comm, here, index, patience)

        with group_of(world.copy(), 0) as group:
            outcomes = _on_all(bench, group)
            went_on = _went_on(bench, group, outcomes[-1]) if len(outcomes) > 1 else None
        if world.size > 1 and not _is_over(job):
            # All ranks make a group, so that the first has as many threads as it had with the others.
            with group_of(SleepingComm(world.Split(world.rank)), world.rank) as group:
                outcomes.append(bench.evaluate(group) if job.is_first else None)
            world.barrier()
        if _is_over(job):
            if job.is_first and job.watch.stopping:
                print(f"Stopped: {job.watch.stopping.reason}", flush=True)
            return Exit.CUT_SHORT
        status: int = Exit.BUDGET_SPENT
        if job.is_first:
            told = [outcome for outcome in outcomes if outcome is not None]
            print_outcomes(told)
            points = points_on(problem, told, went_on, bench.hand_over())
            print_points(points)
            status = Exit.BUDGET_SPENT if is_well(points) else Exit.CRASHED  # 0 and 1, as linters have them
        return int(world.bcast(status))


def middle(space: SearchSpace) -> dict[str, Value]:
    """Return the individual in the middle of a space: of each range, on its own scale, and the first of all choices.

    Where rules do not allow it, it is one that they allow, drawn at random and always the same.
    """
    genes = {
        name: low if isinstance(space.parameters[name], Categorical) else (low + high) / 2
        for name, (low, high) in space.limits().items()
    }
    params = space.decode(genes)
    return params if space.allows(params) else space.draw(random.Random(0))


def _on_all(bench: Bench, group: Group) -> list[Outcome | None]:
    """Evaluate twice on all ranks, the first time with all collectives compared; once where that fails."""
    comm = group.own_comm
    with _compared():
        first = bench.evaluate(group, keeps=True)
    if comm.bcast(first is not None and first.is_fine and bool(first.failure)):
        first = bench.evaluate(group, keeps=True)
    if comm.bcast(first is None or bool(first.failure)):
        return [first]
    return [first, bench.evaluate(group)]


def _went_on(bench: Bench, group: Group, before: Outcome | None) -> Outcome | None:
    """Let the individual go on from what it has saved with its first loss, if it has saved anything."""
    has_saved = before is not None and not before.failure and before.evaluation.saved_after > 0
    return bench.evaluate(group, went_before=before) if group.own_comm.bcast(has_saved) else None


@contextmanager
def _compared() -> Iterator[None]:
    """Let all collectives of process groups that are made inside ``with`` be compared, unless the user says otherwise.

    Where they do not fit together after the first loss, a message is better than the death of the process.
    """
    given = os.environ.get(_DEBUG)
    os.environ.setdefault(_DEBUG, "DETAIL")
    try:
        yield
    finally:
        if given is None:
            del os.environ[_DEBUG]


def _is_over(job: Job) -> bool:
    """Tell whether the first rank has been told to stop."""
    return bool(job.world.bcast(job.watch.stopping is not None))
