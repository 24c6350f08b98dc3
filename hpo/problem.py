"""The problem of a run: a search space file, which holds a `space` and an `objective`, and its settings."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import io
import linecache
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives, declared
from hpo.space import SearchSpace

_EXAMPLE = "a search space is a Python file with a `space` and an `objective`, such as search_spaces/digits_cnn.py"
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class SearchFile:
    """What a search space file holds: a space, an objective, and, where it has them, Settings, `prepare` and `test`.

    `objectives` are what the search minimises or maximises: the loss alone where the file does not say.

    `path` is the path that a person gave, and `location` the absolute path, which stacks show; `source` is the content
    that was imported, even if the file has changed since.
    """

    path: Path
    location: Path
    source: bytes = field(repr=False)
    space: SearchSpace
    objective: Callable[..., Any]
    settings_type: type | None
    prepare: Callable[..., Any] | None
    test: Callable[..., Any] | None = None
    objectives: Objectives = ONLY_LOSS

    @property
    def sha256(self) -> str:
        """The SHA-256 hash of the content that was imported."""
        return hashlib.sha256(self.source).hexdigest()

    def settings(self, assignments: Sequence[str]) -> Any:
        """Return the file's Settings, made from NAME=VALUE texts; None for a file without Settings.

        Raises UsageError for a name or a value that the Settings do not take.
        """
        if self.settings_type is None:
            for assignment in assignments:
                self.check_setting(assignment)
            return None
        values = dict(self._setting(assignment) for assignment in assignments)
        try:
            return copy.deepcopy(self.settings_type(**values))  # each call gets a copy, which has to be possible
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of {self.path}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UsageError(f"the settings of {self.path}: {type(error).__name__}: {error}") from error

    def check_call(self, name: str, function: Callable[..., Any], *arguments: str) -> None:
        """Raise a UsageError unless a function of the file takes what it will be called with."""
        expected = [*arguments, *(["settings"] if self.settings_type else [])]
        try:
            inspect.signature(function).bind(*expected)
        except TypeError as error:
            raise UsageError(f"{self.path}: {name} is called as {name}({', '.join(expected)}): {error}") from None
        except ValueError:  # a builtin has no signature to look at
            return

    def bound(self, assignments: Sequence[str]) -> Problem:
        """Return the problem: this file, with settings made from NAME=VALUE texts."""
        return Problem(self, self.settings(assignments))

    def check_setting(self, assignment: str) -> None:
        """Raise a UsageError unless the file's Settings can have this NAME=VALUE."""
        if self.settings_type is None:
            raise UsageError(f"--set {assignment}: {self.path} has no Settings to set")
        self._setting(assignment)

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


@dataclass(frozen=True)
class Problem:
    """What a run searches: a search space file and its settings; each call of a function gets a copy of these."""

    file: SearchFile
    settings: Any

    @property
    def space(self) -> SearchSpace:
        """The search space."""
        return self.file.space

    @property
    def values(self) -> dict[str, Any]:
        """The values of the settings, as JSON can hold them."""
        values = dataclasses.asdict(self.settings) if self.settings is not None else {}
        return {n: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for n, v in values.items()}

    def objective(self, params: dict[str, Any], worker: Any) -> Any:
        """Call the objective."""
        return self._call(self.file.objective, params, worker)

    def test(self, params: dict[str, Any], weights: Mapping[str, Any]) -> Any:
        """Call the file's `test`, which it must have."""
        assert self.file.test is not None
        return self._call(self.file.test, params, weights)

    def prepared(self) -> Any:
        """Return what the file's `prepare` returns, None without a `prepare`; raises UsageError where it raises."""
        file = self.file
        if file.prepare is None:
            return None
        try:
            return self._call(file.prepare)
        except (OSError, ValueError) as error:
            raise UsageError(f"{file.path}: {error}") from error
        except SystemExit as error:
            raise UsageError(f"{file.path}: prepare called sys.exit({error.code!r})") from error
        except Exception as error:
            raise UsageError(f"{file.path}: prepare failed:\n{traceback.format_exc().rstrip()}") from error

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the file, with a copy of the settings where the file has Settings."""
        if self.file.settings_type is None:
            return function(*arguments)
        return function(*arguments, copy.deepcopy(self.settings))


@functools.cache
def load_search_file(path: Path) -> SearchFile:
    """Import a search space file, and return it.

    Raises UsageError where it is no search space file, and where the import fails, with the file's own traceback.
    """
    location, source = path.absolute(), _read(path)
    module = _import(path, location, source)
    space, objective = getattr(module, "space", None), getattr(module, "objective", None)
    settings_type, prepare, test = (getattr(module, name, None) for name in ("Settings", "prepare", "test"))
    if not isinstance(space, SearchSpace):
        raise UsageError(f"{path}: {_missing('space', space, 'a SearchSpace')}; {_EXAMPLE}")
    if not callable(objective):
        raise UsageError(f"{path}: {_missing('objective', objective, 'a function')}; {_EXAMPLE}")
    if inspect.iscoroutinefunction(objective) or inspect.isasyncgenfunction(objective):
        raise UsageError(f"{path}: `objective` must be a function without `async`: nothing awaits it")
    if settings_type is not None and not (inspect.isclass(settings_type) and dataclasses.is_dataclass(settings_type)):
        raise UsageError(f"{path}: Settings must be a dataclass, not {settings_type!r}")
    for name, function in (("prepare", prepare), ("test", test)):
        if function is not None and not callable(function):
            raise UsageError(f"{path}: {name} must be a function, not {function!r}")
    objectives = _objectives(path, getattr(module, "objectives", None))
    search = SearchFile(path, location, source, space, objective, settings_type, prepare, test, objectives)
    search.check_call("objective", objective, "params", "worker")
    if prepare is not None:
        search.check_call("prepare", prepare)
    if test is not None:
        search.check_call("test", test, "params", "weights")
    return search


def _objectives(path: Path, objectives: object) -> Objectives:
    if objectives is None:
        return ONLY_LOSS
    try:
        return declared(objectives)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {_EXAMPLE}")
    if path.suffix != ".py":
        raise UsageError(f"{path}: not a Python file (its name must end in .py); {_EXAMPLE}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


class _Loader(SourceFileLoader):
    """Imports a file from the content that was read before; bytecode beside the file may be of another content."""

    def __init__(self, name: str, location: Path, source: bytes) -> None:
        super().__init__(name, str(location))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - importlib's argument
        code = self.source_to_code(self._source, self.path)
        # Python keeps an entry without a time: tracebacks show the lines that run, not those that were saved since.
        lines = io.StringIO(importlib.util.decode_source(self._source)).readlines()
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
        return code


class _Namesake(MetaPathFinder):
    """Finds the real module where a search space file has a module's name, such as grp.py or torch.py."""

    def __init__(self, location: Path) -> None:
        self._location = location

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Look for the module in all folders but that of the search space file."""
        if fullname != self._location.stem or path is not None:
            return None
        elsewhere = [place for place in sys.path if Path(place).absolute() != self._location.parent]
        return PathFinder.find_spec(fullname, elsewhere, target)


def _import(path: Path, location: Path, source: bytes) -> ModuleType:
    loader = _Loader(f"search_file_{path.stem}", location, source)
    spec = importlib.util.spec_from_file_location(loader.name, location, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(location.parent))  # so that the file can import modules beside it, as a script can
    sys.meta_path.insert(0, _Namesake(location))
    try:
        loader.exec_module(module)
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
    """Return a setting's text as a value of its type; raises ValueError, which says what the type takes."""
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
