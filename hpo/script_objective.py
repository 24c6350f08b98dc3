"""A training program as an objective: a command that each rank of a worker runs, as torchrun would run it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.module_search import check_module

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")  # {{name}} stays as {name}
_NUMBER_PATTERN = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
_NAMED_LOSS_PATTERN = re.compile(
    rf"((?:val\w*\s)?[\w./-]*loss[\w./-]*)([\"']?)([\s:=]+)([\"']?)({_NUMBER_PATTERN})", re.IGNORECASE
)
_LAUNCHERS = ("torchrun", "mpirun", "mpiexec", "srun")
_EVALUATION_PLACEHOLDERS = ("trial", "folder", "seed")  # placeholders that every program may have


@dataclass(frozen=True, init=False)
class Script:
    r"""A training program: ``Script("train.py", "--epochs", "3", loss=r"val_loss=(\S+)")``.

    The first part is a Python script, ``-m`` with a module behind it, or another command. Hyperparameters are appended
    as ``--name value``, or take the place of ``{name}``; settings, and ``{trial}``, ``{folder}`` and ``{seed}``, only
    have places. Hyperparameters in `flags` are appended as ``--name`` if they are true, and left out otherwise.

    `loss` is a regular expression with one group, the validation loss, for the lines that the ranks print; `metrics`
    are others by name. A program that calls ``hpo.report`` needs none.

    `resume` is appended when an evaluation continues after it was interrupted, or paused by a pruner. An example is
    ``("--resume", "{folder}/last.pt")``. The program keeps a checkpoint in the folder of the evaluation. It writes it
    before each report or soon after. Pruners judge from the `first_report`-th report on, for programs that report
    before they train. Raises ValueError if one of these is wrong.
    """

    command: tuple[str, ...]
    loss: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    first_report: int = 1

    def __init__(
        self,
        *command: str,
        loss: str | None = None,
        metrics: Mapping[str, str] | None = None,
        flags: Iterable[str] = (),
        resume: str | Iterable[str] = (),
        first_report: int = 1,
    ) -> None:
        if not command or not all(isinstance(part, str) and part for part in command[:1]):
            raise ValueError("a Script needs a command, such as Script('train.py', '--epochs', '3')")
        if command[0] == "-m" and len(command) == 1:
            raise ValueError("Script('-m') needs the name of a module behind -m")
        if not isinstance(first_report, int) or first_report < 1:
            raise ValueError(f"first_report is a number of reports, at least 1, not {first_report!r}")
        if isinstance(flags, str) or "loss" in (metrics or {}):
            raise ValueError("flags are a list of names, and no metric is named loss")
        for name, pattern in {"loss": loss, **(metrics or {})}.items():
            if pattern is not None:
                _check_pattern(name, pattern)
        object.__setattr__(self, "command", tuple(map(str, command)))
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "metrics", dict(metrics or {}))
        object.__setattr__(self, "flags", tuple(flags))
        object.__setattr__(self, "resume", tuple(shlex.split(resume) if isinstance(resume, str) else resume))
        object.__setattr__(self, "first_report", first_report)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Script:
        """Return the script that `data` was made from."""
        options = {name: value for name, value in data.items() if name != "command"}
        return cls(*data["command"], **options)

    @property
    def data(self) -> dict[str, Any]:
        """The script as data that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """What people call it: ``train.py``."""
        return self.command[1] if self.command[0] == "-m" else self.command[0]

    def has_placeholder(self, name: str) -> bool:
        """Return whether a name has a place in the command."""
        return any(name in _find_placeholders(part) for part in (*self.command, *self.resume))

    def check(self, hyperparameters: Mapping[str, object], settings: Iterable[str]) -> None:
        """Raise ValueError if a name in braces, or a flag, does not exist, or cannot be what it is used for."""
        names = list(hyperparameters)
        for name in {*names, *settings} & set(_EVALUATION_PLACEHOLDERS):
            raise ValueError(f"no hyperparameter or setting must be named {name!r}: {{{name}}} is the evaluation's own")
        if self.resume and not any("folder" in _find_placeholders(part) for part in self.resume):
            raise ValueError(f"--resume-args must name a file in {{folder}}, got {shlex.join(self.resume)!r}")
        known = [*names, *settings, *_EVALUATION_PLACEHOLDERS]
        for part in (*self.command, *self.resume):
            for name in _find_placeholders(part):
                if name not in known:
                    raise ValueError(
                        f"{part!r} has a place for {name!r}, and there are {', '.join(known)}; write {{{{{name}}}}} "
                        "for braces that stay"
                    )
        for name in self.flags:
            if name not in names:
                raise ValueError(f"the flag {name!r} is no hyperparameter; there are {', '.join(names)}")
            choices = getattr(hyperparameters[name], "choices", ())
            if self.has_placeholder(name) or not choices or not all(isinstance(choice, bool) for choice in choices):
                raise ValueError(
                    f"the flag {name!r} must be a Categorical(True, False) without {{{name}}} in the command"
                )

    def make_arguments(
        self, params: Mapping[str, Any], others: Mapping[str, Any], absent: Iterable[str] = ()
    ) -> list[str]:
        """Return the command for hyperparameters; `others` have places only, and so do `absent` hyperparameters.

        A part with a place for an absent one is left out, with the option before it.
        """
        values = {**others, **params}
        gone, placed = set(absent), set[str]()
        parts: list[str] = []
        for part in self.command:
            names = _find_placeholders(part)
            placed.update(names)
            if gone.isdisjoint(names):
                filled = _fill_placeholders(part, values)
                if filled.startswith("-") and not part.startswith("-") and parts[1:] and _is_option(parts[-1]):
                    filled = f"{parts.pop()}={filled}"  # argparse takes -1e-4 for an option
                parts.append(filled)
            elif parts[1:] and re.fullmatch(r"\{\w+\}", part) and _is_option(parts[-1]):
                parts.pop()
        for name, value in params.items():
            if name in self.flags:
                parts += [f"--{name}"] if value else []
            elif name not in placed:
                text = _format_value(value)
                parts += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
        return parts

    def make_resume_arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return what is appended when an evaluation continues; `values` are those that may have places."""
        return [_fill_placeholders(part, values) for part in self.resume]

    def format_search_file(self, space: Mapping[str, str]) -> str:
        """Return a search file with this script as its objective; `space` has the code of its parameters."""
        keywords = {name: value for name, value in self.data.items() if name not in ("command", "first_report")}
        keywords["first_report"] = self.first_report if self.first_report > 1 else None
        given = [*map(repr, self.command), *(f"{name}={value!r}" for name, value in keywords.items() if value)]
        parameters = "".join(f"    {name}={code},\n" for name, code in space.items())
        return (
            f'"""A search over {self.name.translate(_DOCSTRING_ESCAPES)}, as it was given on the command line."""\n\n'
            "from hpo import Categorical, Float, Int, Ordinal, Script, SearchSpace\n\n"
            f"space = SearchSpace(\n{parameters})\n\nobjective = Script({', '.join(given)})\n"
        )


def find_program(script: Script) -> Path | None:
    """Return the file of a script's program, None for a module. Raises ValueError if there is neither."""
    first = script.command[0]
    if first == "-m":
        if not _PLACEHOLDER.search(script.command[1]):
            check_module(script.command[1])
        return None
    if Path(first).name in _LAUNCHERS:
        raise ValueError(f"{first}: the search starts the ranks itself; name the script that {first} would run")
    path = Path(first)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(f"{first}: no such file; it is looked for in {Path.cwd()}")
        if path.suffix != ".py" and not os.access(path, os.X_OK):
            raise ValueError(f"{first} cannot be executed: chmod +x {first}")
        return path
    if (found := shutil.which(first)) is None:
        raise ValueError(f"{first}: there is no such command, nor a file of this name in {Path.cwd()}")
    return Path(found)


