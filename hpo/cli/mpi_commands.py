"""Define the commands that run as MPI jobs: search, check, check-cluster. They return options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand

from hpo.cli.command_line import make_app, make_parser
from hpo.cli.search_source import (
    find_search_space,
    list_search_spaces,
    make_script,
    parse_space,
)
from hpo.errors import UsageError
from hpo.options import OPTIONS, PROGRAM_OPTIONS, Option, ProgramOptions, format_value

_ALL_OPTIONS = {**OPTIONS, **PROGRAM_OPTIONS}
_GROUPS = list(dict.fromkeys(option.group for option in _ALL_OPTIONS.values()))
_CHECK_OPTIONS = (
    *("collective_timeout", "settings", "enqueue"),
    *("space", "loss", "maximize", "step", "metrics", "flags"),
    *("resume_args", "resume_file", "as_json"),
)
# The name of a hyperparameter that has no effect, for a program without hyperparameters.
_UNUSED_NAME = "nothing"
_CHECK_TIMEOUT = 60.0  # seconds. It is short, so that a deadlock between ranks shows soon.
_CLUSTER_CHECK_TIMEOUT = 20.0  # seconds, so that the check ends within a minute
_CLUSTER_CHECK_FILE = Path(__file__).parents[1] / "training" / "group_speed_search.py"


class GroupedCommand(TyperCommand):
    """A command of typer whose `--help` lists the options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and each group of options as a section of `--help`."""
        for heading, parameters in group_parameters(self.get_params(ctx)):
            records = [parameter.get_help_record(ctx) for parameter in parameters]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record is not None])


def group_parameters(parameters: Iterable[Any]) -> list[tuple[str, list[Any]]]:
    """Return pairs of a heading and its parameters: arguments, the groups of options, the rest."""
    groups: dict[str, list[Any]] = {heading: [] for heading in ("Arguments", *_GROUPS, "Options")}
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            groups["Arguments"].append(parameter)
        elif parameter.name in _ALL_OPTIONS:
            groups[_ALL_OPTIONS[parameter.name].group].append(parameter)
        else:
            groups["Options"].append(parameter)
    return [(heading, found) for heading, found in groups.items() if found]


def make_search(
    default: Path | None = None, program: Sequence[str] | None = None
) -> Callable[..., dict[str, Any]]:
    """Return the function that typer calls for a search. It returns the given options by name.

    Args:
        default: Path of the default search space. If None, the user must give one, or a program.
        program: The program and its arguments, given after ``--``; None without ``--``.
    """

    def search(search_space: Path | None, **given: Any) -> dict[str, Any]:
        """Search hyperparameters with islands of workers.

        Start it with MPI: mpirun -n 8 python run_islands.py, or mpirun -n 8 hpo search
        SEARCH_SPACE. For a program that is written for torchrun: mpirun -n 8 hpo search --space
        NAME=PARAMETER --loss REGEX -- train.py --epochs 3

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        is_default = search_space == default and program is not None
        return _collect_given(None if is_default else search_space, program, given)

    shipped = ", ".join(list_search_spaces())
    help_text = (
        f"A Python file with `space` and `objective`, or one of {shipped}. A program after -- "
        "takes its place."
    )
    needs_file = default is None and program is None
    argument = (help_text, inspect.Parameter.empty if needs_file else default)
    return _set_signature(search, _ALL_OPTIONS, search_space=argument)


