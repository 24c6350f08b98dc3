"""A training program as the objective: each rank of a worker runs it, as torchrun would run it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# {{name}} becomes a literal {name}.
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
_NUMBER_PATTERN = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
NUMBER_GROUP = r"([\w.+-]*\w)"
"""Group that matches a number, nan or inf, without the punctuation or unit behind it."""
_NAMED_LOSS_PATTERN = re.compile(
    rf"((?:val\w*\s)?[\w./-]*loss[\w./-]*)([\"']?)([\s:=]+)([\"']?)({_NUMBER_PATTERN})",
    re.IGNORECASE,
)
# Commands and modules that start ranks, with the subcommand that does.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), ""),
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "prterun", "srun", "horovodrun"), ""),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner", "accelerate-launch"), ""),
    "accelerate.commands.launch": "",
    **dict.fromkeys(("accelerate", "accelerate.commands.accelerate_cli"), "launch"),
    **dict.fromkeys(("fabric", "lightning", "lightning.fabric.cli", "lightning_fabric.cli"), "run"),
}
SCORE = "score"  # name of the metric that `maximize` reads
_FILE_IN_FOLDER = re.compile(r"(?<!\{)\{folder\}/+[^/]")
EVALUATION_PLACEHOLDERS = ("trial", "folder", "seed", "ranks")  # available to every program


@dataclass(frozen=True, init=False)
class Script:
    r"""A training program as the objective of a search.

    Each rank of a worker runs the command, as torchrun would run it. Each hyperparameter is
    appended as ``--name value``. If the command has the placeholder ``{name}``, the value replaces
    the placeholder and is not appended. Settings are never appended, and only replace placeholders.
    The placeholders ``{trial}``, ``{folder}`` and ``{seed}`` are replaced by the number, the folder
    and the seed of the evaluation, and ``{ranks}`` by the number of ranks of the worker. Write
    ``{{name}}`` for literal braces.

    Args:
        *command: The parts of the command: a Python script, or ``-m`` and a module, or another
            command, and its arguments.
        loss: A regular expression with one group, which matches the validation loss in a printed
            line. Default: None, for a program that calls ``hpo.report``.
        maximize: Instead of `loss`: a regular expression of a score, such as an accuracy, of which
            the highest is the best. The loss is the negative score, which is also the metric
            ``score``. Default: None.
        step: A regular expression with one group, which matches the number of the epoch in a
            printed line. The last loss of each epoch counts: it is reported when the group matches
            another text, or when the program ends. Default: None, each match of `loss` counts.
        metrics: Regular expressions of other numbers by name, as for `loss`. Default: no metrics.
        flags: Names of boolean hyperparameters, appended as ``--name`` if they are true, and left
            out otherwise. A flag ``no-accel`` is that of the hyperparameter ``no_accel``.
        resume: Arguments that are appended when an evaluation resumes from its checkpoint, such as
            ``("--resume", "{folder}/last.pt")``. The program must write a checkpoint to
            ``{folder}`` before each report or soon after. Default: none.
        resume_file: The checkpoint, relative to ``{folder}``, if `resume` does not name it. If it
            is a pattern such as ``checkpoint-*``, the newest match counts. In `resume`,
            ``{checkpoint}`` is its path. Default: the files that `resume` names. Without any, each
            evaluation starts from the beginning.
        first_report: The number of the first report that pruners use, for programs that report a
            loss before they train. Default: 1.

    Raises:
        ValueError: An argument is not valid.

    Example:
        ::

            objective = Script("train.py", "--epochs", "3", loss=r"val_loss=(\S+)")
    """

    command: tuple[str, ...]
    loss: str | None = None
    maximize: str | None = None
    step: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    resume_file: str = ""
    first_report: int = 1

    def __init__(  # noqa: PLR0913 - They are the options of a program.
        self,
        *command: str,
        loss: str | None = None,
        maximize: str | None = None,
        step: str | None = None,
        metrics: Mapping[str, str] | None = None,
        flags: Iterable[str] = (),
        resume: str | Iterable[str] = (),
        resume_file: str = "",
        first_report: int = 1,
    ) -> None:
        if not command or not all(isinstance(part, str) and part for part in command[:1]):
            raise ValueError(
                "a Script must have a command, such as Script('train.py', '--epochs', '3')"
            )
        if command[0] == "-m" and len(command) == 1:
            raise ValueError("Script('-m'): -m must be followed by the name of a module")
        if not isinstance(first_report, int) or first_report < 1:
            raise ValueError(f"first_report must be an integer of at least 1, got {first_report!r}")
        if isinstance(flags, str):
            raise ValueError(f"flags must be a list of names, got {flags!r}")
        _check_patterns(loss, maximize, step, metrics or {})
        object.__setattr__(self, "command", tuple(map(str, command)))
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "maximize", maximize)
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "metrics", dict(metrics or {}))
        object.__setattr__(self, "flags", tuple(flags))
        if isinstance(resume, str):
            resume = shlex.split(resume)
        object.__setattr__(self, "resume", tuple(resume))
        object.__setattr__(self, "resume_file", str(resume_file))
        object.__setattr__(self, "first_report", first_report)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Script:
        """Return the script that `data` represents. This is the inverse of the property `data`."""
        options = {name: value for name, value in data.items() if name != "command"}
        return cls(*data["command"], **options)

    @property
    def data(self) -> dict[str, Any]:
        """The script as data that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def pattern(self) -> str | None:
        """The pattern of the loss, or of the score; None if the program calls ``hpo.report``."""
        return self.loss if self.maximize is None else self.maximize

    @property
    def pattern_name(self) -> str:
        """The argument that has the pattern: "loss" or "maximize"."""
        return "loss" if self.maximize is None else "maximize"

    @property
    def name(self) -> str:
        """The name of the program, such as ``train.py``."""
        return self.command[1] if self.command[0] == "-m" else self.command[0]

    @property
    def can_resume(self) -> bool:
        """Whether an evaluation can resume from files that the program writes."""
        return bool(self.resume or self.resume_file)

    def has_placeholder(self, name: str) -> bool:
        """Return whether ``{name}`` is in the command or in the arguments for a resume."""
        return any(name in _find_placeholders(part) for part in (*self.command, *self.resume))

    def check(self, hyperparameters: Mapping[str, object], settings: Iterable[str]) -> None:
        """Raise a ValueError if a placeholder or flag of the command is not valid.

        The hyperparameters are given by name, the settings as names.
        """
        names = list(hyperparameters)
        for name in {*names, *settings} & set(EVALUATION_PLACEHOLDERS):
            raise ValueError(
                f"hyperparameters and settings must not be named {name!r}, "
                f"since {{{name}}} is the {name} of the evaluation"
            )
        self._check_resume()
        known = [*names, *settings, *EVALUATION_PLACEHOLDERS]
        for part in self.command:
            _check_placeholders(part, known)
        for part in self.resume:
            _check_placeholders(part, [*known, *(["checkpoint"] if self.resume_file else [])])
        for flag in self.flags:
            name = name_option(flag)
            if name not in names:
                raise ValueError(
                    f"a flag must be one of the hyperparameters {', '.join(names)}, got {flag!r}. "
                    f"Add {name} = Categorical(True, False) to the search space"
                )
            choices = getattr(hyperparameters[name], "choices", ())
            is_boolean = choices and all(isinstance(choice, bool) for choice in choices)
            if self.has_placeholder(name) or not is_boolean:
                raise ValueError(
                    f"the flag {flag!r} must be a Categorical(True, False) "
                    f"without {{{name}}} in the command"
                )

    def _check_resume(self) -> None:
        """Raise a ValueError unless it is known from which files an evaluation resumes."""
        file = self.resume_file
        try:
            is_pattern = not file or not any(Path(os.devnull).glob(file))
        except (ValueError, NotImplementedError):  # It is absolute, or ** is a part of a name.
            is_pattern = False
        if not is_pattern or file.startswith("{") or ".." in Path(file).parts:
            raise ValueError(
                "--resume-file must be a path below the folder of the evaluation, such as last.pt "
                f"or checkpoint-*, got {file!r}"
            )
        if self.resume and not file and not any(map(_FILE_IN_FOLDER.search, self.resume)):
            raise ValueError(
                "--resume-args must name a file in {folder}, such as {folder}/last.pt, or "
                f"--resume-file must, got {shlex.join(self.resume)!r}"
            )

    def make_arguments(
        self, params: Mapping[str, Any], others: Mapping[str, Any], absent: Iterable[str] = ()
    ) -> list[str]:
        """Return the command, with its arguments, for a set of hyperparameters.

        There may be other values for placeholders, such as settings. A part of the command that has
        the placeholder of an absent (inactive) parameter is left out, with the option before it.
        """
        values = {**others, **params}
        inactive = set(absent)
        flags = {name_option(flag): f"--{flag}" for flag in self.flags}
        placed: set[str] = set()
        parts: list[str] = []
        for part in self.command:
            names = _find_placeholders(part)
            placed.update(names)
            if inactive.isdisjoint(names):
                filled = _fill_placeholders(part, values)
                is_negative = filled.startswith("-") and not part.startswith("-")
                if is_negative and parts[1:] and _is_option(parts[-1]):
                    # Otherwise argparse treats -1e-4 as an option.
                    filled = f"{parts.pop()}={filled}"
                parts.append(filled)
            elif parts[1:] and re.fullmatch(r"\{\w+\}", part) and _is_option(parts[-1]):
                parts.pop()
        for name, value in params.items():
            if name in flags:
                parts += [flags[name]] if value else []
            elif name not in placed:
                text = _format_value(value)
                parts += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
        return parts

    def make_resume_arguments(self, values: Mapping[str, Any]) -> list[str]:
        """Return the arguments of a resumed evaluation, with these values of placeholders."""
        return [_fill_placeholders(part, values) for part in self.resume]

    def find_checkpoint(self, values: Mapping[str, Any]) -> Path | None:
        """Return the checkpoint of an evaluation; None if it has none from which it can resume.

        `values` has the values of placeholders. An empty folder is not a checkpoint.
        """
        folder = Path(values["folder"])
        if self.resume_file:
            found = [path for path in folder.glob(self.resume_file) if _is_filled(path)]
            return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
        named = [part for part in self.resume if _FILE_IN_FOLDER.search(part)]
        parts = [_fill_placeholders(part, values) for part in named]
        files = [Path(part[part.index(str(folder)) :]) for part in parts]
        return files[0] if files and all(map(_is_filled, files)) else None

    def format_search_file(self, space: Mapping[str, str]) -> str:
        """Return the code of a search file with this script, and this code of its parameters."""
        keywords = {name: value for name, value in self.data.items() if name != "command"}
        if self.first_report == 1:
            del keywords["first_report"]
        given = [*map(repr, self.command)]
        given += [f"{name}={value!r}" for name, value in keywords.items() if value]
        parameters = "".join(f"    {name}={code},\n" for name, code in space.items())
        name = self.name.translate(_DOCSTRING_ESCAPES)
        return (
            f'"""A search over {name}, as it was given on the command line."""\n\n'
            "from hpo import Categorical, Float, Int, Ordinal, Script, SearchSpace\n\n"
            f"space = SearchSpace(\n{parameters})\n\nobjective = Script({', '.join(given)})\n"
        )


