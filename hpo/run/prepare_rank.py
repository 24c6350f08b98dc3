"""Prepare a rank of a search or a check: its template, the search file, its data and its host."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.errors import RunError, UsageError
from hpo.layout import Layout, list_usable_cores
from hpo.options import Options
from hpo.problem import Problem, RemoteConstraints
from hpo.process.user_frames import UserFrames
from hpo.ranks.communicator import split_by_host
from hpo.ranks.job import Job, run_on_all

if TYPE_CHECKING:
    from hpo.evaluation.host import RankPlace
    from hpo.evaluation.template_client import TemplateClient
    from hpo.evaluation.trainer_client import TrainerSlot
    from hpo.run.request import RunRequest


@dataclass(frozen=True)
class RankState:
    """The data of a rank after its search file is loaded and the options are checked."""

    request: RunRequest | None
    """The run to start; None on all ranks except the first."""
    problem: Problem
    place: RankPlace
    slot: TrainerSlot

    @property
    def user_frames(self) -> UserFrames:
        """The filter that finds the lines of the user's own code in stack traces."""
        return UserFrames(self.problem.file.location)


@contextmanager
def prepare_rank(
    options: Options,
    layout: Layout,
    job: Job,
    is_attended: bool = False,
    shows_progress: bool = False,
) -> Iterator[RankState]:
    """Load the search file and its data, and yield the data of this rank.

    The first rank of the job checks all options before other ranks load the file, so that a mistake
    is reported early. The first rank also calls the user's `prepare` before other ranks do. If
    hosts share a file system, other hosts then find the files that `prepare` has downloaded.
    Collective: call on all ranks.

    Args:
        is_attended: Whether functions use the terminal of this rank, as in `hpo check` on one rank.
        shows_progress: Whether the first rank prints that data are prepared, which may take long.
    """
    from hpo.evaluation.host import check_gpus, compute_thread_share, find_place
    from hpo.evaluation.template_client import share_template
    from hpo.evaluation.trainer_client import (
        ConstraintClient,
        TrainerOptions,
        TrainerOutput,
        TrainerSlot,
    )

    world = job.world
    comm = split_by_host(world)
    with ExitStack() as resources:
        template, is_first_of_template = share_template(job.template, comm)
        resources.callback(template.close)
        threads = compute_thread_share(comm.allgather(list_usable_cores()), comm.rank)
        log_level = options.log_level.upper()
        trainer_options = TrainerOptions(threads, log_level)
        slot = TrainerSlot(template, TrainerOutput(), trainer_options, options.fresh_trainers)
        constraint_client = ConstraintClient(slot.fork_other)
        resources.callback(constraint_client.close)
        constraints = RemoteConstraints(constraint_client)

        def check_options() -> RunRequest | None:
            if not job.is_first:
                return None
            from hpo.run.request import make_request

            return make_request(options, layout, template.ask, constraints)

        request = run_on_all(world, check_options)
        data = world.bcast(request.problem.data if request else None)
        problem = request.problem if request else Problem.from_data(data, constraints=constraints)
        # The losses of a program are read from its output.
        slot.is_attended = is_attended and problem.file.script is None
        # The template of the first rank has already loaded the file for the request.
        is_later = is_first_of_template and request is None
        run_on_all(world, lambda: _load_search_file(template, problem, is_later))
        for package, danger in request.hazards.items() if request else ():
            text = f"when {package} is imported, {danger}: each trainer imports it"
            print(f"{problem.file.path}: {text}", flush=True)
        if problem.file.has_prepare:
            if request and shows_progress:
                print("preparing data", flush=True)
            run_on_all(world, lambda: _prepare_data(problem, slot, template, bool(request)))
            run_on_all(world, lambda: _prepare_data(problem, slot, template, is_later))
            if not is_first_of_template:
                template.fetch_data()
        place, gpu_problem = find_place(comm, world.rank, slot)
        seen = world.allgather((place.host_name, len(place.gpus.visible), gpu_problem))
        run_on_all(world, lambda: check_gpus(seen))
        gc.freeze()  # Garbage collection is faster if it skips the objects that exist now.
        gc.enable()
        yield RankState(request, problem, place, slot)


def _load_search_file(template: TemplateClient, problem: Problem, is_to_load: bool) -> None:
    """Let the template load the search file that the first rank has read.

    `is_to_load` is true on one rank per template, and false if the template has loaded the file
    already. The template receives the content and does not read the file, because the file may
    change during a run, and hosts may see different files.
    """
    requests = [("load", problem.file.data), ("bind", {"assignments": list(problem.assignments)})]
    for kind, content in requests if is_to_load else ():
        template.ask(kind, **content)
    template.load_requests = requests


def _prepare_data(
    problem: Problem, slot: TrainerSlot, template: TemplateClient, is_to_prepare: bool
) -> None:
    """Let a trainer call the user's `prepare`, and pass the returned data to the template."""
    from hpo.evaluation.trainer_client import TrainerEnd

    if not is_to_prepare:
        return
    trainer = slot.fork_other()
    try:
        found = trainer.ask("prepare", "prepared")
    finally:
        trainer.kill()
        trainer.close()
    if isinstance(found, TrainerEnd):
        raise UsageError(f"{problem.file.path}: prepare: {found.text}")
    if found["mistake"]:
        raise UsageError(found["mistake"])
    (descriptor,) = found.descriptors
    try:
        template.keep_data(descriptor)
    except OSError as error:
        raise RunError(f"the data cannot be shared: {error}") from error
