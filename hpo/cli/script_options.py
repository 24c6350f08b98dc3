"""Find the options of a training script in its code, without running it.

They are those of argparse, and those that tyro, jsonargparse, transformers' HfArgumentParser and
LightningCLI make of the fields of a dataclass or the arguments of a function.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hpo.script_objective import name_option

# Names of what people tune, the most important first.
_TUNED_NAMES = (
    *("lr|learning_rate", "wd|weight_decay", "batch", "drop", "warmup", "momentum", "optim|^opt$"),
    *("sched", "gamma", "smoothing", "hidden|width|dim", "layers|depth", "clip", "beta", "eps"),
)
_SEED_FLAG = re.compile(r"--([\w.]+[-_.])?seed(_everything)?")
_BOOLEAN_ACTION = "BooleanOptionalAction"  # of argparse

_JSONARGPARSE = ("CLI", "auto_cli")
# Callables that take classes or functions: of tyro, transformers, and jsonargparse.
_PARSERS = ("cli", "HfArgumentParser", *_JSONARGPARSE)
_FIRST_ARGUMENTS = ("f", "dataclass_types", "components")  # their names


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
        name = name_option(self.flag.lstrip("-"))
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
    """Return the words that must precede the options of a LightningCLI; [] for other scripts.

    They are its subcommand, and the folder for its files: it refuses to overwrite its config.yaml.
    """
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    runs = [call for call in calls if _get_name(call.func) == "LightningCLI"]
    keywords = [each for call in runs for each in call.keywords if each.arg == "run"]
    is_run = all(_evaluate_literal(each.value) is not False for each in keywords)
    folder = ["--trainer.default_root_dir", "{folder}"]
    return [*(["fit"] if is_run else []), *folder] if runs else []


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
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        self._defined = {node.name: node for node in self._nodes if isinstance(node, kinds)}

    def find(self) -> Iterator[ScriptOption]:
        for node in self._nodes:
            parser = _get_name(node.func) if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and parser == "LightningCLI":
                yield from self._read_lightning_call(node)
            elif isinstance(node, ast.Call) and parser in _PARSERS:
                yield from self._read_call(node, parser)

    def _read_lightning_call(self, call: ast.Call) -> Iterator[ScriptOption]:
        yield ScriptOption("--seed_everything", "int")
        model, data, *_ = [*call.args, ast.Constant(None), ast.Constant(None)]
        given = {each.arg: each.value for each in call.keywords}
        classes = {
            "model.": given.get("model_class", model),
            "data.": given.get("datamodule_class", data),
        }
        for prefix, node in classes.items():
            yield from self._list_options(_get_name(node), prefix, "LightningCLI")

    def _read_call(self, call: ast.Call, parser: str) -> Iterator[ScriptOption]:
        given = {each.arg: each.value for each in call.keywords}
        first = [*call.args, *(given[name] for name in _FIRST_ARGUMENTS if name in given)][:1]
        names = [_get_name(each) for node in first for each in getattr(node, "elts", [node])]
        if parser in _JSONARGPARSE:
            if len(names) > 1 or any(map(self._has_methods, names)):
                return  # They are subcommands.
            if _evaluate_literal(given.get("as_positional")) is False:
                parser = "LightningCLI"  # Also of jsonargparse, without positional arguments.
        for name in names:
            yield from self._list_options(name, "", parser)

    def _has_methods(self, name: str) -> bool:
        body = getattr(self._defined.get(name), "body", [])
        is_class = isinstance(self._defined.get(name), ast.ClassDef)
        return is_class and any(not getattr(part, "name", "_").startswith("_") for part in body)

    def _list_options(
        self, name: str, prefix: str, parser: str, outer: tuple[str, ...] = ()
    ) -> Iterator[ScriptOption]:
        """Yield the options of a class or function of the script, unless it is in `outer`."""
        node = self._defined.get(name)
        if node is None and name.endswith("TrainingArguments"):
            yield from _TRAINING_ARGUMENTS
        if node is None or name in outer:
            return
        outer = (*outer, name)
        function = _find_init(node) if isinstance(node, ast.ClassDef) else node
        if isinstance(node, ast.ClassDef) and (function is None or function.args.kwarg):
            for base in node.bases:
                yield from self._list_options(_get_name(base), prefix, parser, outer)
        for field_name, annotation, default in _list_fields(node, function):
            kind, is_optional = _read_annotation(annotation)
            inner = self._defined.get(_get_name(kind))
            if not isinstance(inner, ast.ClassDef):
                yield _make_typed_option(prefix, field_name, kind, default, parser)
            elif not is_optional:  # tyro makes subcommands of an optional class.
                start = f"{prefix}{field_name}."
                for option in self._list_options(inner.name, start, parser, outer):
                    is_required = option.is_required and default is None
                    yield replace(option, is_required=is_required)


_Field = tuple[str, ast.expr, ast.expr | None]
"""Name, annotation and default."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _find_init(node: ast.ClassDef) -> ast.FunctionDef | None:
    functions = (part for part in node.body if isinstance(part, ast.FunctionDef))
    return next((part for part in functions if part.name == "__init__"), None)