def make_check(program: Sequence[str] | None = None) -> Callable[..., dict[str, Any]]:
    """Return the function that typer calls for `hpo check`, see `make_search`."""

    def check(search_space: Path | None, **given: Any) -> dict[str, Any]:
        """Find mistakes in a search space or program.

        It evaluates one individual on all ranks, again, and on one rank. Start it with MPI, with as
        many ranks as a worker has: mpirun -n 2 hpo check SEARCH_SPACE. For a program that is
        written for torchrun: mpirun -n 2 hpo check --loss REGEX -- train.py --epochs 3

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        options = _collect_given(search_space, program, given, needs_space=False)
        return {"collective_timeout": _CHECK_TIMEOUT, **options}

    options = {name: _ALL_OPTIONS[name] for name in _CHECK_OPTIONS}
    options["collective_timeout"] = replace(options["collective_timeout"], default_text="60s")
    options["enqueue"] = replace(
        options["enqueue"],
        help="JSON list; its first hyperparameters are evaluated.",
        default_text="the middle of the space",
    )
    return _set_signature(check, options, search_space=("As for hpo search.", None))


def make_cluster_check() -> Callable[..., dict[str, Any]]:
    """Return the function that typer calls for `hpo check-cluster`, see `make_search`."""

    def check_cluster(**given: Any) -> dict[str, Any]:
        """Test the hosts, GPUs, network and file system of a job.

        It needs no search space, and takes about 10 seconds, or a minute if hosts do not answer.
        Start it as you would start a search: srun --mpi=pmi2 hpo check-cluster

        It prints the hosts and the speed of process groups, and what is wrong, with advice. The
        status is 0 if nothing is wrong.

        TIME is a number of seconds, or a duration such as 90s, 10m, 1h30m, 2d or 1:30:00.
        """
        base = {"search_space": _CLUSTER_CHECK_FILE, "collective_timeout": _CLUSTER_CHECK_TIMEOUT}
        return {**base, **_select_given(given)}

    options = {
        "collective_timeout": replace(
            OPTIONS["collective_timeout"],
            help="Give up if a rank does not answer this long.",
            default_text="20s",
        ),
        "ranks_per_worker": replace(
            OPTIONS["ranks_per_worker"], help="As for hpo search.", default_text=""
        ),
        "run_dir": replace(
            OPTIONS["run_dir"],
            help="Run directory whose file system is tested.",
            default_text="runs",
        ),
        "as_json": OPTIONS["as_json"],
    }
    return _set_signature(check_cluster, options)


def make_command_app(command: Callable[..., dict[str, Any]]) -> typer.Typer:
    """Return a typer app with one command."""
    app = make_app()
    app.command(cls=GroupedCommand)(command)
    return app


def _collect_given(
    search_space: Path | None,
    command: Sequence[str] | None,
    parsed: Mapping[str, Any],
    needs_space: bool = True,
) -> dict[str, Any]:
    """Return the fields of `Options` that the user has given, with the search file.

    For a program, the search file is made, and has the path of the program.

    Args:
        command: The program and its arguments, given after ``--``; None without ``--``.
        needs_space: Whether a program must have hyperparameters.
    """
    given = _select_given(parsed)
    if "trackers" in given:
        given["trackers"] = tuple(dict.fromkeys(given["trackers"]))
    of_program = {name: given.pop(name) for name in PROGRAM_OPTIONS if name in given}
    if command is None:
        for name in of_program:
            flag = PROGRAM_OPTIONS[name].flags
            raise UsageError(
                f"{flag} must be used with a program after --, as in -- train.py --epochs 3"
            )
        if search_space is None:
            raise UsageError(
                "there must be a search space file, such as my_search.py, or a program after --"
            )
        return {**given, "search_space": find_search_space(search_space), "source": None}
    if search_space is not None:
        raise UsageError(
            f"{search_space} and a program after -- exclude each other. Give one of them"
        )
    options = ProgramOptions(**of_program)
    if not options.space and not needs_space:
        unused = f"{_UNUSED_NAME}=Categorical(False, True)"
        options = replace(options, space=(unused,), flags=(*options.flags, _UNUSED_NAME))
    codes = parse_space(options.space)
    script = make_script(command, options)
    source = script.format_search_file(codes).encode()
    return {**given, "search_space": Path(script.name), "source": source}


def _select_given(parsed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in parsed.items()
        if value is not None
    }


def _set_signature(
    command: Callable[..., dict[str, Any]],
    options: Mapping[str, Option],
    **arguments: tuple[str, Any],
) -> Callable[..., dict[str, Any]]:
    """Give a function the signature from which typer makes the command line, and return it.

    The value of an option is None if it is not given. The other arguments are paths, each with its
    help and its default.
    """
    parameters = []
    for name, (text, default) in arguments.items():
        info = typer.Argument(metavar=name.upper(), help=text)
        parameters.append((name, Annotated[Path, info], default))
    for name, option in options.items():
        kind = option.kind
        shown = option.default_text
        if shown is None and isinstance(option.default, bool):
            shown = option.flags.split("/")[not option.default]
        elif shown is None:
            shown = format_value(option.default)
        info = typer.Option(
            option.flags,
            metavar=kind.metavar,
            parser=make_parser(kind) if kind.parse is not None else None,
            help=f"{option.help}  [default: {shown}]" if shown else option.help,
            show_default=False,
        )
        # A text stands for several values if the option is repeatable.
        value = list[str] if kind.types == (tuple,) and kind.parse is None else kind.types[0]
        parameters.append((name, Annotated[Optional[value], info], None))
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, annotation, default in parameters
        ]
    )
    command.__annotations__ = {name: annotation for name, annotation, _ in parameters}
    return command
