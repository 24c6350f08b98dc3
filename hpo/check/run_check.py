"""Run `hpo check`, which searches for mistakes in a search file. All ranks take part.

It evaluates one set of hyperparameters several times, on all ranks and on 1 rank. Failures, and
differences between these evaluations, show the mistakes.
"""

from __future__ import annotations

import os
import random
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hpo.check.check_evaluator import MAX_LOSSES, CheckEvaluator, CheckOutcome
from hpo.check.evaluation_findings import CheckOutcomes, inspect_outcomes
from hpo.check.finding import print_findings
from hpo.errors import ExitStatus
from hpo.evaluation.program import Program
from hpo.layout import Layout
from hpo.options import Options
from hpo.ranks.job import Job
from hpo.run.prepare_rank import prepare_rank
from hpo.script_objective import EVALUATION_PLACEHOLDERS
from hpo.space import Categorical, SearchSpace, Value
from hpo.text_format import (
    format_count,
    format_named_values,
    format_number,
    format_tenths,
    make_printable,
)
from hpo.views.tables import format_table, make_table

_DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_MEBIBYTE = 1 << 20
_MAX_DRAWS = 1000  # to find the branches of a space
_MAX_BRANCHES = 8


def run_check(options: Options, layout: Layout, job: Job) -> int:
    """Check a search file, and return status 0 if nothing is wrong. Collective.

    Raises UsageError on all ranks, before anything starts, if the options or the search file are
    invalid.
    """
    world = job.world
    with ExitStack() as held:
        ready = held.enter_context(prepare_rank(options, layout, job, is_attended=world.size == 1))
        params = None
        folder = None
        branches: list[dict[str, Value]] = []
        if ready.request is not None:
            job.watch.set_stop_callbacks(lambda: None, lambda: ExitStatus.INTERRUPTED)
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hpo-check-")))
            given = [*ready.request.enqueued, ready.request.prior_params]
            params = given[0] or make_middle_params(ready.problem.space)
            branches = draw_other_branches(ready.problem.space, params)
            program = Program.from_problem(ready.problem)
            description = f"{ready.problem.file.path}: {format_named_values(params)}"
            if program is not None:
                known = {name: f"{{{name}}}" for name in EVALUATION_PLACEHOLDERS}
                description = shlex.join(program.make_command(params, known))
            also = ", and once on 1 rank" if world.size > 1 else ""
            print(make_printable(description))
            times = f"twice on {format_count(world.size, 'rank')}{also}"
            if program is not None and program.script.can_resume:
                times += ", and to resume once more"
            if branches:
                times += f", and {format_count(len(branches), 'individual')} of other branches once"
            print(f"{times}; at most {MAX_LOSSES} losses each\n", flush=True)
        evaluator = CheckEvaluator(
            ready, job.watch, world.bcast(folder), params, options.collective_timeout
        )
        outcomes = _evaluate(evaluator, job, world.bcast(branches))
        if is_stopping(job):
            return report_stop(job)
        status = ExitStatus.BUDGET_SPENT
        if outcomes is not None:
            _print_outcomes(outcomes.list_compared())
            outcomes = replace(
                outcomes,
                weights_test=evaluator.test_weights(),
                script=ready.problem.file.script,
                files=evaluator.file_snapshots,
            )
            status = print_findings(inspect_outcomes(outcomes), options.as_json)
        return int(world.bcast(status))


def make_middle_params(space: SearchSpace) -> dict[str, Value]:
    """Return the middle of each range on its scale, and the first of several choices.

    If the constraints reject these hyperparameters, return others that they allow, drawn with a
    fixed seed.
    """
    genes = {
        name: low if isinstance(space.parameters[name], Categorical) else (low + high) / 2
        for name, (low, high) in space.list_gene_limits().items()
    }
    params = space.decode(genes)
    return params if space.allows(params) else space.draw(random.Random(0))


