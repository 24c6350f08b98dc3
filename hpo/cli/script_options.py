"""Find the options of a training script in its code, without running it.

They are those of argparse, and those that tyro, jsonargparse, transformers' HfArgumentParser and
LightningCLI make of the fields of a dataclass or the arguments of a function.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Names of what people tune, the most important first.
_TUNED_NAMES = (
    *("lr|learning_rate", "wd|weight_decay", "batch", "drop", "warmup", "momentum", "optim|^opt$"),
    *("sched", "gamma", "smoothing", "hidden|width|dim", "layers|depth", "clip", "beta", "eps"),
)
_SEED_FLAG = re.compile(r"--(\w+[-_])?seed")
_BOOLEAN_ACTION = "BooleanOptionalAction"  # of argparse

# Callables that take classes or functions: of tyro, jsonargparse, transformers, and Lightning.
_PARSERS = ("cli", "CLI", "auto_cli", "HfArgumentParser", "LightningCLI")
_LIGHTNING_PREFIXES = ("model.", "data.")
_LIGHTNING_KEYWORDS = {"model_class": "model.", "datamodule_class": "data."}


@dataclass(frozen=True)
class ScriptOption:
    """An option of a script, as read from its code."""

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


# What people tune of the class of transformers, with its defaults.
_TRAINING_ARGUMENTS = (
    ScriptOption("--learning_rate", "float", 5e-5),
    ScriptOption("--weight_decay", "float", 0.0),
    ScriptOption("--per_device_train_batch_size", "int", 8),
    ScriptOption("--max_grad_norm", "float", 1.0),
    ScriptOption("--seed", "int", 42),
)


def find_options(tree: ast.AST) -> list[ScriptOption]:
    """Return the options of a script, one of each name."""
    options = [*_find_argparse_options(tree), *_TypedOptions(tree).find()]
    return list({option.name: option for option in options}.values())


def find_words(tree: ast.AST) -> list[str]:
    """Return the words that must precede the options: the subcommand of LightningCLI."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return ["fit"] if any(_get_name(call.func) == "LightningCLI" for call in calls) else []


def _find_argparse_options(tree: ast.AST) -> Iterator[ScriptOption]:
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
        yield ScriptOption(flags[0], kind, default, choices, is_switch, is_required)


class _TypedOptions:
    """Finds the options that a parser makes of the classes and functions of a script."""

    def __init__(self, tree: ast.AST) -> None:
        self._nodes = list(ast.walk(tree))
        self._defined = {
            node.name: node
            for node in self._nodes
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        }

    def find(self) -> Iterator[ScriptOption]:
        for call in self._nodes:
            parser = _get_name(call.func) if isinstance(call, ast.Call) else ""
            if not isinstance(call, ast.Call) or parser not in _PARSERS:
                continue
            given = [*zip(_LIGHTNING_PREFIXES, call.args, strict=False)]
            given += [
                (_LIGHTNING_KEYWORDS.get(each.arg or "", ""), each.value) for each in call.keywords
            ]
            for prefix, argument in given:
                for node in getattr(argument, "elts", [argument]):
                    start = prefix if parser == "LightningCLI" else ""
                    yield from self._list_options(_get_name(node), start, parser)

    def _list_options(self, name: str, prefix: str, parser: str) -> Iterator[ScriptOption]:
        """Yield the options of a class or function of the script."""
        node = self._defined.get(name)
        if node is None:
            if name.endswith("TrainingArguments"):
                yield from _TRAINING_ARGUMENTS
            return
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield from self._list_options(_get_name(base), prefix, parser)
        for field_name, annotation, default in _list_fields(node):
            kind = _unwrap_optional(annotation)
            inner = self._defined.get(_get_name(kind))
            if isinstance(inner, ast.ClassDef):
                yield from self._list_options(inner.name, f"{prefix}{field_name}.", parser)
            else:
                yield _make_typed_option(f"--{prefix}{field_name}", kind, default, parser)


def _list_fields(
    node: ast.ClassDef | ast.FunctionDef,
) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Yield the name, the annotation and the default of each field or annotated argument."""
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                yield part.target.id, part.annotation, _find_default(part.value)
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                yield from _list_fields(part)
        return
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + [*node.args.defaults]
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    for argument, default in pairs:
        if argument.annotation is not None:
            yield argument.arg, argument.annotation, default


def _find_default(value: ast.expr | None) -> ast.expr | None:
    """Return the default of a field, also of a call such as ``field(default=0.1)``."""
    if not isinstance(value, ast.Call):
        return value
    given = {each.arg: each.value for each in value.keywords}
    return given.get("default", given.get("default_factory"))


def _make_typed_option(
    flag: str, kind: ast.expr, default: ast.expr | None, parser: str
) -> ScriptOption:
    choices = []
    if isinstance(kind, ast.Subscript) and _get_name(kind.value) == "Literal":
        choices = [_evaluate_literal(each) for each in getattr(kind.slice, "elts", [kind.slice])]
    value = _evaluate_literal(default)
    name = _get_name(kind)
    # tyro turns an option on by its name. Others take true or false.
    is_switch = name == "bool" and parser == "cli" and value is False
    if name == "bool" and parser == "cli" and value is not False:
        name = ""  # Turned off by --no-NAME, which no Script writes.
    is_required = default is None
    if is_required and parser in ("CLI", "auto_cli"):
        flag = flag.removeprefix("--")  # jsonargparse makes positional arguments of them.
    return ScriptOption(flag, name, value, choices, is_switch, is_required)


def _unwrap_optional(annotation: ast.expr) -> ast.expr:
    """Return X for the annotations ``X | None`` and ``Optional[X]``, and others as they are."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return annotation.left
    if isinstance(annotation, ast.Subscript) and _get_name(annotation.value) == "Optional":
        return annotation.slice
    return annotation


def _get_name(node: ast.AST) -> str:
    """Return the last name of an expression such as ``tyro.cli``; "" of others."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _evaluate_literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
