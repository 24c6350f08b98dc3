"""Define the subcommands of hpo that do not need MPI, such as `hpo top` and `hpo watch`."""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import make_app, make_count_option
from hpo.cli.job_scripts import add_script_commands
from hpo.cli.mpi_commands import GroupedCommand, make_check, make_cluster_check, make_search
from hpo.cli.mpi_library import find_mpi
from hpo.errors import RunError, UsageError
from hpo.options import TRACKERS, check_trackers
from hpo.store.run_dir import is_file_of_run, write_atomically
from hpo.text_format import make_printable, make_printable_lines
from hpo.versions import read_versions

app = make_app()

RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, running or finished.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]
Storage = Annotated[
    Optional[str], typer.Option(metavar="URL", help="Storage of the study, if it needs a password.")
]


# These are here for `hpo --help` only. hpo.cli.entry runs them, on each rank of an MPI job.
app.command(cls=GroupedCommand)(make_search())
app.command(cls=GroupedCommand)(make_check())
app.command(cls=GroupedCommand)(make_cluster_check())


@app.callback(invoke_without_command=True)
def hpo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print versions, for a bug report.")
    ] = False,
) -> None:
    """Search hyperparameters, and inspect or supervise runs."""
    if version:
        for name, number in read_versions().items():
            print(f"{name} {number}")
        print(f"MPI: {find_mpi()}")
        print(platform.platform())
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def init(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python script that trains a network.")
    ],
) -> None:
    """Propose a search file for a training script."""
    from hpo.cli.proposal import propose_search

    print(propose_search(script), end="")


@app.command()
def top(
    run_dir: RunDirectory,
    n: Annotated[int, make_count_option("Individuals per table.", "-n")] = 3,
    failed: Annotated[
        bool, typer.Option("--failed", help="Print the latest failures instead.")
    ] = False,
    storage: Storage = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON: summary.json without times, or all about failures."
        ),
    ] = False,
) -> None:
    """Print the best individuals, or the failures."""
    from hpo.results.reader import RunReader
    from hpo.results.summary import make_summary_content

    if n < 1:
        raise UsageError(f"-n must be at least 1, got {n}")
    run = RunReader(run_dir, storage)
    if failed:
        from hpo.views.evaluation_details import EvaluationLookup, make_json_content
        from hpo.views.summary_tables import format_failed

        lookup = EvaluationLookup.read(run)
        failures = lookup.list_failed()
        if as_json:
            details = map(lookup.collect_details, failures[:n])
            print(json.dumps(list(map(make_json_content, details)), indent=2, allow_nan=False))
        else:
            print(*format_failed(failures, n, run.run_dir.path), sep="\n")
    elif as_json:
        print(json.dumps(make_summary_content(run.make_summary(n)), indent=2))
    else:
        from hpo.views.summary_tables import print_advice, print_tables

        is_active = run.run_dir.is_in_use is not False
        print_tables(run.make_summary(n), run_dir, is_active=is_active)
        print_advice(run.find_advice())


@app.command()
def compare(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", help="The directories of two runs, or more.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of the runs.")] = False,
) -> None:
    """Compare the best of several runs, and what they cost."""
    from hpo.results.reader import RunReader
    from hpo.views.comparison import format_comparison, make_comparison_content

    if len(set(run_dirs)) < 2:
        raise UsageError(f"hpo compare needs two different runs, got only {run_dirs[0]}")
    runs = {str(run_dir): RunReader(run_dir).make_summary(1) for run_dir in run_dirs}
    if as_json:
        print(json.dumps(make_comparison_content(runs), indent=2))
    else:
        print(make_printable_lines(format_comparison(runs)))


@app.command()
def show(
    run_dir: RunDirectory,
    trial: Annotated[
        Optional[str],
        typer.Argument(
            metavar="TRIAL",
            help="Number of an evaluation, or confirm-N.  "
            "[default: the winner, or the last failure]",
        ),
    ] = None,
    storage: Storage = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object, with all losses.")
    ] = False,
) -> None:
    """Print all about one evaluation.

    Its hyperparameters, losses, logs and traceback.
    """
    from hpo.results.reader import RunReader
    from hpo.views.evaluation_details import EvaluationLookup, format_evaluation, make_json_content

    lookup = EvaluationLookup.read(RunReader(run_dir, storage))
    why = ""
    if trial is not None:
        evaluation = lookup.find_evaluation(trial)
    else:
        evaluation, why = lookup.choose_evaluation()
    details = lookup.collect_details(evaluation)
    if as_json:
        print(json.dumps(make_json_content(details), indent=2, allow_nan=False))
    else:
        print(*format_evaluation(details, run_dir, why, time.time()), sep="\n")


@app.command()
def best(
    run_dir: RunDirectory,
    by: Annotated[
        Optional[str],
        typer.Option(metavar="NAME", help="Print the best by this one of several objectives."),
    ] = None,
    python: Annotated[
        bool, typer.Option("--python", help="Print a Python dict instead of JSON.")
    ] = False,
    storage: Storage = None,
) -> None:
    """Print the best hyperparameters as JSON.

    The loss and the path of the weights are printed to stderr.
    """
    from hpo.results.reader import RunReader
    from hpo.views.result_text import describe_winner

    run = RunReader(run_dir, storage)
    chosen = run.find_winner() if by is None else run.find_best_by(by)
    if chosen is None:
        raise UsageError(f"{run_dir}: no evaluation has succeeded")
    print(repr(chosen.params) if python else json.dumps(chosen.params, indent=2))
    print(*describe_winner(run, chosen, by), sep="\n", file=sys.stderr)


