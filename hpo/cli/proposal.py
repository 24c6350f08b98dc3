"""Propose a search file for a training script from its options, without running it."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpo.cli.script_options import ScriptOption, find_options, find_words
from hpo.errors import UsageError
from hpo.script_objective import propose_loss_pattern

_LOG_NAME_PATTERN = re.compile(
    r"(^|_)(lr|learning_rate|wd|weight_decay|l2|eps|epsilon)($|_)", re.IGNORECASE
)
_ALWAYS_TUNED = 6  # Those up to the momentum are proposed even if only their default is known.
_MOST_PROPOSED = 8  # A search over more needs thousands of evaluations.
_SEARCH = "hpo search --space 'lr=Float(1e-4, 1e-1, log=True)' -- {path}"
_WAYS = {
    "hydra": "python {path} --multirun hydra/sweeper=hpo, which proposes what to sweep",
    "LightningCLI": (
        f"{_SEARCH} fit --optimizer.lr='{{{{lr}}}}' --trainer.default_root_dir='{{{{folder}}}}'"
    ),
    "CLI": _SEARCH,
    "HfArgumentParser": (
        "hpo search --space 'learning_rate=Float(1e-6, 1e-3, log=True)' -- {path}"
    ),
}
_PRINTF_FIELD = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_FORMAT_FIELD = re.compile(r"\{[^{}]*\}")
_LOSS_PATTERN = re.compile("loss", re.IGNORECASE)
_DECADE = 10


def propose_search(path: Path) -> str:
    """Return the code of a search file for a Python script.

    Its search space contains at most eight options: those with choices, and those that most people
    tune, such as the learning rate and the batch size. All other options are in comments.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python script: {error}") from error
    options = find_options(tree)
    if not any(option.flag.startswith("-") and not option.is_seed for option in options):
        raise UsageError(_describe_missing_options(path, tree))
    proposed = {option.name: make_parameter_code(option) for option in options}
    if not any(code for code, _ in proposed.values()):
        raise UsageError(_describe_missing_options(path, tree))
    chosen = choose_options(options)
    lines = []
    kinds = {"Script", "SearchSpace"}
    values = [option for option in options if option.is_required and not option.is_seed]
    required = [option for option in values if option not in chosen]
    words = [str(path), *find_words(tree), *(word for each in required for word in each.example)]
    parts = list(map(repr, words))
    for option in options:
        if option.is_seed:
            parts += [repr(option.flag), "'{seed}'"]
        code = proposed[option.name][0]
        if not code or option in required:
            continue
        kinds.add(code.partition("(")[0])
        placeholder = [repr(option.flag), f"'{{{option.name}}}'"] if option.has_other_name else []
        if option in chosen:
            lines.append(f"    {option.name}={code},")
            parts += placeholder
        else:
            hint = f"  # and {', '.join(placeholder)} in the Script" if placeholder else ""
            lines.append(f"    # {option.name}={code},{hint}")
    switches = [option.flag.lstrip("-") for option in options if option.is_switch]
    examples = [option.example[-1] for option in required]
    loss = propose_loss_pattern(list(_find_printed_losses(tree)))
    parts.append(f"loss=r{loss!r}".replace("\\\\", "\\") if loss else "loss=None")
    remark = "  # give a pattern with one group, or maximize= for a score, or call hpo.report(loss)"
    flags = f"# Add flags={switches} if one of them is searched.\n" if switches else ""
    flags += f"# Replace {', '.join(examples)} by a value.\n" if examples else ""
    return (
        f'"""A search over {path.name}, proposed from its options: edit the ranges, and remove '
        f'the # of others."""\n\n'
        f"from hpo import {', '.join(sorted(kinds))}\n\n"
        f"space = SearchSpace(\n{chr(10).join(lines)}\n)\n{flags}objective = "
        f"Script({', '.join(parts)}){'' if loss else remark}\n"
    )


def choose_options(options: Sequence[ScriptOption]) -> list[ScriptOption]:
    """Return the options to search: at most eight, those that most people tune first."""
    suitable = [option for option in options if make_parameter_code(option)[1]]
    return sorted(suitable, key=lambda option: option.rank)[:_MOST_PROPOSED]


def make_parameter_code(option: ScriptOption) -> tuple[str, bool]:
    """Return the code of a parameter, and whether the proposed search space contains it.

    If not, the search file contains it as a comment. The code is "" if the range of the parameter
    is unknown.
    """
    default = option.default
    is_tuned = option.rank < _ALWAYS_TUNED
    # A search replaces or appends options only.
    if option.is_seed or not option.flag.startswith("--"):
        return "", False
    if option.is_switch or (option.kind == "bool" and isinstance(default, bool)):
        return "Categorical(True, False)", False
    if len(option.choices) > 1:
        return f"Categorical({', '.join(map(repr, option.choices))})", True
    is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if option.kind == "float" and _LOG_NAME_PATTERN.search(option.name):
        middle = float(default) if is_number and default > 0 else 1e-3
        low = _round_digits(middle / _DECADE)
        return f"Float({low}, {_round_digits(middle * _DECADE)}, log=True)", True
    if option.kind == "float" and is_number and 0 <= default < 1:
        limit = next(limit for limit in (0.5, 0.9, 0.999, 1.0) if default < limit)
        return f"Float(0.0, {limit})", is_tuned
    if option.kind in ("float", "int") and is_number and default > 0:
        if option.kind == "int":
            return f"Int({max(1, int(default) // 4)}, {4 * default}, log=True)", is_tuned
        return f"Float({_round_digits(default / 4)}, {4 * default}, log=True)", is_tuned
    return "", False


def _round_digits(value: float) -> float:
    return float(f"{value:.2g}") if math.isfinite(value) else value


def _find_printed_losses(tree: ast.AST) -> Iterator[str]:
    """Yield each text of a script with the word loss, with 1.0 for each value that is put into it.

    The texts are examples of printed lines, from which `propose_loss_pattern` makes a pattern.
    """
    if any("TrainingArguments" in getattr(node, "id", "") for node in ast.walk(tree)):
        yield "{'eval_loss': '1.0'}"  # transformers' Trainer prints it.
    texts = (_make_example(node) for node in ast.walk(tree))
    yield from (text for text in texts if _LOSS_PATTERN.search(text))


def _make_example(node: ast.AST) -> str:
    """Return what a piece of code may print: an f-string, %, format, or print of several values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_make_part(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _PRINTF_FIELD.sub("1.0", _get_text(node.left))
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _FORMAT_FIELD.sub("1.0", _get_text(node.func.value))
    if isinstance(node.func, ast.Name) and node.func.id == "print" and len(node.args) > 1:
        return " ".join(map(_make_part, node.args))
    return ""


def _make_part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "1.0"


def _get_text(node: ast.expr) -> str:
    """Return a text in the code; "" if the code is another expression."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _describe_missing_options(path: Path, tree: ast.AST) -> str:
    """Return why nothing can be proposed, and the command for a parser that cannot be read."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    imports = (node for node in nodes if isinstance(node, ast.Import))
    modules = [alias.name for node in imports for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {module.partition(".")[0] for module in modules}
    for name, way in _WAYS.items():
        if name in names:
            return (
                f"{path} takes its options from {name}, which cannot be read here. Search it by "
                f"{way.format(path=path)}"
            )
    return (
        f"{path} has no options that could be searched, such as those of argparse: "
        "add_argument('--lr', type=float)"
    )
