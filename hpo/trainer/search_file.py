"""Load a search file: its search space, its functions and its settings.

It is imported as the module ``search_file_NAME``, from content that was read before.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import io
import linecache
import math
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import LOSS, ONLY_LOSS, Objectives, parse_objectives
from hpo.problem import SearchDescription
from hpo.process.failure import find_hint
from hpo.script_objective import Script, find_program
from hpo.space import SearchSpace

_EXAMPLE_HINT = (
    "a search space is a Python file with a `space` and an `objective`, "
    "such as search_spaces/digits_cnn.py"
)

_PICKLER_MODULES = {"cloudpickle.cloudpickle", "joblib.externals.cloudpickle.cloudpickle"}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class SearchFile:
    """An imported search file. Ranks do not import it: they use `hpo.problem.SearchDescription`."""

    path: Path
    """The path that the user gave."""
    location: Path
    """The absolute path, which tracebacks show."""
    source: bytes = field(repr=False)
    """The content that was imported, even if the file has changed since."""
    space: SearchSpace
    """The search space."""
    objective: Callable[..., Any] | Script
    """The function or the program that trains a network and reports its losses."""
    settings_type: type | None = None
    """The dataclass `Settings`, if the file has one."""
    prepare: Callable[..., Any] | None = None
    """The function `prepare`, if the file has one."""
    test: Callable[..., Any] | None = None
    """The function `test`, if the file has one."""
    objectives: Objectives = ONLY_LOSS
    """The objectives of the search. It has only the loss, unless the file declares others."""
    score: str = ""
    """Name of the metric whose negative is the loss, since the first objective is maximised."""

    @property
    def script(self) -> Script | None:
        """The program that is used as objective; None if the objective is a function."""
        return self.objective if isinstance(self.objective, Script) else None

    @functools.cached_property
    def program(self) -> Path | None:
        """The path of the Python script that is the objective; None for other objectives."""
        path = find_program(self.script) if self.script is not None else None
        return path if path is not None and path.suffix == ".py" else None

    @functools.cached_property
    def program_source(self) -> bytes:
        """The content of `program` (not None) when it was first read."""
        assert self.program is not None
        try:
            return self.program.read_bytes()
        except OSError as error:
            raise UsageError(f"{self.program} cannot be read: {error.strerror}") from error

    def describe(self) -> dict[str, Any]:
        """Return a description of the file as JSON data for `SearchDescription.from_data`."""
        return SearchDescription(
            self.path,
            self.location,
            self.source,
            self.space,
            self.objectives,
            has_settings=self.settings_type is not None,
            has_prepare=self.prepare is not None,
            has_test=self.test is not None,
            script=self.script,
        ).data

    def bind_settings(self, assignments: Sequence[str]) -> BoundSearch:
        """Return this file with settings from NAME=VALUE texts.

        The settings are None if the file has no `Settings`. Raises UsageError for a name or a value
        that the `Settings` do not accept.
        """
        if self.settings_type is None:
            for assignment in assignments:
                self.check_setting(assignment)
            return BoundSearch(self, None)
        values = dict(self._parse_setting(assignment) for assignment in assignments)
        try:
            # Each call gets a copy, so copying must work.
            return BoundSearch(self, copy.deepcopy(self.settings_type(**values)))
        except (TypeError, ValueError) as error:
            raise UsageError(f"the settings of {self.path}: {error}") from error
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"the settings of {self.path}: {type(error).__name__}: {error}"
            ) from error

    def check_call(self, name: str, function: Callable[..., Any], *arguments: str) -> None:
        """Raise a UsageError unless `function` accepts these arguments, and any settings."""
        expected = [*arguments, *(["settings"] if self.settings_type else [])]
        try:
            inspect.signature(function).bind(*expected)
        except TypeError as error:
            lacks_settings = "'settings'" in str(error) and not self.settings_type
            define = ". Define a dataclass Settings with its settings" if lacks_settings else ""
            raise UsageError(
                f"{self.path}: {name} is called as {name}({', '.join(expected)}): {error}{define}"
            ) from None
        except ValueError:  # A builtin has no signature.
            return

    def check_script(self, script: Script) -> None:
        """Raise a UsageError unless a program exists and all of its placeholders are known."""
        if self.score:
            raise UsageError(
                f"{self.path}: the first objective of a Script must be 'loss'. "
                "Write Script(..., maximize=REGEX), or report the negative score"
            )
        fields = dataclasses.fields(self.settings_type) if self.settings_type else ()
        try:
            script.check(self.space.parameters, [setting.name for setting in fields])
            find_program(script)
            if self.program is not None:
                self._compile_program()
        except SyntaxError as error:
            raise UsageError(f"{self.program}:{error.lineno}: {error.msg}") from None
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def _compile_program(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The program prints its warnings when it runs.
            compile(self.program_source, str(self.program), "exec", dont_inherit=True)

    def check_setting(self, assignment: str) -> None:
        """Raise a UsageError unless the file's Settings accept this NAME=VALUE."""
        if self.settings_type is None:
            raise UsageError(f"--set {assignment}: {self.path} has no Settings to set")
        self._parse_setting(assignment)

    def _parse_setting(self, assignment: str) -> tuple[str, Any]:
        name, equals, text = assignment.partition("=")
        try:
            types = typing.get_type_hints(self.settings_type)
        except NameError as error:
            raise UsageError(
                f"{self.path}: the types of Settings must be there at run time: {error}"
            ) from error
        names = [field.name for field in dataclasses.fields(self.settings_type) if field.init]  # type: ignore[arg-type]
        if not equals:
            example = names[0] if names else "x"
            raise UsageError(f"--set {assignment}: write --set NAME=VALUE, e.g. --set {example}=3")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UsageError(
                f"--set {assignment}: {self.path} has no setting {name!r}; "
                f"{hint}it has {', '.join(names)}"
            )
        try:
            return name, _parse_value(text, types[name])
        except ValueError as error:
            raise UsageError(f"--set {assignment}: {name} takes {error}, not {text!r}") from None