def name_option(flag: str) -> str:
    """Return the name of the hyperparameter that sets an option such as ``no-accel``."""
    return re.sub(r"\W", "_", flag)


def find_program(script: Script) -> Path | None:
    """Return the path of the file or installed program that a command begins with.

    Return None if it begins with ``-m`` and the name of a module. Raise a ValueError if it does not
    exist, or a launcher such as mpirun would start it.
    """
    first = script.command[0]
    _check_launcher(script.command)
    if first == "-m":
        if not _PLACEHOLDER.search(script.command[1]):
            _check_module(script.command[1])
        return None
    path = Path(first)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            raise ValueError(f"{first}: there is no such file in {Path.cwd()}")
        if path.suffix != ".py" and not os.access(path, os.X_OK):
            raise ValueError(f"{first} must be executable. Run: chmod +x {first}")
        return path
    if (found := shutil.which(first)) is None:
        raise ValueError(f"{first}: there is no such command, and no such file in {Path.cwd()}")
    return Path(found)


def _check_launcher(command: Sequence[str]) -> None:
    """Raise a ValueError if a command calls a launcher before its script."""
    words = " ".join(command).split()  # A part may be a command of a shell.
    script = next((word for word in words if word.endswith(".py")), "")
    head = words[: words.index(script)] if script else words
    for option, word, subcommand in zip(["", *head], head, [*head[1:], ""], strict=False):
        name = Path(word).name
        is_value = option.startswith("--")
        if not is_value and name in _LAUNCHERS and _LAUNCHERS[name] in ("", subcommand):
            launcher = f"{name} {_LAUNCHERS[name]}".rstrip()
            raise ValueError(
                f"{launcher} must not be in the command, since the search starts the ranks. "
                f"Name the script{f': -- {script}' if script else ''}"
            )


