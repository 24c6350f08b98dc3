"""Define the options of `hpo check-cluster` for typer, the library that parses command lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import make_app, parse_duration, parse_whole_number
from hpo.cli.option_groups import GroupedCommand
from hpo.run.options import Options

_SEARCH_FILE = Path(__file__).parents[1] / "training" / "group_speed_search.py"
_COLLECTIVE_TIMEOUT = 20.0  # seconds, so that the check ends within a minute


def make_cluster_check_app(on_options: Callable[[Options], None]) -> typer.Typer:
    """Return the typer app of hpo check-cluster. It calls `on_options` with the parsed options."""
    app = make_app()
    app.command("check-cluster", cls=GroupedCommand)(make_cluster_check_command(on_options))
    return app


def make_cluster_check_command(on_options: Callable[[Options], None]) -> Callable[..., None]:
    """Return the function that typer calls for `hpo check-cluster`. It calls `on_options` with the parsed options."""

    def check_cluster(
        ranks_per_worker: Annotated[
            Optional[int],
            typer.Option(metavar="N", parser=parse_whole_number, help="As for hpo search."),
        ] = None,
        run_dir: Annotated[
            Optional[Path],
            typer.Option(metavar="DIR", help="Run directory whose file system is tested.  [default: runs]"),
        ] = None,
        collective_timeout: Annotated[
            float,
            typer.Option(
                metavar="TIME",
                parser=parse_duration,
                help="Give up if a rank does not answer this long.  [default: 20s]",
                show_default=False,
            ),
        ] = _COLLECTIVE_TIMEOUT,
    ) -> None:
        """Test the hosts, GPUs, network and file system of a job.

        It needs no search space, and takes about 10 seconds, or a minute if hosts do not answer. Start it as you would
        start a search: srun --mpi=pmi2 hpo check-cluster

        It prints the hosts and the speed of process groups, and what is wrong, with advice. The status is 0 if nothing
        is wrong.

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        on_options(
            Options(
                _SEARCH_FILE,
                ranks_per_worker=ranks_per_worker,
                run_dir=run_dir,
                collective_timeout=collective_timeout,
            )
        )

    return check_cluster
