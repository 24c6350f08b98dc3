"""The subcommands of hpo, as typer reads them: for what needs no MPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.command_line import new_app, whole
from hpo.errors import UsageError

app = new_app()

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run, running or finished.")]
Storage = Annotated[Optional[str], typer.Option(metavar="URL", help="The study's storage, where it needs a password.")]


@app.callback(invoke_without_command=True)
def hpo(context: typer.Context) -> None:
    """Look at runs of run_islands.py, and look after them."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def top(
    run_dir: RunDirectory,
    n: Annotated[int, typer.Option("-n", metavar="N", parser=whole, help="Individuals per table.")] = 3,
    storage: Storage = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: summary.json without the times.")] = False,
) -> None:
    """Print the best individuals of each island and of the whole run."""
    from hpo.reader import RunReader
    from hpo.report.tables import print_tables

    if n < 1:
        raise UsageError(f"-n must be at least 1, not {n}")
    summary = RunReader(run_dir, storage).summary(n)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print_tables(summary)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="mpirun -n 8 python run_islands.py --run-dir runs/NAME"),
    ],
    restarts: Annotated[
        int, typer.Option(metavar="N", parser=whole, help="How often in a row to start again without progress.")
    ] = 3,
) -> None:
    """Run a job, and start it again with --resume when it crashes."""
    from hpo.supervisor import Supervisor

    context.exit(Supervisor(command, restarts, lambda text: print(f"hpo run: {text}", flush=True)).run())
