"""Propose a search file for a training script from its argparse options, without running it."""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.script_objective import propose_loss_pattern

_LOG_NAME_PATTERN = re.compile(
    r"(^|_)(lr|learning_rate|wd|weight_decay|l2|eps|epsilon)($|_)", re.IGNORECASE
)
# Names of what people tune, the most important first.
_TUNED_NAMES = (
    *("lr|learning_rate", "wd|weight_decay", "batch", "drop", "warmup", "momentum", "optim|^opt$"),
    *("sched", "gamma", "smoothing", "hidden|width|dim", "layers|depth", "clip", "beta", "eps"),
)
_ALWAYS_TUNED = 6  # Those up to the momentum are proposed even if only their default is known.
_MOST_PROPOSED = 8  # A search over more needs thousands of evaluations.
_WAYS = {
    "hydra": "--space 'lr=Float(1e-4, 1e-1, log=True)' -- {path} optimizer.lr='{{lr}}'",
    "LightningCLI": (
        "--space 'lr=Float(1e-4, 1e-1, log=True)' -- {path} fit --optimizer.lr='{{lr}}'"
    ),
    "HfArgumentParser": "--space 'learning_rate=Float(1e-6, 1e-3, log=True)' -- {path}",
}
_SEED_FLAG = re.compile(r"--(\w+[-_])?seed")
_PRINTF_FIELD = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_FORMAT_FIELD = re.compile(r"\{[^{}]*\}")
_LOSS_PATTERN = re.compile("loss", re.IGNORECASE)
_DECADE = 10
_BOOLEAN_ACTION = "BooleanOptionalAction"  # of argparse


@dataclass(frozen=True)
class _Option:
    """An option of a script, as read from its call of `add_argument` in the code."""

    flag: str
    kind: str = "str"
    default: Any = None
    choices: list[Any] = field(default_factory=list)
    is_switch: bool = False
    is_required: bool = False

    @property
    def rank(self) -> int:
        """How early it is proposed: the lower, the more people tune options of this name."""
        matches = (re.search(names, self.name, re.IGNORECASE) for names in _TUNED_NAMES)
        return next((i for i, match in enumerate(matches) if match), len(_TUNED_NAMES))

    @property
    def name(self) -> str:
        """Name of the hyperparameter that sets this option."""
        name = re.sub(r"\W", "_", self.flag.lstrip("-"))
        return f"{name}_" if keyword.iskeyword(name) or not name.isidentifier() else name

    @property
    def has_other_name(self) -> bool:
        """Whether the option differs from ``--`` followed by `name`, as ``--batch-size`` does.

        The `Script` of the search file must then contain ``--batch-size`` and the placeholder
        ``{batch_size}``, unless it is a switch.
        """
        return not self.is_switch and self.flag != f"--{self.name}"

    @property
    def is_seed(self) -> bool:
        """Whether it takes the seed of an evaluation, so that it is not a hyperparameter."""
        return bool(_SEED_FLAG.fullmatch(self.flag))

    @property
    def example(self) -> list[str]:
        """Arguments that give it a value, which the user must replace."""
        value = self.name.upper()
        return [self.flag, value] if self.flag.startswith("-") else [value]


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
    options = list({option.name: option for option in _find_options(tree)}.values())
    if not any(option.flag.startswith("-") and not option.is_seed for option in options):
        raise UsageError(_describe_missing_options(path, tree))
    proposed = {option.name: _make_parameter_code(option) for option in options}
    suitable = [option for option in options if proposed[option.name][1]]
    chosen = sorted(suitable, key=lambda option: option.rank)[:_MOST_PROPOSED]
    lines = []
    kinds = {"Script", "SearchSpace"}
    values = [option for option in options if option.is_required and not option.is_seed]
    required = [option for option in values if option not in chosen]
    parts = [repr(str(path)), *(repr(word) for each in required for word in each.example)]
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


def _find_options(tree: ast.AST) -> Iterator[_Option]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr != "add_argument":
            continue
        texts = map(_evaluate_literal, node.args)
        names = [text for text in texts if isinstance(text, str)]
        flags = [text for text in names if text.startswith("--")] or names
        if not flags:
            continue
        given = {argument.arg: argument.value for argument in node.keywords if argument.arg}
        default = _evaluate_literal(given.get("default"))
        choices = _evaluate_literal(given.get("choices"))
        choices = list(choices) if isinstance(choices, (list, tuple)) else []
        annotation = given.get("type")
        kind = annotation.id if isinstance(annotation, ast.Name) else type(default).__name__
        action = ast.unparse(given["action"]).strip("'") if "action" in given else ""
        is_switch = action in ("store_true", "store_false") or action.endswith(_BOOLEAN_ACTION)
        is_optional = _evaluate_literal(given.get("nargs")) in ("?", "*")
        is_required = _evaluate_literal(given.get("required")) is True
        if not flags[0].startswith("-"):
            is_required = not is_optional
        yield _Option(flags[0], kind, default, choices, is_switch, is_required)


def _make_parameter_code(option: _Option) -> tuple[str, bool]:
    """Return the code of a parameter, and whether the proposed search space contains it.

    If not, the search file contains it as a comment. The code is "" if the range of the parameter
    is unknown.
    """
    default = option.default
    is_tuned = option.rank < _ALWAYS_TUNED
    # A search replaces or appends options only.
    if option.is_seed or not option.flag.startswith("--"):
        return "", False
    if option.is_switch:
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


def _evaluate_literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _find_printed_losses(tree: ast.AST) -> Iterator[str]:
    """Yield each text of a script with the word loss, with 1.0 for each value that is put into it.

    The texts are examples of printed lines, from which `propose_loss_pattern` makes a pattern.
    """
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
    """Return why nothing can be proposed, and the command for a parser that is not argparse."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name, way in _WAYS.items():
        if name in names:
            return (
                f"{path} takes its options from {name}, which cannot be read here. Search it by "
                f"hpo search {way.format(path=path)}"
            )
    return (
        f"{path} has no options of argparse that could be searched, such as "
        "add_argument('--lr', type=float)"
    )
