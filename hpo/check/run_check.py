"""Run `hpo check`, which searches for mistakes in a search file. All ranks take part.

It evaluates one set of hyperparameters several times, on all ranks and on 1 rank. Failures, and differences between
these evaluations, show the mistakes.
"""

from __future__ import annotations

import os
import random
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.check.collective_mismatch import DEBUG_VARIABLE
from hpo.errors import ExitStatus
from hpo.evaluation.program_command import Program
from hpo.layout import Layout
from hpo.options import Options
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job
from hpo.run.prepare_rank import RankState, prepare_rank
from hpo.space import Categorical, SearchSpace, Value
from hpo.text_format import format_named_values

if TYPE_CHECKING:
    from hpo.check.check_evaluator import CheckEvaluator, CheckOutcome
    from hpo.evaluation.rank_group import RankGroup


def run_check(options: Options, layout: Layout, job: Job) -> int:
    """Check a search file, and return status 0 if nothing is wrong, 1 otherwise. Collective: call on all ranks.

    Raises UsageError on all ranks, before anything starts, if the options or the search file are invalid.
    """
    from hpo.check.check_evaluator import CheckEvaluator
    from hpo.check.evaluation_findings import has_passed, inspect_outcomes
    from hpo.check.printing import print_findings, print_headline, print_outcomes
    from hpo.check.program_findings import inspect_program
    from hpo.evaluation.rank_group import RankGroup

    world, patience = job.world, options.collective_timeout
    with ExitStack() as held:
        ready = held.enter_context(prepare_rank(options, layout, job, is_attended=world.size == 1))
        params, folder = None, None
        if ready.request is not None:
            job.watch.set_stop_callbacks(lambda: None, lambda: ExitStatus.INTERRUPTED)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-")))
            given = [*ready.request.enqueued, ready.request.prior_params]
            params = given[0] or make_middle_params(ready.problem.space)
            print_headline(_describe_evaluation(ready, params), world.size)
        bench = CheckEvaluator(ready, job.watch, world.bcast(folder), params)

        def make_group(comm: SleepingComm) -> RankGroup:
            job.watch.join_worker(comm, 0, patience)
            return RankGroup(comm, ready.host, 0, patience, ready.slot)

        with make_group(world.copy()) as group:
            outcomes = _evaluate_on_all(bench, group)
            continued = _evaluate_continuation(bench, group, outcomes[-1]) if len(outcomes) > 1 else None
        if world.size > 1 and not is_stopping(job):
            alone = world.split(world.rank, 0)
            if job.is_first:
                with make_group(alone) as group:
                    outcomes.append(bench.evaluate(group))
            world.barrier()
        if is_stopping(job):
            return report_stop(job)
        status: int = ExitStatus.BUDGET_SPENT
        if job.is_first:
            found = [outcome for outcome in outcomes if outcome is not None]
            print_outcomes(found)
            script = ready.problem.file.script
            points = inspect_outcomes(ready.problem, found, continued, bench.test_weights())
            points += inspect_program(script, found, bench.file_snapshots) if script is not None else []
            print_findings(points)
            # The statuses are 0 and 1, as linters have them.
            status = ExitStatus.BUDGET_SPENT if has_passed(points) else ExitStatus.CRASHED
        return int(world.bcast(status))


def _describe_evaluation(ready: RankState, params: Mapping[str, Value]) -> str:
    """Return a description of the evaluation for a user: hyperparameters, or the command of a program."""
    if (program := Program.from_problem(ready.problem)) is not None:
        known = {"trial": "{trial}", "folder": "{folder}", "seed": "{seed}"}
        return shlex.join(program.make_command(params, known, continues=False))
    return f"{ready.problem.file.path}: {format_named_values(params)}"


def make_middle_params(space: SearchSpace) -> dict[str, Value]:
    """Return the middle of each range on its scale, and the first choice of each categorical parameter.

    If the constraints reject these hyperparameters, return others that they allow, drawn with a fixed seed.
    """
    genes = {
        name: low if isinstance(space.parameters[name], Categorical) else (low + high) / 2
        for name, (low, high) in space.list_gene_limits().items()
    }
    params = space.decode(genes)
    return params if space.allows(params) else space.draw(random.Random(0))


def _evaluate_on_all(bench: CheckEvaluator, group: RankGroup) -> list[CheckOutcome | None]:
    """Evaluate twice on all ranks, or once if the first evaluation fails or the job is stopping.

    In the first evaluation, torch compares the collectives of the ranks before each one begins. If all ranks have
    called the same collective, but the comparison rejects it, the first evaluation is repeated without the comparison.
    If the user has set TORCH_DISTRIBUTED_DEBUG, torch compares collectives only if its value is DETAIL.

    Returns one outcome for each evaluation. Ranks other than the job's first return None instead of each outcome.
    """
    comm = group.comm
    group.compares_collectives = DEBUG_VARIABLE not in os.environ
    first = bench.evaluate(group, keeps_weights=True)
    group.compares_collectives = False
    if comm.bcast(first is not None and first.is_false_alarm):
        first = bench.evaluate(group, keeps_weights=True)
    if comm.bcast(first is None or bool(first.failure) or bench.watch.active_stop is not None):
        return [first]
    return [first, bench.evaluate(group)]


def _evaluate_continuation(bench: CheckEvaluator, group: RankGroup, before: CheckOutcome | None) -> CheckOutcome | None:
    """Resume from the checkpoint of the first loss of `before`, and return the outcome; None without a checkpoint."""
    has_saved = before is not None and not before.failure and before.evaluation.checkpoint_step > 0
    return bench.evaluate(group, previous=before) if group.comm.bcast(has_saved) else None


def report_stop(job: Job) -> int:
    """Print on the first rank why the job stops, and return the exit status."""
    if job.is_first and job.watch.active_stop:
        print(f"Stopped: {job.watch.active_stop.reason}", flush=True)
    return ExitStatus.INTERRUPTED


def is_stopping(job: Job) -> bool:
    """Return whether the first rank has a reason to stop the job. Collective: call on all ranks."""
    return bool(job.world.bcast(job.watch.active_stop is not None))
