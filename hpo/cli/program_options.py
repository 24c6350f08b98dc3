"""Parse the options of a search over a program: hpo search --space ... --loss ... -- train.py --epochs 3."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.cli.shipped_spaces import find_search_space
from hpo.errors import UsageError
from hpo.options import PROGRAM_OPTIONS, ProgramOptions
from hpo.script_objective import Script, find_program
from hpo.space import SearchSpace
from hpo.space.parsing import parse_parameter

# The name of a hyperparameter that has no effect, for a program without hyperparameters.
_UNUSED_NAME = "nothing"
_EXAMPLE = "Write for example --space 'lr=Float(1e-4, 1e-1, log=True)'"


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split a command line at ``--``. Return the arguments before it, and the command after it or None."""
    if "--" not in arguments:
        return list(arguments), None
    index = list(arguments).index("--")
    return list(arguments[:index]), list(arguments[index + 1 :])


def find_source(
    search_space: Path | None,
    command: Sequence[str] | None,
    given: Mapping[str, Any],
    needs_space: bool = True,
) -> tuple[Path, bytes | None]:
    """Return the search file that a command line names, or make a search file for the program after ``--``.

    Args:
        search_space: The search space on the command line; None if it was not given.
        command: The program and its arguments, given after ``--``; None without ``--``.
        given: The values of the fields of `ProgramOptions` that were given.
        needs_space: Whether a program must have hyperparameters.

    Returns:
        The path of the search file, and None. For a program: its path, and the content of the
        search file made for it.

    Raises:
        UsageError: There is neither a search file nor a program, or there are both, or an option is
        not valid.
    """
    if command is None:
        for name in given:
            flag = PROGRAM_OPTIONS[name].flags
            raise UsageError(
                f"{flag} must be used with a program after --, as in -- train.py --epochs 3"
            )
        if search_space is None:
            raise UsageError(
                "there must be a search space file, such as my_search.py, or a program after --"
            )
        return find_search_space(search_space), None
    if search_space is not None:
        raise UsageError(
            f"{search_space} and a program after -- exclude each other. Give one of them"
        )
    options = ProgramOptions(**given)
    if not options.space and not needs_space:
        unused = f"{_UNUSED_NAME}=Categorical(False, True)"
        options = replace(options, space=(unused,), flags=(*options.flags, _UNUSED_NAME))
    codes = parse_space(options.space)
    script = make_script(command, options)
    return Path(script.name), script.format_search_file(codes).encode()


def make_script(command: Sequence[str], options: ProgramOptions) -> Script:
    """Return the Script objective that runs the program after ``--``.

    Args:
        command: The program and its arguments, given after ``--``.
        options: The options that describe the program.

    Raises:
        UsageError: The program does not exist or cannot be executed, or an option is not valid.
    """
    parts = list(command)
    if parts[:1] in (["python"], ["python3"]) and parts[1:2] == ["-u"]:
        del parts[1]
    if (
        parts[:1] in (["python"], ["python3"])
        and parts[1:2]
        and not (parts[1].startswith("-") and parts[1] != "-m")
    ):
        # Trainers run Python scripts themselves, since they have already imported torch.
        parts = parts[1:]
    if not parts:
        raise UsageError("-- must be followed by a command, such as -- train.py --epochs 3")
    if (
        "/" not in parts[0]
        and not parts[0].endswith(".py")
        and parts[0] != "-m"
        and Path(parts[0]).is_file()
    ):
        parts[0] = f"./{parts[0]}"
    example = "Write for example --metric 'accuracy=acc: (\\S+)'"
    metrics = dict(_split_assignment(text, "--metric", example) for text in options.metrics)
    try:
        script = Script(
            *parts,
            loss=options.loss,
            metrics=metrics,
            flags=options.flags,
            resume=options.resume_args,
            first_report=options.first_report,
        )
        find_program(script)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return script


def parse_space(texts: Sequence[str]) -> dict[str, str]:
    """Check the parameters of ``--space``, and return a dict from their names to their Python code.

    Args:
        texts: The texts NAME=PARAMETER of ``--space``, such as ``lr=Float(1e-4, 1e-1, log=True)``.

    Raises:
        UsageError: `texts` is empty, a name is given twice, or a text is not a valid parameter.
    """
    if not texts:
        raise UsageError(f"a search over a program must have hyperparameters. {_EXAMPLE}")
    codes: dict[str, str] = {}
    parameters = {}
    for text in texts:
        name, code = _split_assignment(text, "--space", _EXAMPLE)
        if name in codes:
            raise UsageError(f"--space {text}: {name} must not be given twice")
        try:
            parameters[name] = parse_parameter(code)
        except ValueError as error:
            raise UsageError(f"--space {text}: {error}. {_EXAMPLE}") from None
        codes[name] = ast.unparse(ast.parse(code, mode="eval"))
    try:
        SearchSpace(**parameters)
    except ValueError as error:
        raise UsageError(f"--space: {error}") from None
    return codes


def _split_assignment(text: str, option: str, example: str) -> tuple[str, str]:
    name, equals, rest = text.partition("=")
    if equals and "-" in name and name.replace("-", "_").isidentifier():
        identifier = name.replace("-", "_")
        raise UsageError(
            f"{option} {text}: write {identifier}={rest}, and --{name} {{{identifier}}} in the command"
        )
    if not equals or not name.strip().isidentifier() or not rest.strip():
        raise UsageError(f"{option} must be NAME=..., got {text!r}. {example}")
    return name.strip(), rest.strip()
