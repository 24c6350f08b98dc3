"""The options of hpo check on the command line, as typer reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import duration, new_app
from hpo.cli.groups import GroupedCommand
from hpo.cli.script import FLAGS, LOSS, METRICS, SPACE, find_source
from hpo.run.options import Options

_PATIENCE = 60.0  # seconds: a mistake that makes ranks wait for each other is to show soon


def check_app(chosen: Callable[[Options], None], command: Sequence[str] | None = None) -> typer.Typer:
    """Make the command line of hpo check, which calls `chosen` with its options; `command` stands behind ``--``."""
    app = new_app()
    app.command("check", cls=GroupedCommand)(check_command(chosen, command))
    return app


def check_command(chosen: Callable[[Options], None], command: Sequence[str] | None = None) -> Callable[..., None]:
    """Make the function that typer calls with what is on the command line, a parameter for each option."""

    def check(  # noqa: PLR0913 - an argument for each option
        search_space: Annotated[
            Optional[Path],
            typer.Argument(metavar="SEARCH_SPACE", help="As for hpo search."),
        ] = None,
        settings: Annotated[
            Optional[list[str]],
            typer.Option("--set", metavar="NAME=VALUE", help="Setting of the search space; repeatable."),
        ] = None,
        enqueue: Annotated[
            Optional[Path],
            typer.Option(
                metavar="FILE",
                help="JSON list; its first hyperparameters are evaluated.  [default: the middle of the space]",
            ),
        ] = None,
        collective_timeout: Annotated[
            float,
            typer.Option(
                metavar="TIME",
                parser=duration,
                help="Fail an evaluation if a rank blocks the others this long.  [default: 60s]",
                show_default=False,
            ),
        ] = _PATIENCE,
        space: SPACE = None,
        loss: LOSS = None,
        metrics: METRICS = None,
        flags: FLAGS = None,
    ) -> None:
        """Find mistakes in a search space or program.

        It evaluates one individual on all ranks, again, and on one rank. Start it with MPI, with as many ranks as a
        worker has: mpirun -n 2 hpo check SEARCH_SPACE. For a program that is written for torchrun: mpirun -n 2 hpo
        check --loss REGEX -- train.py --epochs 3

        TIME is a number of seconds, or such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        given = {"space": space, "loss": loss, "metrics": metrics, "flags": flags}
        path, source = find_source(search_space, command, given, needs_space=False)
        chosen(
            Options(
                path,
                source=source,
                settings=tuple(settings or ()),
                enqueue=enqueue,
                collective_timeout=collective_timeout,
            )
        )

    return check