@app.command()
def report(
    run_dir: RunDirectory,
    n: Annotated[int, make_count_option("Individuals in the table of the best.", "-n")] = 10,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write.  [default: RUN_DIR/report.html]"
        ),
    ] = None,
    overwrite: Overwrite = False,
    storage: Storage = None,
) -> None:
    """Write a report for a browser.

    The report is one HTML file that works without a network.
    """
    from hpo.results.reader import RunReader
    from hpo.views.page.html_report import make_report

    if n < 1:
        raise UsageError(f"-n must be at least 1, got {n}")
    run = RunReader(run_dir, storage)
    path = run.run_dir.report_html
    if output is not None and output.resolve() != path.resolve():
        path = _check_output(output, overwrite)
    _write_output(path, make_report(run, n))
    if not _is_stream(path):
        print(path)


@app.command()
def export(
    run_dir: RunDirectory,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="csv, json or parquet.")],
    output: Annotated[
        Optional[Path],
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write.  [default: standard output]"
        ),
    ] = None,
    overwrite: Overwrite = False,
    storage: Storage = None,
) -> None:
    """Write a table of all evaluations."""
    from hpo.results.reader import RunReader
    from hpo.views.export import find_writer, make_evaluation_table

    written = find_writer(to)
    if output is None and to == "parquet":
        raise UsageError("--to parquet must be used with -o FILE")
    if output is not None:
        output = _check_output(output, overwrite)
    content = written(make_evaluation_table(RunReader(run_dir, storage)))
    if output is not None:
        _write_output(output, content, "-o ")
    else:
        sys.stdout.buffer.write(content)


@app.command()
def watch(
    context: typer.Context,
    run_dir: RunDirectory,
    storage: Storage = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the present status as JSON, and exit.")
    ] = False,
) -> None:
    """Browse a running or finished run in the terminal. ? shows the keys, q quits."""
    if as_json:
        from hpo.results.reader import RunReader
        from hpo.views.live.run_status import compute_run_status, make_status_content

        status = compute_run_status(RunReader(run_dir, storage).take_snapshot())
        print(json.dumps(make_status_content(status), indent=2, allow_nan=False))
        return
    from hpo.views.live.run_watch import watch_run

    context.exit(watch_run(run_dir, storage))


@app.command()
def track(
    context: typer.Context,
    run_dir: RunDirectory,
    trackers: Annotated[
        list[str], typer.Option("--tracker", metavar="NAME", help=f"{', '.join(TRACKERS)}.")
    ],
    storage: Storage = None,
) -> None:
    """Log a run to trackers.

    Evaluations that a tracker already has are skipped.
    """
    from hpo.trackers.tracker_processes import track_run

    check_trackers(trackers)
    context.exit(0 if track_run(run_dir, tuple(dict.fromkeys(trackers)), storage) else 1)


@app.command(context_settings={"allow_interspersed_args": False})
def supervise(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND...", help="mpirun -n 8 python run_islands.py --run-dir runs/NAME"
        ),
    ],
    max_restarts: Annotated[
        int, make_count_option("Give up after N restarts in a row without progress.")
    ] = 3,
) -> None:
    """Restart a job with --resume if it crashes."""
    from hpo.supervise.supervisor import Supervisor

    def print_message(text: str) -> None:
        print(make_printable(f"hpo supervise: {text}"), flush=True)

    context.exit(Supervisor(command, max_restarts, print_message).run())


add_script_commands(app)


def _check_output(output: Path, overwrite: bool) -> Path:
    """Return the path to write to; `-` is standard output.

    Raise a UsageError if the path is a directory, a file of a run, or a file to keep.
    """
    if str(output) == "-":
        return Path("/dev/stdout")
    if not os.path.lexists(output) or _is_stream(output):
        return output
    if output.exists() and not output.is_file():
        raise UsageError(f"-o must be a file or a pipe, got '{output}'")
    if is_file_of_run(output):
        raise UsageError(f"-o {output} is a file of a run. Name another file")
    if not overwrite:
        raise UsageError(f"-o {output} exists. Add --overwrite to replace it, or name another file")
    return output


def _is_stream(path: Path) -> bool:
    """Return whether a path is a pipe, a device, or an open file of this process (/dev/stdout)."""
    if str(path.parent) == "/dev/fd" or str(path) in ("/dev/stdout", "/dev/stderr"):
        return True
    with suppress(OSError):
        mode = path.stat().st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    return False


def _write_output(output: Path, content: bytes, option: str = "") -> None:
    """Write a file atomically, or write to a pipe or device. Raise a UsageError if this fails."""
    try:
        if not _is_stream(output):
            write_atomically(output, content)
            return
        with output.open("ab") as stream:
            stream.write(content)
    except BrokenPipeError:
        raise
    except RunError as error:
        raise UsageError(f"{option}{error}") from error
    except OSError as error:
        raise UsageError(f"{option}{output} cannot be written: {error.strerror}") from error
