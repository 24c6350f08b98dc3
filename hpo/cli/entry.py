"""Define the entry points of run_islands.py and hpo.

In an MPI job, one rank parses the options and sends them to all other ranks.
"""

from __future__ import annotations

import gc
import io
import itertools
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Union

from hpo.cli.mpi_library import import_mpi
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
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "search":
        # As the user typed it, for run.json. Launchers replace it by the whole path.
        sys.argv[0] = "hpo"
    if name in ("search", "check", "check-cluster"):
        _run_and_exit(name, f"hpo {name}", sys.argv[2:])
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

    Collective: call on all ranks. Messages have the name of the program. Without a search space on
    the command line, the path `default` is searched.
    """
    _run_and_exit("search", program, arguments, default)


def _run_and_exit(
    name: str, program: str, arguments: Sequence[str], default: Path | None = None
) -> NoReturn:
    """Run search, check or check-cluster on this rank of an MPI job, then exit the process."""
    from hpo.process.standard_streams import divert_output, fill_closed_streams

    fill_closed_streams()
    # A run does not need its standard output.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    if "--json" in itertools.takewhile(lambda argument: argument != "--", arguments):
        divert_output()
    template = _start_mpi(program, is_shown=name == "search" and "--help" not in arguments)
    from hpo.ranks.communicator import finalize_mpi, get_world
    from hpo.ranks.job import Job, abort_for_error
    from hpo.ranks.rank_watch import RankWatch

    # Imports create many permanent objects. `prepare_rank` enables garbage collection again.
    gc.disable()
    _escape_output()
    comm = get_world()
    try:
        with RankWatch(comm) as watch:
            job = Job(comm, watch, template)
            status = _run_on_rank(job, name, program, arguments, default)
    except CollectiveUsageError as error:
        if comm.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = ExitStatus.USAGE_ERROR
    except BaseException as error:
        abort_for_error(watch, error)  # Other ranks wait for this rank, so the whole job must end.
    if template is not None:
        template.kill()
    gc.freeze()  # It shortens the garbage collection at the exit of Python.
    finalize_mpi()
    exit_process(status)


def _start_mpi(program: str, is_shown: bool) -> TemplateProcess | None:
    """Start MPI. On the first rank of each host, first start and return the template.

    If `is_shown`, the first rank prints that it loads them. Exit the process with a message if a
    required package is not installed. End the job with a message if the template cannot be started.
    """
    from hpo.process.launcher import is_first_rank

    template = None
    try:
        check_packages(program)
        if is_shown and is_first_rank(os.environ):
            # On a slow machine, the next line may follow half a minute later.
            print("loading MPI and torch", flush=True)
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
    job: Job, name: str, program: str, arguments: Sequence[str], default: Path | None
) -> int:
    from hpo.ranks.communicator import sort_by_host, split_by_host, unlink_shared_memory

    host = split_by_host(job.world)
    unlink_shared_memory(host)  # After this, a job that is killed leaves no files.
    parsed: _Parsed | None = None
    if job.is_first:
        parsed = _parse_command(name, program, arguments, default, job.world.size)
    parsed = job.world.bcast(parsed)
    if isinstance(parsed, int):
        return int(parsed)
    options, layout = parsed
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    job = replace(job, world=sort_by_host(job.world, host, layout.ranks_per_worker))
    if name == "search":
        from hpo.run.run_search import run_search

        return run_search(options, layout, job)
    if name == "check":
        from hpo.check.run_check import run_check

        return run_check(options, layout, job)
    from hpo.check.run_cluster_check import run_cluster_check

    return run_cluster_check(options, layout, job)


def _parse_command(
    name: str, program: str, arguments: Sequence[str], default: Path | None, ranks: int
) -> _Parsed:
    """Return the options and the layout of a command line; or an exit status, after a mistake."""
    from hpo.cli.command_line import call_app, run_command
    from hpo.cli.mpi_commands import make_check, make_cluster_check, make_command_app, make_search
    from hpo.cli.search_source import split_command
    from hpo.process.launcher import is_first_rank

    wrong_launch = describe_wrong_launch(ranks, os.environ)
    if wrong_launch and not is_first_rank(os.environ):
        return ExitStatus.USAGE_ERROR  # The first process prints the message.
    own, command = split_command(arguments)
    if name == "search":
        function = make_search(default, command)
    elif name == "check":
        function = make_check(command)
    else:
        function = make_cluster_check()
        own = list(arguments)

    def parse() -> _Parsed:
        given = call_app(make_command_app(function), program, own)
        if not isinstance(given, dict):
            return int(given or 0)  # --help
        if wrong_launch:
            raise UsageError(wrong_launch)
        if name == "search":
            from hpo.run.resolve_options import resolve_options

            options, layout = resolve_options(given, ranks)
            # A directory without a given name gets a new one, which begins like this.
            folder = options.run_dir or RUNS_DIR / options.search_space.stem
            RunDir(folder).check_usable(options.resume or options.run_dir is None)
            return options, layout
        options = Options(**given)
        if name == "check":
            return options, Layout(ranks, ranks, 1)  # All ranks are one worker.
        RunDir(options.run_dir or RUNS_DIR).check_usable(resume=True)
        return options, Layout.choose(ranks, options.ranks_per_worker, None)

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
    # Propulate requires GPy, which has no wheels for Python 3.13 (GPy 1.13.2), and is not used
    # here.
    is_separate = "propulate" in missing and sys.version_info >= (3, 13)
    commands = []
    if missing != ["propulate"]:
        commands.append("pip install 'hpo-islands[search]'")
    if is_separate or not commands:
        commands.append(f"pip install {'--no-deps ' * is_separate}'{PROPULATE_REQUIREMENT}'")
    raise UsageError(
        f"{program} needs {', '.join(missing)}, not installed here. Run: {' && '.join(commands)}"
    )


def _import_mpi() -> None:
    """Import and initialize MPI. Raise a UsageError if mpi4py finds no MPI library."""
    try:
        import_mpi()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI ({str(error).splitlines()[0]}). Load the MPI module of the "
            "cluster, or run: pip install 'hpo-islands[mpich]'"
        ) from error
