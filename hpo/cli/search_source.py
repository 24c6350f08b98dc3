"""Find the search file of a command line, or make one for the program after ``--``."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from hpo.errors import UsageError
from hpo.options import ProgramOptions
from hpo.script_objective import Script, find_program
from hpo.space import SearchSpace
from hpo.space.parameters import parse_parameter

_PACKAGE = Path(__file__).parents[1]
_OPTION_EXAMPLE = "--space 'lr=Float(1e-4, 1e-1, log=True)'"
_EXAMPLE = f"Write for example {_OPTION_EXAMPLE}"
# Launchers of one program on several ranks, each with what a program lacks without it.
_RANK_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run"), ""),
    **dict.fromkeys(
        ("torch.distributed.launch", "deepspeed", "deepspeed.launcher.runner"),
        ", without the option --local_rank",
    ),
    **dict.fromkeys(
        ("accelerate launch", "accelerate-launch", "accelerate.commands.launch"),
        ", without accelerate's configuration",
    ),
}
# Options of `accelerate launch` that only say where ranks run. Others change the training.
_ACCELERATE_OPTIONS = re.compile(
    "--(multi_gpu|same_network|quiet|tee|log_dir|role|max_restarts|monitor_interval|machine_rank|"
    "gpu_ids|(num|main_process|rdzv)_.*|enable_cpu_affinity)"
)


def find_search_space(path: Path) -> Path:
    """Return the path of a search file that is given by path or by name.

    A name is that of a search space of the package. If a file of this name exists, it is used.
    """
    shipped = list_search_spaces()
    if str(path) in shipped and not path.is_file():
        return shipped[str(path)]
    if not path.exists():
        names = f", or one of {', '.join(shipped)}" if shipped else ""
        raise UsageError(f"SEARCH_SPACE must be the path of a file{names}, got {path}")
    if path.suffix == ".py" and path.is_file() and not _may_have_space(path):
        raise UsageError(
            f"SEARCH_SPACE must be a file with a `space`, got {path}. A training script follows "
            f"after --, and its hyperparameters before: {_OPTION_EXAMPLE} -- {path}"
        )
    return path


def _may_have_space(path: Path) -> bool:
    """Return whether a file may have a `space`. To import it could start a training."""
    try:
        source = path.read_bytes()
    except OSError:
        return True  # The search explains it.
    return b"space" in source or b"import *" in source


def list_search_spaces() -> dict[str, Path]:
    """Return the path of each search space of the package, by its name."""
    # In a wheel, they are in the package. In a checkout, they are next to it.
    files = [*_PACKAGE.glob("search_spaces/*.py")] or [*_PACKAGE.parent.glob("search_spaces/*.py")]
    return {path.stem: path for path in sorted(files)}


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the arguments before ``--``, and the command after it; None without ``--``."""
    if "--" not in arguments:
        return list(arguments), None
    index = arguments.index("--")
    return list(arguments[:index]), list(arguments[index + 1 :])


def make_script(command: Sequence[str], options: ProgramOptions) -> Script:
    """Return the Script objective that runs the program after ``--``."""
    parts = _drop_launcher(command)
    if parts[:1] in (["python"], ["python3"]):
        # Trainers run Python scripts themselves, since they have already imported torch.
        if parts[1:2] == ["-u"]:
            del parts[1]
        if parts[1:] and (parts[1] == "-m" or not parts[1].startswith("-")):
            del parts[0]
    if not parts:
        raise UsageError("-- must be followed by a command, such as -- train.py --epochs 3")
    is_name = "/" not in parts[0] and not parts[0].endswith(".py") and parts[0] != "-m"
    if is_name and Path(parts[0]).is_file():
        parts[0] = f"./{parts[0]}"
    example = "Write for example --metric 'accuracy=acc: (\\S+)'"
    metrics = dict(_split_assignment(text, "--metric", example) for text in options.metrics)
    try:
        script = Script(
            *parts,
            loss=options.loss,
            maximize=options.maximize,
            step=options.step,
            metrics=metrics,
            flags=options.flags,
            resume=options.resume_args,
            resume_file=options.resume_file,
            first_report=options.first_report,
        )
        find_program(script)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return script


def _drop_launcher(command: Sequence[str]) -> list[str]:
    """Return a command without the launcher of its ranks, which the worker replaces, and print so.

    Other launchers stay: `find_program` refuses them.
    """
    words = list(command)
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        del words[0]
    for start in ("-u", "-m"):
        if words[:1] == [start]:
            del words[0]
    name = Path(words[0]).name if words else ""
    count = 2 if words[1:2] == ["launch"] else 1
    launcher = " ".join([name, *words[1:count]])
    options = list(takewhile(lambda word: not _begins_program(word), words[count:]))
    program = words[count + len(options) :]
    is_known = not {"--no-python", "--no_python"} & {*options} and not _has_word(options)
    has_program = program not in ([], ["-m"], ["--module"])
    if launcher not in _RANK_LAUNCHERS or not is_known or not has_program:
        return list(command)
    if launcher.startswith("accelerate"):
        _check_accelerate_options(launcher, options)
    if program[0] == "--module":
        program[0] = "-m"
    runs = program[1 if program[0] == "-m" else 0]
    print(
        f"{' '.join([launcher, *options])} is left out: each rank of a worker runs {runs}"
        f"{_RANK_LAUNCHERS[launcher]}",
        flush=True,
    )
    return program


def _begins_program(word: str) -> bool:
    return word.endswith(".py") or word in ("-m", "--module")


def _has_word(options: Sequence[str]) -> bool:
    """Return whether a word is neither an option nor its value, so that it is the program."""
    before = ["--x=1", *options]
    return any(
        not word.startswith("-") and (not previous.startswith("-") or "=" in previous)
        for previous, word in zip(before, options, strict=False)
    )


def _check_accelerate_options(launcher: str, options: Sequence[str]) -> None:
    for option in options:
        name = option.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if len(name) > 2 and name.startswith("--") and not _ACCELERATE_OPTIONS.fullmatch(name):
            raise UsageError(
                f"{launcher} {option}: the search starts the script without accelerate. Leave the "
                "option out, and give its value to Accelerator(...) in the script"
            )


def parse_space(texts: Sequence[str]) -> dict[str, str]:
    """Check the texts NAME=PARAMETER of ``--space``, and return the code of each parameter."""
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
            f"{option} {text}: write {identifier}={rest}, and --{name} {{{identifier}}} in the "
            "command"
        )
    if not equals or not name.strip().isidentifier() or not rest.strip():
        raise UsageError(f"{option} must be NAME=..., got {text!r}. {example}")
    return name.strip(), rest.strip()
