"""Search space files: Python files that hold a `space` and an `objective`, named by path."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hpo.errors import UsageError
from hpo.space import SearchSpace

_EXAMPLE = "a search space is a Python file with a `space` and an `objective`, such as search_spaces/digits_cnn.py"
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class SearchFile:
    """What a search space file holds: a space, an objective, and, where it has them, Settings, `prepare` and `test`."""

    path: Path
    space: SearchSpace
    objective: Callable[..., Any]
    settings_type: type | None
    prepare: Callable[..., Any] | None
    test: Callable[..., Any] | None = None

    def settings(self, assignments: Sequence[str]) -> Any:
        """Make the file's Settings from NAME=VALUE texts; None for a file without Settings."""
        if self.settings_type is None:
            if assignments:
                raise UsageError(f"--set {assignments[0]}: {self.path} has no Settings to set")
            return None
        values = dict(self._setting(assignment) for assignment in assignments)
        try:
            return copy.deepcopy(self.settings_type(**values))  # each call gets a copy, which has to be possible
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of {self.path}: {error}") from error
        except Exception as error:
            raise UsageError(f"the settings of {self.path}: {type(error).__name__}: {error}") from error

    def call(self, function: Callable[..., Any], *arguments: Any, settings: Any) -> Any:
        """Call a function of the file, with settings of its own where the file has Settings."""
        return function(*arguments) if self.settings_type is None else function(*arguments, copy.deepcopy(settings))

    def check_call(self, name: str, function: Callable[..., Any], *arguments: str) -> None:
        """Raise a UsageError unless a function of the file takes what it will be called with."""
        expected = [*arguments, *(["settings"] if self.settings_type else [])]
        try:
            inspect.signature(function).bind(*expected)
        except TypeError as error:
            raise UsageError(f"{self.path}: {name} is called as {name}({', '.join(expected)}): {error}") from None
        except ValueError:  # a builtin has no signature to look at
            return

    def prepared(self, settings: Any) -> Any:
        """Give what the file's `prepare` returns, None without one; what it raises is a person's mistake."""
        if self.prepare is None:
            return None
        try:
            return self.call(self.prepare, settings=settings)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path}: {error}") from error
        except Exception as error:
            raise UsageError(f"{self.path}: prepare failed:\n{traceback.format_exc().rstrip()}") from error

    def _setting(self, assignment: str) -> tuple[str, Any]:
        name, equals, text = assignment.partition("=")
        try:
            types = typing.get_type_hints(self.settings_type)
        except NameError as error:
            raise UsageError(f"{self.path}: the types of Settings must be there at run time: {error}") from error
        names = [field.name for field in dataclasses.fields(self.settings_type) if field.init]  # type: ignore[arg-type]
        if not equals:
            raise UsageError(f"--set {assignment}: write --set NAME=VALUE, e.g. --set {names[0] if names else 'x'}=3")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(
                f"--set {assignment}: {self.path} has no setting {name!r}; {hint}it has {', '.join(names)}"
            )
        try:
            return name, _parse(text, types[name])
        except ValueError as error:
            raise UsageError(f"--set {assignment}: {name} takes {error}, not {text!r}") from None


@functools.cache
def load_search_file(path: Path) -> SearchFile:
    """Import a search space file; raises UsageError where it is none, with the file's own traceback where it raises."""
    if not path.is_file():
        raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {_EXAMPLE}")
    module = _import(path)
    space, objective = getattr(module, "space", None), getattr(module, "objective", None)
    settings_type, prepare, test = (getattr(module, name, None) for name in ("Settings", "prepare", "test"))
    if not isinstance(space, SearchSpace):
        raise UsageError(f"{path}: {_missing('space', space, 'a SearchSpace')}; {_EXAMPLE}")
    if not callable(objective):
        raise UsageError(f"{path}: {_missing('objective', objective, 'a function')}; {_EXAMPLE}")
    if settings_type is not None and not (inspect.isclass(settings_type) and dataclasses.is_dataclass(settings_type)):
        raise UsageError(f"{path}: Settings must be a dataclass, not {settings_type!r}")
    for name, function in (("prepare", prepare), ("test", test)):
        if function is not None and not callable(function):
            raise UsageError(f"{path}: {name} must be a function, not {function!r}")
    search = SearchFile(path, space, objective, settings_type, prepare, test)
    search.check_call("objective", objective, "params", "worker")
    if prepare is not None:
        search.check_call("prepare", prepare)
    if test is not None:
        search.check_call("test", test, "params", "weights")
    return search


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"search_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file (its name must end in .py); {_EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.absolute().parent))  # so that it can import its neighbours, as a script can
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib._bootstrap" not in frame.filename and frame.filename != __file__]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
        lines += traceback.format_exception_only(type(error), error)
        raise UsageError(f"{path} could not be imported:\n{''.join(lines).rstrip()}") from error
    return module


def _missing(name: str, value: object, kind: str) -> str:
    return f"has no `{name}`" if value is None else f"`{name}` must be {kind}, not {value!r}"


def _parse(text: str, kind: Any) -> Any:
    """Read a setting's text as its type; the ValueError says what the type takes."""
    if kind is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError("true or false")
        return _BOOLEANS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
    if kind is not str:
        raise ValueError(f"a {getattr(kind, '__name__', kind)}, which cannot be given on the command line")
    return text