_DOCSTRING_ESCAPES = {ord('"'): "'", ord("\\"): "/"}


def _check_patterns(
    loss: str | None, maximize: str | None, step: str | None, metrics: Mapping[str, str]
) -> None:
    """Raise a ValueError unless all patterns are valid, and no two have the same name."""
    if maximize is not None and loss is not None:
        raise ValueError(f"either loss or maximize must be given, got {loss!r} and {maximize!r}")
    if step is not None and loss is None and maximize is None:
        raise ValueError("step must be given with loss or maximize: hpo.report is once an epoch")
    if "loss" in metrics:
        raise ValueError("a metric must not be named 'loss'. Give its pattern as loss=")
    if maximize is not None and SCORE in metrics:
        raise ValueError(f"a metric must not be named {SCORE!r} beside maximize, which reads it")
    given = [("loss", loss), ("maximize", maximize), ("step", step), *metrics.items()]
    for name, pattern in given:
        if pattern is not None:
            _check_pattern(name, pattern)


def _check_pattern(name: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except (re.error, TypeError) as error:
        raise ValueError(
            f"the pattern of {name} must be a regular expression, got {pattern!r} ({error})"
        ) from None
    if groups != 1:
        raise ValueError(
            f"the pattern of {name} must have one group, such as {name}=(\\S+), "
            f"got '{pattern}' with {groups} groups"
        )


def _check_placeholders(part: str, known: Sequence[str]) -> None:
    for name in _find_placeholders(part):
        if name not in known:
            raise ValueError(
                f"placeholders must be among {', '.join(known)}, got {name!r} in {part!r}. "
                f"Write {{{{{name}}}}} for literal braces"
            )


def _is_filled(path: Path) -> bool:
    """Return whether a path is a file, or a folder that is not empty."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def escape_placeholders(part: str) -> str:
    """Return a part of a command in which no braces are a placeholder."""
    return _PLACEHOLDER.sub(lambda match: f"{{{match[0]}}}", part)


def _find_placeholders(part: str) -> list[str]:
    return [match[2] for match in _PLACEHOLDER.finditer(part) if match[2]]


def _fill_placeholders(part: str, values: Mapping[str, Any]) -> str:
    return _PLACEHOLDER.sub(
        lambda match: f"{{{match[1]}}}" if match[1] else _format_value(values[match[2]]), part
    )


def _is_option(part: str) -> bool:
    return part.startswith("-") and "=" not in part


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def propose_loss_pattern(lines: Sequence[str]) -> str:
    """Return a regular expression that matches the loss in printed lines, or "" without a loss.

    It is made from the first line with a validation loss, such as ``val_loss=0.5``, or else from
    the first line with any loss.
    """
    found = [match for line in lines for match in _NAMED_LOSS_PATTERN.finditer(line)]
    if not found:
        return ""
    is_validation = re.compile("val|eval|test|dev", re.IGNORECASE).search
    match = next((match for match in found if is_validation(match[1])), found[0])
    gap = r"\s+" if match[3].isspace() else rf"\s*{match[3].strip()}\s*"
    quote = "." if match[2] else ""
    value_quote = r"[^\w.+-]?" if match[4] else ""  # transformers 5 quotes numbers, 4 does not.
    return rf"{match[1].replace('.', chr(92) + '.')}{quote}{gap}{value_quote}{NUMBER_GROUP}"


def find_epochs(command: Sequence[str]) -> int | None:
    """Return the number of epochs that an argument such as ``--epochs 3`` names; None if none."""
    match = re.search(r" --?(?:num[_-]|n[_-]?|max[_-])?epochs?[ =](\d+)(?= |$)", " ".join(command))
    return int(match[1]) if match else None


def _check_module(name: str) -> None:
    """Raise a ValueError unless ``python -m name`` would find a module.

    A module is not checked if a package that contains it may change its own search path
    (`__path__`).
    """
    names = name.split(".")
    if name.endswith(".py") or "/" in name or not all(names):
        raise ValueError(
            f"-m {name}: -m must be followed by the name of a module, such as package.module. "
            "Give a file without -m"
        )
    spec = _find_spec(names[0], [str(Path.cwd()), *sys.path])
    if spec is None:
        raise ValueError(
            f"-m {name}: there is no module {names[0]!r} in {Path.cwd()}, and it is not installed"
        )
    for depth, inner in enumerate((*names[1:], "__main__"), start=1):
        folders = list(spec.submodule_search_locations or [])
        origin = Path(spec.origin or "")
        is_python = origin.suffix == ".py" and origin.is_file()
        may_change_path = is_python and b"__path__" in origin.read_bytes()
        if may_change_path or (inner == "__main__" and not folders):
            return
        if (found := _find_spec(".".join([*names[:depth], inner]), folders)) is None:
            searched = ", ".join(folders) or f"{spec.origin}, which is not a package"
            raise ValueError(f"-m {name}: there is no module {inner!r} in {searched}")
        spec = found


def _find_spec(name: str, folders: list[str]) -> ModuleSpec | None:
    # With the full name, PathFinder would need the parent package, which was not imported.
    if (found := PathFinder.find_spec(name.rpartition(".")[2], folders)) is not None:
        return found
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    specs = (finder.find_spec(name, folders if "." in name else None) for finder in others)
    return next((spec for spec in specs if spec is not None), None)
