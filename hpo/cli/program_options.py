"""A search over a program on the command line: hpo search --space ... --loss ... -- train.py --epochs 3."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from hpo.cli.shipped_spaces import find_search_space
from hpo.errors import UsageError
from hpo.parameter_parsing import parse_parameter
from hpo.script_objective import Script, find_program
from hpo.space import SearchSpace

# Options that search and check have in common.
SPACE_OPTION = Annotated[
    Optional[list[str]],
    typer.Option(
        metavar="NAME=PARAMETER",
        help="A hyperparameter, such as 'lr=Float(1e-4, 1e-1, log=True)'; repeatable.",
    ),
]
LOSS_OPTION = Annotated[
    Optional[str],
    typer.Option(
        metavar="REGEX",
        help="Regular expression of printed losses, such as 'val_loss=(\\S+)'.  [default: from hpo.report]",
    ),
]
METRICS_OPTION = Annotated[
    Optional[list[str]],
    typer.Option("--metric", metavar="NAME=REGEX", help="Regular expression of a printed metric; repeatable."),
]
FLAGS_OPTION = Annotated[
    Optional[list[str]],
    typer.Option(
        "--flag",
        metavar="NAME",
        help="A boolean hyperparameter: --NAME if true, absent if false; repeatable.",
    ),
]

PROGRAM_OPTIONS = {
    "space": "--space",
    "loss": "--loss",
    "metrics": "--metric",
    "flags": "--flag",
    "resume_args": "--resume-args",
    "first_report": "--first-report",
}
"""The options that describe a program, by the names of what is given."""

_UNUSED_NAME = "nothing"  # a hyperparameter that a program does not get, if it has none
_EXAMPLE = "write it as --space 'lr=Float(1e-4, 1e-1, log=True)'"


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before ``--``, and the command behind it; None without one."""
    if "--" not in arguments:
        return list(arguments), None
    place = list(arguments).index("--")
    return list(arguments[:place]), list(arguments[place + 1 :])


def find_source(
    search_space: Path | None, command: Sequence[str] | None, given: Mapping[str, Any], needs_space: bool = True
) -> tuple[Path, bytes | None]:
    """Return the path of the search file or program, and for a program a search file made from the `given` options.

    Raises UsageError if neither a search file nor a program is named, or both are, or an option is wrong.
    """
    if command is None:
        for name, option in PROGRAM_OPTIONS.items():
            if given.get(name):
                raise UsageError(f"{option} is for a program, which stands behind --, as in -- train.py --epochs 3")
        if search_space is None:
            raise UsageError("name a search space file, such as my_search.py, or a program behind --")
        return find_search_space(search_space), None
    if search_space is not None:
        raise UsageError(f"{search_space} and a program behind --: give one of them")
    texts, flags = given["space"] or [], list(given["flags"] or [])
    if not texts and not needs_space:
        texts, flags = [f"{_UNUSED_NAME}=Categorical(False, True)"], [*flags, _UNUSED_NAME]
    codes = parse_space(texts)
    options = {"resume_args": None, "first_report": None, **given, "metrics": given["metrics"] or [], "flags": flags}
    options.pop("space")
    script = make_script(command, **options)
    return Path(script.name), script.format_search_file(codes).encode()


def make_script(
    command: Sequence[str], metrics: Sequence[str], resume_args: str | None, first_report: int | None, **options: Any
) -> Script:
    """Return the program of a command line; `options` are as for a Script.

    Raises UsageError if it cannot be run, or an option is wrong.
    """
    parts = list(command)
    if parts[:1] in (["python"], ["python3"]) and parts[1:2] == ["-u"]:
        del parts[1]
    if parts[:1] in (["python"], ["python3"]) and parts[1:2] and not (parts[1].startswith("-") and parts[1] != "-m"):
        parts = parts[1:]  # as trainers do it, which have imported torch
    if not parts:
        raise UsageError("-- needs a command behind it, such as -- train.py --epochs 3")
    if "/" not in parts[0] and not parts[0].endswith(".py") and parts[0] != "-m" and Path(parts[0]).is_file():
        parts[0] = f"./{parts[0]}"
    patterns = dict(_split_assignment(text, "--metric", "--metric 'accuracy=acc: (\\S+)'") for text in metrics)
    try:
        script = Script(*parts, metrics=patterns, resume=resume_args or "", first_report=first_report or 1, **options)
        find_program(script)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return script


def parse_space(texts: Sequence[str]) -> dict[str, str]:
    """Return the code of each parameter of a space, by name, given NAME=CODE texts; no code is run.

    Raises UsageError if one of them is not a parameter whose arguments are plain values.
    """
    if not texts:
        raise UsageError(f"a search over a program needs its hyperparameters: {_EXAMPLE}")
    codes: dict[str, str] = {}
    parameters = {}
    for text in texts:
        name, code = _split_assignment(text, "--space", _EXAMPLE)
        if name in codes:
            raise UsageError(f"--space {text}: {name} is given twice")
        try:
            parameters[name] = parse_parameter(code)
        except ValueError as error:
            raise UsageError(f"--space {text}: {error}; {_EXAMPLE}") from None
        codes[name] = ast.unparse(ast.parse(code, mode="eval"))
    try:
        SearchSpace(**parameters)
    except ValueError as error:
        raise UsageError(f"--space: {error}") from None
    return codes


def _split_assignment(text: str, option: str, example: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if equals and "-" in name and name.replace("-", "_").isidentifier():
        other = name.replace("-", "_")
        raise UsageError(f"{option} {text}: write {other}={rest}, and --{name} {{{other}}} in the command")
    if not equals or not name.strip().isidentifier() or not rest.strip():
        raise UsageError(f"{option} {text}: {example}")
    return name.strip(), rest.strip()