@dataclass(frozen=True)
class BoundSearch:
    """A search file together with its settings."""

    file: SearchFile
    settings: Any
    """An instance of the file's `Settings`; None if the file has none."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of the settings as JSON data. Others, such as NaN, are texts."""
        values = dataclasses.asdict(self.settings) if self.settings is not None else {}
        for name, value in values.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not isinstance(value, (int, float, str, type(None))) or not is_finite:
                values[name] = str(value)
        return values

    def copy_settings(self) -> tuple[Any, ...]:
        """Return the last arguments of the user's functions: a copy of the settings, or nothing."""
        return () if self.file.settings_type is None else (copy.deepcopy(self.settings),)

    def call_prepare(self) -> Any:
        """Return the result of `prepare`, if the file has one. Raises UsageError if it fails."""
        file = self.file
        if file.prepare is None:
            return None
        try:
            return file.prepare(*self.copy_settings())
        except (OSError, ValueError) as error:
            raise UsageError(f"{file.path}: {error}") from error
        except SystemExit as error:
            raise UsageError(f"{file.path}: prepare called sys.exit({error.code!r})") from error
        except Exception as error:
            raise UsageError(
                f"{file.path}: prepare failed:\n{traceback.format_exc().rstrip()}"
            ) from error


@dataclass(frozen=True)
class SearchSource:
    """A search file that may not be imported yet."""

    path: Path
    source: bytes = field(repr=False)
    assignments: list[str]
    """The settings as NAME=VALUE texts."""

    def load_file(self) -> SearchFile:
        """Return the file. It is imported at the first call in this process and its parents."""
        return load_search_file(self.path, self.source)

    def load(self) -> BoundSearch:
        """Return the file together with its settings, as `load_file` does."""
        return self.load_file().bind_settings(self.assignments)


def load_search_file(path: Path, source: bytes | None = None) -> SearchFile:
    """Import a search file, and return it; `source` is its content if it has been read before.

    Raises UsageError if it is not a search file, or if its import fails (with the traceback of the
    file).
    """
    return _import_search_file(path, _read_source(path) if source is None else source)


@functools.cache
def _import_search_file(path: Path, source: bytes) -> SearchFile:
    location = path.absolute()
    module = _import_source(path, location, source)
    space = getattr(module, "space", None)
    objective = getattr(module, "objective", None)
    settings_type, prepare, test = (
        getattr(module, name, None) for name in ("Settings", "prepare", "test")
    )
    if not isinstance(space, SearchSpace):
        raise UsageError(
            f"{path}: {_describe_missing('space', space, 'a SearchSpace')}; {_EXAMPLE_HINT}"
        )
    if not callable(objective) and not isinstance(objective, Script):
        missing = _describe_missing("objective", objective, "a function or a Script")
        raise UsageError(f"{path}: {missing}; {_EXAMPLE_HINT}")
    if inspect.iscoroutinefunction(objective) or inspect.isasyncgenfunction(objective):
        raise UsageError(
            f"{path}: `objective` must be a function without `async`: nothing awaits it"
        )
    if settings_type is not None and not (
        inspect.isclass(settings_type) and dataclasses.is_dataclass(settings_type)
    ):
        raise UsageError(f"{path}: Settings must be a dataclass, not {settings_type!r}")
    for name, function in (("prepare", prepare), ("test", test)):
        if function is not None and not callable(function):
            raise UsageError(f"{path}: {name} must be a function, not {function!r}")
    objectives, score = _parse_objectives(path, getattr(module, "objectives", (LOSS,)))
    search = SearchFile(
        path, location, source, space, objective, settings_type, prepare, test, objectives, score
    )
    if isinstance(objective, Script):
        search.check_script(objective)
    else:
        search.check_call("objective", objective, "params", "worker")
    if prepare is not None:
        search.check_call("prepare", prepare)
    if test is not None:
        search.check_call("test", test, "params", "weights")
    return search


