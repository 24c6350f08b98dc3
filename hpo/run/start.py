"""One run, from its options to its summary, on all ranks together."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hpo.errors import RunError, UsageError
from hpo.layout import Layout
from hpo.problem import AskedConstraints, Problem
from hpo.ranks.agreement import together
from hpo.ranks.communicator import same_host
from hpo.ranks.job import Job
from hpo.ranks.watch import Watch
from hpo.run.options import Options
from hpo.run.ready import Ready, Run
from hpo.text import duration

if TYPE_CHECKING:
    from hpo.evaluation.template import Template
    from hpo.evaluation.trainer import TrainerSlot
    from hpo.run.first_rank import FirstRank
    from hpo.run.request import Request

_SECONDS_BEFORE_JOB_ENDS = 60.0


def run(options: Options, layout: Layout, job: Job) -> int:
    """Run a search to its end, and return the exit status; collective over the job's ranks, which the layout divides.

    Raises UsageError, on all ranks alike, before anything starts where a person has to mend something first.
    """
    world = job.world
    index, patience = layout.worker_of(world.rank), options.collective_timeout
    leads = world.rank == layout.ranks_of(index)[0]
    if leads:
        from hpo.run import leading  # noqa: F401 - Propulate and numpy, while the template imports torch
    if job.is_first:
        from hpo.run import first_rank  # noqa: F401 - Optuna, too

        _limit_time(options, job.watch)
    from hpo.evaluation.group import Group
    from hpo.run.stages import Stages

    with prepare(options, layout, job) as ready, ExitStack() as held:
        hosts = world.allgather((ready.host.number, socket.gethostname()))
        names = list(dict(hosts).values())
        first = together(world, lambda: _begin(options, job, ready, names, held) if job.is_first else None)
        run = Run(options, *world.bcast((first.manifest, first.files) if first else None))
        group = held.enter_context(Group(world.split(index, world.rank), ready.host, index, patience, ready.slot))
        leaders = world.split(int(leads), index)
        stages = Stages(run, job, ready, group, leaders if leads else None, first)
        stages.search()
        stages.confirm()
        return stages.conclude()


def _begin(options: Options, job: Job, ready: Ready, hosts: Sequence[str], held: ExitStack) -> FirstRank:
    """Begin this session of the run, on the first rank; the run directory is kept for as long as `held` is open."""
    from hpo.run.first_rank import FirstRank
    from hpo.run.session import begin, enter
    from hpo.store.storage import opened_once

    assert ready.request is not None
    held.enter_context(opened_once())
    run_dir = enter(options.run_dir, ready.problem.file.path.stem, options.resume, held)
    return FirstRank(options, job, begin(run_dir, ready.request, hosts), ready)


def _limit_time(options: Options, watch: Watch) -> None:
    """Let the run stop before its time is over: what a person allows it, or what is left of its SLURM job."""
    if options.time_limit is not None:
        watch.end_after(options.time_limit, f"--time-limit {duration(options.time_limit)}")
    job_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if job_end.isdigit() and int(job_end) > time.time():  # else of another job, or of this one before it was prolonged
        watch.end_after(int(job_end) - time.time() - _SECONDS_BEFORE_JOB_ENDS, "the end of the SLURM job")


@contextmanager
def prepare(options: Options, layout: Layout, job: Job, is_attended: bool = False) -> Iterator[Ready]:
    """Let templates load the search file, and its data once per template; yield what this rank has then.

    The job's first rank, which alone has a request, checks everything before the others begin, so that a mistake shows
    soon. It also prepares its data first: where hosts share a file system, the first ranks of the other hosts find what
    it has downloaded.
    """
    from hpo.evaluation.constraints import ConstraintHelper
    from hpo.evaluation.host import Host, threads_here
    from hpo.evaluation.output import Output
    from hpo.evaluation.template import share_template
    from hpo.evaluation.trainer import Terms, TrainerSlot

    world, comm = job.world, same_host(job.world)
    with ExitStack() as held:
        template, is_first_of_template = share_template(job.template, comm)
        held.callback(template.close)
        terms = Terms(threads_here(comm), options.log_level.upper(), is_attended)
        slot = TrainerSlot(template, Output(), terms, options.fresh_trainers)
        helper = ConstraintHelper(slot.fork)
        held.callback(helper.close)
        constraints = AskedConstraints(helper)

        def first_look() -> Request | None:
            if world.rank != 0:
                return None
            from hpo.run.request import resolve

            return resolve(options, layout, template.ask, constraints)

        request = together(world, first_look)
        data = world.bcast(request.problem.data if request else None)
        problem = request.problem if request else Problem.from_data(data, constraints=constraints)
        together(world, lambda: _load(template, problem, is_first_of_template and request is None))
        for package, danger in [*([("it", template.unsafe)] if template.unsafe else []), *template.skipped.items()]:
            if world.rank == 0:
                text = f"when {package} is imported, {danger}: each trainer imports it"
                print(f"{problem.file.path}: {text}", flush=True)
        if problem.file.has_prepare:
            together(world, lambda: _prepare_data(problem, slot, template) if request else None)
            together(
                world, lambda: _prepare_data(problem, slot, template) if is_first_of_template and not request else None
            )
            if not is_first_of_template:
                template.fetch_data()
        host = Host(comm, world.rank)
        if any(comm.allgather(template.gpus)):
            host.find_gpus(slot)
        gc.freeze()  # garbage collection is quick if it leaves out what stays
        gc.enable()
        yield Ready(request, problem, host, slot)


def _load(template: Template, problem: Problem, is_to_load: bool) -> None:
    """Let this rank's template load what the job's first rank has read, or learn what another rank has let it load.

    The file may change while a run goes on, and hosts may see different files.
    """
    requests = [("load", problem.file.data), ("bind", {"assignments": list(problem.assignments)})]
    for kind, content in requests if is_to_load else ():
        template.ask(kind, **content)
    template.remember(requests)


def _prepare_data(problem: Problem, slot: TrainerSlot, template: Template) -> None:
    """Let a trainer call `prepare`, and give what it returns to the template."""
    from hpo.evaluation.trainer import Ended

    trainer = slot.fork()
    try:
        found = trainer.ask("prepare", "prepared")
    finally:
        trainer.kill()
        trainer.close()
    if isinstance(found, Ended):
        raise UsageError(f"{problem.file.path}: prepare: {found.text}")
    if found["mistake"]:
        raise UsageError(found["mistake"])
    (descriptor,) = found.descriptors
    try:
        template.keep_data(descriptor)
    except OSError as error:
        raise RunError(f"the data cannot be shared: {error}") from error