def draw_other_branches(space: SearchSpace, params: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Return individuals that together have all choices on which other hyperparameters depend.

    The choices in `params` are left out. The individuals are drawn with a fixed seed.
    """
    parents = {name for each in space.parameters.values() for name in each.when or ()}
    rng = random.Random(0)
    known = {(name, value) for name, value in params.items() if name in parents}
    branches: list[dict[str, Value]] = []
    for _ in range(_MAX_DRAWS if parents else 0):
        drawn = space.draw(rng)
        choices = {(name, value) for name, value in drawn.items() if name in parents}
        if not choices <= known and len(branches) < _MAX_BRANCHES:
            branches.append(drawn)
            known |= choices
    return branches


def _evaluate(
    evaluator: CheckEvaluator, job: Job, branches: Sequence[Mapping[str, Value]]
) -> CheckOutcomes | None:
    """Evaluate on all ranks, again, from a checkpoint, and on 1 rank. Collective.

    The individuals in `branches` are evaluated once.

    An evaluation is left out if the job is stopping, or if an earlier one shows that nothing can be
    compared. Return the outcomes on the first rank, and None on other ranks.
    """
    world = job.world
    again = None
    paused = None
    resumed = None
    alone = None
    of_branches: list[CheckOutcome | None] = []
    with evaluator.form_worker(world.copy()) as group:
        # torch compares the collectives of the ranks before each one begins. If all ranks have
        # called the same collective, but the comparison rejects it, repeat without the comparison.
        # If the user has set TORCH_DISTRIBUTED_DEBUG, torch compares only if its value is DETAIL.
        group.compares_collectives = _DEBUG_VARIABLE not in os.environ
        whole = evaluator.evaluate(group, keeps_weights=True)
        group.compares_collectives = False
        if world.bcast(whole is not None and whole.is_false_alarm):
            whole = evaluator.evaluate(group, keeps_weights=True)
        if world.bcast(whole is not None and not whole.failure) and not is_stopping(job):
            again = evaluator.evaluate(group)
            if world.bcast(
                again is not None and not again.failure and again.evaluation.checkpoint_step > 0
            ):
                resumed = evaluator.evaluate(group, previous=again)
            elif evaluator.has_own_files and not is_stopping(job):
                paused = evaluator.evaluate(group, pauses=True)
                resumed = evaluator.evaluate(group, previous=paused)
            of_branches = [
                evaluator.evaluate(group, params=params)
                for params in branches
                if not is_stopping(job)
            ]
    if world.size > 1 and not is_stopping(job):
        own = world.split(world.rank, 0)
        if job.is_first:
            with evaluator.form_worker(own) as group:
                alone = evaluator.evaluate(group)
        world.barrier()
    if whole is None:
        return None
    found = [outcome for outcome in of_branches if outcome is not None]
    return CheckOutcomes(whole, again, resumed, alone, paused, found)


def report_stop(job: Job) -> int:
    """Print on the first rank why the job stops, and return the exit status."""
    if job.is_first and job.watch.active_stop:
        print(f"Stopped: {job.watch.active_stop.reason}", flush=True)
    return ExitStatus.INTERRUPTED


def is_stopping(job: Job) -> bool:
    """Return whether the first rank has a reason to stop the job. Collective: call on all ranks."""
    return bool(job.world.bcast(job.watch.active_stop is not None))


def _print_outcomes(outcomes: Sequence[CheckOutcome]) -> None:
    """Print a table with a row for each evaluation."""
    names = []
    for outcome in outcomes:
        name = format_count(outcome.ranks, "rank")
        names.append(f"{name}, again" if name in names else name)
    columns = [("", names)]
    for epoch in range(max(len(outcome.losses) for outcome in outcomes)):
        cells = [
            format_number(outcome.losses[epoch]) if epoch < len(outcome.losses) else ""
            for outcome in outcomes
        ]
        columns.append((f"loss {epoch + 1}", cells))
    columns += [
        (
            "steps per loss" if outcomes[0].traces[0].steps_at_losses else "steps",
            [_format_steps(outcome) for outcome in outcomes],
        ),
        ("seconds", [format_tenths(outcome.traces[0].seconds) for outcome in outcomes]),
        (
            "MiB per rank",
            [
                " ".join(
                    f"{trace.memory / _MEBIBYTE:.0f}" if trace.memory else "?"
                    for trace in outcome.traces
                )
                for outcome in outcomes
            ],
        ),
    ]
    table = make_table(columns)
    table.columns[0].justify = "left"
    print(format_table("", table).lstrip("\n"))


def _format_steps(outcome: CheckOutcome) -> str:
    """Return the number of optimizer steps from each loss to the next as text, separated by spaces.

    If all are equal, return one number. If none were recorded, return the number of all steps.
    """
    until = outcome.traces[0].steps_at_losses
    steps = [after - before for before, after in zip([0, *until], until, strict=False)]
    if not steps:
        return str(outcome.traces[0].steps)
    return str(steps[0]) if len(set(steps)) == 1 else " ".join(map(str, steps))