_DOCSTRING_ESCAPES = {ord('"'): "'", ord("\\"): "/"}


def _check_pattern(name: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"the pattern of {name}, {pattern!r}, is no regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"the pattern of {name}, {pattern!r}, needs one group, such as {name}=(\\S+); it has {groups}")


def _find_placeholders(part: str) -> list[str]:
    """Return the names that have a place in a part of a command."""
    return [match[2] for match in _PLACEHOLDER.finditer(part) if match[2]]


def _fill_placeholders(part: str, values: Mapping[str, Any]) -> str:
    """Return a part of a command with values in their places."""
    return _PLACEHOLDER.sub(lambda match: f"{{{match[1]}}}" if match[1] else _format_value(values[match[2]]), part)


def _is_option(part: str) -> bool:
    return part.startswith("-") and "=" not in part


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def propose_loss_pattern(lines: Sequence[str]) -> str:
    """Return a pattern that finds a loss in the last of the lines that name one with a number; empty if none does.

    Of these, a line that names a validation loss comes first.
    """
    found = [match for line in lines for match in _NAMED_LOSS_PATTERN.finditer(line)]
    validation = [match for match in found if re.search("val|eval|test|dev", match[1], re.IGNORECASE)]
    for match in [*validation, *found][:1]:
        gap = r"\s+" if match[3].isspace() else rf"\s*{match[3].strip()}\s*"
        quote, value = ("." if match[2] else ""), (r".([\w.+-]+)" if match[4] else r"([^\s,;}]+)")
        return rf"{match[1].replace('.', chr(92) + '.')}{quote}{gap}{value}"
    return ""