def _list_fields(node: ast.AST, function: _Function | None) -> Iterator[_Field]:
    """Yield the arguments of a function, or without one the fields of a dataclass."""
    if function is not None:
        yield from _list_arguments(function)
        return
    for part in getattr(node, "body", []):
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        call = part.value if isinstance(part.value, ast.Call) else None
        if call is None or _get_name(call.func) not in ("field", "Field", "HfArg"):
            yield part.target.id, part.annotation, part.value
            continue
        given = {each.arg: each.value for each in call.keywords}
        first = call.args[0] if call.args else None
        default = given.get("default", given.get("default_factory", first))
        if _evaluate_literal(given.get("init")) is not False:
            yield part.target.id, part.annotation, default


def _list_arguments(node: _Function) -> Iterator[_Field]:
    """Yield the annotated arguments of a function."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(positional) - len(node.args.defaults)) + [*node.args.defaults]
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    for argument, default in pairs:
        if argument.annotation is not None:
            yield argument.arg, argument.annotation, default


def _make_typed_option(
    prefix: str, name: str, kind: ast.expr, default: ast.expr | None, parser: str
) -> ScriptOption:
    choices = []
    if isinstance(kind, ast.Subscript) and _get_name(kind.value) == "Literal":
        choices = [_evaluate_literal(each) for each in getattr(kind.slice, "elts", [kind.slice])]
    value = _evaluate_literal(default)
    type_name = _get_name(kind)
    # tyro turns an option on by its name. Others take true or false.
    is_switch = type_name == "bool" and parser == "cli" and value is False
    if type_name == "bool" and parser == "cli" and value is not False:
        type_name = ""  # Turned off by --no-NAME, which no Script writes.
    is_required = default is None
    is_positional = is_required and parser in _JSONARGPARSE and not prefix
    flag = name if is_positional else f"--{prefix}{name}"
    return ScriptOption(flag, type_name, value, choices, is_switch, is_required)


def _read_annotation(annotation: ast.expr) -> tuple[ast.expr, bool]:
    """Return the type in an annotation, and whether it may be None instead."""
    is_optional = False
    while True:
        found = _unwrap(annotation)
        if found is None:
            return annotation, is_optional
        annotation, may_be_none = found
        is_optional |= may_be_none


def _unwrap(annotation: ast.expr) -> tuple[ast.expr, bool] | None:
    """Return the type in ``"X"``, ``Annotated[X, ...]``, ``X | None`` and others; None of X."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        with suppress(SyntaxError):
            return ast.parse(annotation.value, mode="eval").body, False
    parts: list[ast.expr] = []
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        parts = [annotation.left, annotation.right]
    elif isinstance(annotation, ast.Subscript):
        inner = list(getattr(annotation.slice, "elts", [annotation.slice]))
        outer = _get_name(annotation.value)
        if outer == "Annotated":
            return inner[0], False
        parts = [*inner, ast.Constant(None)] if outer == "Optional" else []
        parts = inner if outer == "Union" else parts
    types = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)]
    return (types[0], True) if len(types) == 1 < len(parts) else None


def _get_name(node: ast.AST) -> str:
    """Return the last name of an expression such as ``tyro.cli``; "" of others."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _evaluate_literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
