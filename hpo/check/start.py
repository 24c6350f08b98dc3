"""A check from its options to its verdict, on all ranks together."""

from __future__ import annotations

import os
import random
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.check.collectives import DEBUG
from hpo.errors import Exit
from hpo.evaluation.program import Program
from hpo.layout import Layout
from hpo.parameters import Categorical, Value
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job
from hpo.run.options import Options
from hpo.run.ready import Ready
from hpo.run.start import prepare
from hpo.space import SearchSpace
from hpo.text import named

if TYPE_CHECKING:
    from hpo.check.bench import Bench, Outcome
    from hpo.evaluation.group import Group


def check(options: Options, layout: Layout, job: Job) -> int:
    """Check a search space, and return 0 if nothing is wrong, or else 1; collective over the job's ranks.

    Raises UsageError, on all ranks alike, before anything starts if a person has to mend something first.
    """
    from hpo.check.bench import Bench
    from hpo.check.program import points_on_program
    from hpo.check.report import print_headline, print_outcomes, print_points
    from hpo.check.verdict import is_well, points_on
    from hpo.evaluation.group import Group

    world, patience = job.world, options.collective_timeout
    with ExitStack() as held:
        ready = held.enter_context(prepare(options, layout, job, is_attended=world.size == 1))
        params, folder = None, None
        if ready.request is not None:
            job.watch.speak_for_the_run(lambda: None, lambda: Exit.CUT_SHORT)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-")))
            given = ready.request.given
            params = given[0] if given else middle(ready.problem.space)
            print_headline(_shown(ready, params), world.size)
        bench = Bench(ready, job.watch, world.bcast(folder), params)

        def group_of(comm: SleepingComm) -> Group:
            job.watch.join(comm, 0, patience)
            return Group(comm, ready.host, 0, patience, ready.slot)

        with group_of(world.copy()) as group:
            outcomes = _evaluate_on_all(bench, group)
            continued = _continue(bench, group, outcomes[-1]) if len(outcomes) > 1 else None
        if world.size > 1 and not _is_over(job):
            alone = world.split(world.rank, 0)
            if job.is_first:
                with group_of(alone) as group:
                    outcomes.append(bench.evaluate(group))
            world.barrier()
        if _is_over(job):
            if job.is_first and job.watch.stopping:
                print(f"Stopped: {job.watch.stopping.reason}", flush=True)
            return Exit.CUT_SHORT
        status: int = Exit.BUDGET_SPENT
        if job.is_first:
            found = [outcome for outcome in outcomes if outcome is not None]
            print_outcomes(found)
            script = ready.problem.file.script
            points = points_on(ready.problem, found, continued, bench.hand_over())
            points += points_on_program(script, found, bench.files) if script is not None else []
            print_points(points)
            status = Exit.BUDGET_SPENT if is_well(points) else Exit.CRASHED  # 0 and 1, as linters have them
        return int(world.bcast(status))


def _shown(ready: Ready, params: Mapping[str, Value]) -> str:
    """Return what is evaluated, for a person: hyperparameters, or the command of a program."""
    if (program := Program.of(ready.problem)) is not None:
        known = {"trial": "{trial}", "folder": "{folder}", "seed": "{seed}"}
        return shlex.join(program.arguments(params, known, continues=False))
    return f"{ready.problem.file.path}: {named(params)}"


def middle(space: SearchSpace) -> dict[str, Value]:
    """Return the individual in the middle of a space: of each range, on its own scale, and the first of all choices.

    If rules do not allow it, it is one that they allow, drawn at random and always the same.
    """
    genes = {
        name: low if isinstance(space.parameters[name], Categorical) else (low + high) / 2
        for name, (low, high) in space.limits().items()
    }
    params = space.decode(genes)
    return params if space.allows(params) else space.draw(random.Random(0))


def _evaluate_on_all(bench: Bench, group: Group) -> list[Outcome | None]:
    """Evaluate twice on all ranks, the first time with all collectives compared; once if that fails.

    The environment variable of torch for this check decides if a user has set it.
    """
    comm = group.own_comm
    group.is_compared = DEBUG not in os.environ
    first = bench.evaluate(group, keeps=True)
    group.is_compared = False
    if comm.bcast(first is not None and first.is_fine):
        first = bench.evaluate(group, keeps=True)
    if comm.bcast(first is None or bool(first.failure) or bench.watch.stopping is not None):
        return [first]
    return [first, bench.evaluate(group)]


def _continue(bench: Bench, group: Group, before: Outcome | None) -> Outcome | None:
    """Let the individual continue from what it has saved with its first loss, if it has saved anything."""
    has_saved = before is not None and not before.failure and before.evaluation.checkpoint_step > 0
    return bench.evaluate(group, went_before=before) if group.own_comm.bcast(has_saved) else None


def _is_over(job: Job) -> bool:
    """Tell whether the first rank has to stop."""
    return bool(job.world.bcast(job.watch.stopping is not None))
