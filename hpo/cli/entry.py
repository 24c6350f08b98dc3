"""Define the entry points of run_islands.py and hpo.

In an MPI job, one rank parses the options and sends them to all other ranks.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Union

from hpo.errors import CollectiveUsageError, ExitStatus, RunError, UsageError
from hpo.layout import Layout, describe_wrong_launch
from hpo.options import Options
from hpo.store.run_dir import RUNS_DIR, RunDir

if TYPE_CHECKING:
    from hpo.evaluation.template_client import TemplateProcess
    from hpo.ranks.job import Job

_SECONDS_TO_EXIT = 5.0

_REQUIRED_PACKAGES = ("mpi4py", "propulate", "torch")
PROPULATE_REQUIREMENT = "propulate>=1.2.2,<1.3"  # as in pyproject.toml
_Parsed = Union[tuple[Options, Layout], int]
"""What a command line asks for; or an exit status, after a mistake or --help."""


def main() -> None:
    """Run the command hpo."""
    if sys.argv[1:2] == ["search"]:
        # As the user typed it, for run.json. Launchers replace it by the whole path.
        sys.argv[0] = "hpo"
        search("hpo search", sys.argv[2:])
    if sys.argv[1:2] == ["check"]:
        check("hpo check", sys.argv[2:])
    if sys.argv[1:2] == ["check-cluster"]:
        check_cluster("hpo check-cluster", sys.argv[2:])
    from hpo.cli.command_line import call_app, run_command
    from hpo.cli.commands import app
    from hpo.process.standard_streams import fill_closed_streams

    fill_closed_streams()
    # A lost output must be an error. Without stderr, print would write to stdout.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    _escape_output()
    sys.exit(run_command(lambda: call_app(app, "hpo", sys.argv[1:]), "hpo"))


def search(program: str, arguments: Sequence[str], default: Path | None = None) -> NoReturn:
    """Run a search on this rank of an MPI job, then exit the process.

    Collective: call on all ranks.

    Args:
        program: The name of the program, for messages.
        arguments: The arguments of the command line.
        default: Path of the default search space; None without a default.
    """
    from hpo.cli.search_source import split_command

    arguments, command = split_command(arguments)

    def parse(ranks: int) -> _Parsed:
        from hpo.cli.mpi_commands import make_search

        return _parse_command(
            make_search(default, command), _resolve_search, program, arguments, ranks
        )

    def run(options: Options, layout: Layout, job: Job) -> int:
        from hpo.run.run_search import run_search

        return run_search(options, layout, job)

    _run_and_exit(program, parse, run)


def check(program: str, arguments: Sequence[str]) -> NoReturn:
    """Run `hpo check` as `search` runs a search. Collective: call on all ranks."""
    from hpo.cli.search_source import split_command

    arguments, command = split_command(arguments)

    def parse(ranks: int) -> _Parsed:
        from hpo.cli.mpi_commands import make_check

        return _parse_command(make_check(command), _resolve_check, program, arguments, ranks)

    def run(options: Options, layout: Layout, job: Job) -> int:
        from hpo.check.run_check import run_check

        return run_check(options, layout, job)

    _run_and_exit(program, parse, run)


def check_cluster(program: str, arguments: Sequence[str]) -> NoReturn:
    """Run `hpo check-cluster` as `search` runs a search. Collective: call on all ranks."""

    def parse(ranks: int) -> _Parsed:
        from hpo.cli.mpi_commands import make_cluster_check

        return _parse_command(
            make_cluster_check(), _resolve_cluster_check, program, arguments, ranks
        )

    def run(options: Options, layout: Layout, job: Job) -> int:
        from hpo.check.run_cluster_check import run_cluster_check

        return run_cluster_check(options, layout, job)

    _run_and_exit(program, parse, run)


def _resolve_search(given: Mapping[str, Any], ranks: int) -> tuple[Options, Layout]:
    from hpo.run.resolve_options import resolve_options

    options, layout = resolve_options(given, ranks)
    RunDir(options.run_dir or RUNS_DIR / options.search_space.stem).check_usable(options.resume)
    return options, layout


def _resolve_check(given: Mapping[str, Any], ranks: int) -> tuple[Options, Layout]:
    return Options(**given), Layout(ranks, ranks, 1)  # All ranks are one worker.


def _resolve_cluster_check(given: Mapping[str, Any], ranks: int) -> tuple[Options, Layout]:
    options = Options(**given)
    RunDir(options.run_dir or RUNS_DIR).check_usable(resume=True)
    return options, Layout.choose(ranks, options.ranks_per_worker, None)


def _run_and_exit(
    program: str, parse: Callable[[int], _Parsed], run: Callable[[Options, Layout, Job], int]
) -> NoReturn:
    """Run a command on this rank of an MPI job, then exit the process.

    The first rank calls `parse` with the number of ranks. All ranks call `run` with the result.
    """
    from hpo.process.standard_streams import fill_closed_streams

    fill_closed_streams()
    # A run does not need its standard output.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    template = _start_mpi(program)
    from hpo.ranks.communicator import finalize_mpi, get_world
    from hpo.ranks.job import Job, abort_for_error
    from hpo.ranks.rank_watch import RankWatch

    # Imports create many permanent objects. `prepare_rank` enables garbage collection again.
    gc.disable()
    _escape_output()
    comm = get_world()
    first = comm.rank == 0
    try:
        with RankWatch(comm) as watch:
            status = _run_on_rank(Job(comm, watch, template), parse, run)
    except CollectiveUsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = ExitStatus.USAGE_ERROR
    except BaseException as error:
        abort_for_error(watch, error)  # Other ranks wait for this rank, so the whole job must end.
    if template is not None:
        template.kill()
    gc.freeze()  # It shortens the garbage collection at the exit of Python.
    finalize_mpi()
    exit_process(status)


def _start_mpi(program: str) -> TemplateProcess | None:
    """Start MPI. On the first rank of each host, first start the template.

    Return the template; None on other ranks. Exit the process with a message if a required package
    is not installed. End the job with a message if the template cannot be started.
    """
    from hpo.process.launcher import is_first_rank

    template = None
    try:
        check_packages(program)
        from hpo.evaluation.template_client import start_template

        # MPI implementations discourage forks, so the template starts before MPI. It imports torch
        # at the same time.
        template = start_template()
        _import_mpi()
    except UsageError as error:
        if is_first_rank(os.environ):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if template is not None:
            template.kill()
        sys.exit(ExitStatus.USAGE_ERROR)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        # The other ranks wait for this rank to initialise MPI, so it does, and then ends the job.
        _import_mpi()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(ExitStatus.CRASHED)
        os._exit(ExitStatus.CRASHED)  # Abort may return before the job has ended.
    return template


def _run_on_rank(
    job: Job, parse: Callable[[int], _Parsed], run: Callable[[Options, Layout, Job], int]
) -> int:
    from hpo.ranks.communicator import sort_by_host, split_by_host, unlink_shared_memory

    host = split_by_host(job.world)
    unlink_shared_memory(host)  # After this, a job that is killed leaves no files.
    parsed = job.world.bcast(parse(job.world.size) if job.is_first else None)
    if isinstance(parsed, int):
        return int(parsed)
    options, layout = parsed
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    world = sort_by_host(job.world, host, layout.ranks_per_worker)
    return run(options, layout, replace(job, world=world))


def _parse_command(
    command: Callable[..., dict[str, Any]],
    resolve: Callable[[Mapping[str, Any], int], tuple[Options, Layout]],
    program: str,
    arguments: Sequence[str],
    ranks: int,
) -> _Parsed:
    """Return the options and the layout of a command line; or an exit status, after a mistake."""
    from hpo.cli.command_line import call_app, run_command
    from hpo.cli.mpi_commands import make_command_app
    from hpo.process.launcher import is_first_rank

    wrong_launch = describe_wrong_launch(ranks, os.environ)
    if wrong_launch and not is_first_rank(os.environ):
        return ExitStatus.USAGE_ERROR  # The first process prints the message.

    def parse() -> _Parsed:
        given = call_app(make_command_app(command), program, arguments)
        if not isinstance(given, dict):
            return int(given or 0)  # --help
        if wrong_launch:
            raise UsageError(wrong_launch)
        return resolve(given, ranks)

    return run_command(parse, program)


def _escape_output() -> None:
    # Users and objectives may print characters that the terminal cannot encode.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_process(status: int) -> NoReturn:
    """Exit as `sys.exit` does, but within 5 seconds.

    Threads that libraries have started, and that do not end, could otherwise block the exit.
    """
    timer = threading.Timer(_SECONDS_TO_EXIT, os._exit, (status,))
    timer.daemon = True
    timer.start()
    sys.exit(status)


def check_packages(program: str) -> None:
    """Raise a UsageError with the command to install the packages that a search needs."""
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if not missing:
        return
    commands = ["pip install 'hpo-islands[search]'"] if missing != ["propulate"] else []
    if "propulate" in missing and sys.version_info >= (3, 13):
        # Propulate requires GPy, which has no wheels for Python 3.13 (GPy 1.13.2), and is not used
        # here.
        commands.append(f"pip install --no-deps '{PROPULATE_REQUIREMENT}'")
    commands = commands or [f"pip install '{PROPULATE_REQUIREMENT}'"]
    raise UsageError(
        f"{program} needs {', '.join(missing)}, not installed here. Run: {' && '.join(commands)}"
    )


def _import_mpi() -> None:
    """Import and initialize MPI. Raise a UsageError if mpi4py finds no MPI library."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI ({str(error).splitlines()[0]}). Load the MPI module of the "
            "cluster, or run: pip install 'hpo-islands[mpich]'"
        ) from error