def answer_constraint_request(space: SearchSpace, content: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request of a rank about the constraints, which are code of the user.

    A request ``{"params": [...]}`` has the hyperparameters of several candidates. The answer
    ``{"violated": [...]}`` has, for each candidate, the index of the first constraint that it
    violates, or None. A request ``{"check": True}`` asks whether the constraints are valid. The
    answer is ``{"problem": text}``, with an empty text if they are.
    """
    if not content.get("check"):
        return {"violated": space.find_violated(content["params"])}
    try:
        space.check_constraints()
    except ValueError as error:
        return {"problem": str(error)}
    return {"problem": ""}


def _parse_objectives(path: Path, objectives: object) -> tuple[Objectives, str]:
    try:
        return parse_objectives(objectives)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _describe_missing(name: str, value: object, kind: str) -> str:
    return f"has no `{name}`" if value is None else f"`{name}` must be {kind}, not {value!r}"


def _parse_value(text: str, kind: Any) -> Any:
    """Convert the text of a setting to the type `kind`.

    Raises ValueError, whose message describes the accepted values, if the text does not fit the
    type.
    """
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
        raise ValueError(
            f"a {getattr(kind, '__name__', kind)}, which cannot be given on the command line"
        )
    return text


def _read_source(path: Path) -> bytes:
    """Return the content of a search file. Raises UsageError if it cannot be one."""
    if not path.is_file():
        raise UsageError(
            f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {_EXAMPLE_HINT}"
        )
    if path.suffix != ".py":
        raise UsageError(f"{path}: not a Python file (its name must end in .py); {_EXAMPLE_HINT}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _import_source(path: Path, location: Path, source: bytes) -> ModuleType:
    """Import a search file, whose content is `source`, and return the module.

    `path` is the path that the user gave, for messages, and `location` is the absolute path. If the
    import fails, raises UsageError with the traceback of the file.
    """
    loader = _SourceLoader(f"search_file_{path.stem}", location, source)
    spec = importlib.util.spec_from_file_location(loader.name, location, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # Dataclasses look up their module.
    # The file can import modules next to it, as a script can.
    sys.path.insert(0, str(location.parent))
    sys.meta_path.insert(0, _NamesakeFinder(location))
    # cloudpickle, which joblib and dask use, sends the classes of the file by value, since other
    # processes cannot import the file by name.
    sys.meta_path.insert(0, _CloudpickleFinder(module))
    for name in _PICKLER_MODULES & sys.modules.keys():
        sys.modules[name].register_pickle_by_value(module)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "importlib._bootstrap" not in frame.filename and frame.filename != __file__
        ]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
        lines += traceback.format_exception_only(type(error), error)
        text = "".join(lines).rstrip()
        hint = f" ({found})" if (found := find_hint(error)) else ""
        raise UsageError(f"{path} could not be imported:\n{text}{hint}") from error
    return module


class _CloudpickleFinder(MetaPathFinder):
    """Registers a module with cloudpickle when cloudpickle, which is slow, is imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of cloudpickle with a loader that registers the module."""
        if fullname not in _PICKLER_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(pickler: ModuleType) -> None:
            run(pickler)
            pickler.register_pickle_by_value(self._module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign, assignment]
        return spec


class _SourceLoader(SourceFileLoader):
    """Imports content that was read before, and no cached bytecode of other content."""

    def __init__(self, name: str, location: Path, source: bytes) -> None:
        super().__init__(name, str(location))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - importlib's argument
        code = self.source_to_code(self._source, self.path)
        # Python never refreshes an entry without a time, so tracebacks show the imported lines, not
        # later edits.
        lines = io.StringIO(importlib.util.decode_source(self._source)).readlines()
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
        return code


class _NamesakeFinder(MetaPathFinder):
    """Finds the installed module that has the name of a search file, such as torch.py."""

    def __init__(self, location: Path) -> None:
        self._location = location

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module with the name of the search file outside its folder."""
        if fullname != self._location.stem or path is not None:
            return None
        folder = self._location.parent
        elsewhere = [other for other in sys.path if Path(other).absolute() != folder]
        return PathFinder.find_spec(fullname, elsewhere, target)
