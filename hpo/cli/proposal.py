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
_LOSS_PATTERN = re.compile("loss", re.IGNORECASE)
_DECADE = 10


@dataclass(frozen=True)
class _Option:
    """An option of a script, as read from its call of `add_argument` in the code."""

    flag: str
    kind: str = "str"
    default: Any = None
    choices: list[Any] = field(default_factory=list)
    is_switch: bool = False

    @property
    def name(self) -> str:
        """Name of the hyperparameter that sets this option."""
        name = re.sub(r"\W", "_", self.flag.lstrip("-"))
        return f"{name}_" if keyword.iskeyword(name) or not name.isidentifier() else name

    @property
    def has_other_name(self) -> bool:
        """Whether the option differs from ``--`` followed by `name`, as ``--batch-size`` does.

        The `Script` of the search file must then contain ``--batch-size`` and the placeholder
        ``{batch_size}``.
        """
        return self.flag != f"--{self.name}"


def propose_search(path: Path) -> str:
    """Return the code of a search file for a Python script.

    Its search space contains the options with choices, and options that are usually searched on a
    logarithmic scale, such as a learning rate. All other options are in comments.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python script: {error}") from error
    options = list({option.name: option for option in _find_options(tree)}.values())
    if not options:
        raise UsageError(
            f"{path} has no options of argparse that could be searched, such as "
            "add_argument('--lr', type=float)"
        )
    lines = []
    kinds = {"Script", "SearchSpace"}
    parts = [repr(str(path))]
    for option in options:
        code, is_chosen = _make_parameter_code(option)
        if not code:
            continue
        kinds.add(code.partition("(")[0])
        placeholder = [repr(option.flag), f"'{{{option.name}}}'"] if option.has_other_name else []
        if is_chosen:
            lines.append(f"    {option.name}={code},")
            parts += placeholder
        else:
            hint = f"  # and {', '.join(placeholder)} in the Script" if placeholder else ""
            lines.append(f"    # {option.name}={code},{hint}")
    switches = [option.name for option in options if option.is_switch]
    loss = propose_loss_pattern(list(_find_printed_losses(tree)))
    parts.append(f"loss=r{loss!r}".replace("\\\\", "\\") if loss else "loss=None")
    remark = "  # give a pattern with one group, or call hpo.report(loss) in the script"
    flags = f"# Add flags={switches} if one of them is searched.\n" if switches else ""
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
        flags = [text for text in texts if isinstance(text, str) and text.startswith("--")]
        if not flags:
            continue
        given = {argument.arg: argument.value for argument in node.keywords if argument.arg}
        default = _evaluate_literal(given.get("default"))
        choices = _evaluate_literal(given.get("choices"))
        choices = list(choices) if isinstance(choices, (list, tuple)) else []
        annotation = given.get("type")
        kind = annotation.id if isinstance(annotation, ast.Name) else type(default).__name__
        is_switch = _evaluate_literal(given.get("action")) in ("store_true", "store_false")
        yield _Option(flags[0], kind, default, choices, is_switch)


def _make_parameter_code(option: _Option) -> tuple[str, bool]:
    """Return the code of a parameter, and whether the proposed search space contains it.

    If not, the search file contains it as a comment. The code is "" if the range of the parameter
    is unknown.
    """
    default = option.default
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
        return f"Float(0.0, {0.9 if default < 0.9 else 0.999})", False
    if option.kind in ("float", "int") and is_number and default > 0:
        if option.kind == "int":
            return f"Int({max(1, int(default) // 4)}, {4 * default}, log=True)", False
        return f"Float({_round_digits(default / 4)}, {4 * default}, log=True)", False
    return "", False


def _round_digits(value: float) -> float:
    return float(f"{value:.2g}") if math.isfinite(value) else value


def _evaluate_literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _find_printed_losses(tree: ast.AST) -> Iterator[str]:
    """Yield each f-string of a script with the word loss, with 1.0 for each expression.

    The texts are examples of printed lines, from which `propose_loss_pattern` makes a pattern.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [
                each.value if isinstance(each, ast.Constant) else "1.0" for each in node.values
            ]
            text = "".join(map(str, parts))
            if _LOSS_PATTERN.search(text):
                yield text
