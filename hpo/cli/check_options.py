"""Define the options of `hpo check` for typer, the library that parses command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from hpo.cli.command_line import make_app, parse_duration
from hpo.cli.option_groups import GroupedCommand
from hpo.cli.program_options import FLAGS_OPTION, LOSS_OPTION, METRICS_OPTION, SPACE_OPTION, find_source
from hpo.run.options import Options

_COLLECTIVE_TIMEOUT = 60.0  # seconds. It is short, so that a deadlock between ranks shows soon.


def make_check_app(on_options: Callable[[Options], None], command: Sequence[str] | None = None) -> typer.Typer:
    """Return the typer app of hpo check.

    Args:
        on_options: Function that is called with the parsed options.
        command: The program and its arguments, given after ``--``; None without ``--``.
    """
    app = make_app()
    app.command("check", cls=GroupedCommand)(make_check_command(on_options, command))
    return app


def make_check_command(
    on_options: Callable[[Options], None], command: Sequence[str] | None = None
) -> Callable[..., None]:
    """Return the function that typer calls for `hpo check`. It has a parameter for each option.

    Args:
        on_options: Function that is called with the parsed options.
        command: The program and its arguments, given after ``--``; None without ``--``.
    """

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
                parser=parse_duration,
                help="Fail an evaluation if a rank blocks the others this long.  [default: 60s]",
                show_default=False,
            ),
        ] = _COLLECTIVE_TIMEOUT,
        space: SPACE_OPTION = None,
        loss: LOSS_OPTION = None,
        metrics: METRICS_OPTION = None,
        flags: FLAGS_OPTION = None,
    ) -> None:
        """Find mistakes in a search space or program.

        It evaluates one individual on all ranks, again, and on one rank. Start it with MPI, with as many ranks as a
        worker has: mpirun -n 2 hpo check SEARCH_SPACE. For a program that is written for torchrun: mpirun -n 2 hpo
        check --loss REGEX -- train.py --epochs 3

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        given = {"space": space, "loss": loss, "metrics": metrics, "flags": flags}
        path, source = find_source(search_space, command, given, needs_space=False)
        on_options(
            Options(
                path,
                source=source,
                settings=tuple(settings or ()),
                enqueue=enqueue,
                collective_timeout=collective_timeout,
            )
        )

    return check
