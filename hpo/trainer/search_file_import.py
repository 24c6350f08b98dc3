"""Import a search file from content that was read before, as the module ``search_file_NAME``."""

from __future__ import annotations

import importlib.util
import io
import linecache
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from hpo.errors import UsageError
from hpo.process.failure import find_hint

EXAMPLE_HINT = "a search space is a Python file with a `space` and an `objective`, such as search_spaces/digits_cnn.py"

_PICKLER_MODULES = {"cloudpickle.cloudpickle", "joblib.externals.cloudpickle.cloudpickle"}


def read_source(path: Path) -> bytes:
    """Return the content of a search file. Raises UsageError if it is not a Python file, or cannot be read."""
    if not path.is_file():
        raise UsageError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {EXAMPLE_HINT}")
    if path.suffix != ".py":
        raise UsageError(f"{path}: not a Python file (its name must end in .py); {EXAMPLE_HINT}")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if b"argparse" in source and b"space" not in source:  # It is a training script, which trains when it is imported.
        raise UsageError(f"{path}: has no `space`; {EXAMPLE_HINT}. A training script stands behind --: -- {path}")
    return source


def import_source(path: Path, location: Path, source: bytes) -> ModuleType:
    """Import a search file, whose content is `source`, and return the module.

    `path` is the path that the user gave, for messages, and `location` is the absolute path. If the import fails,
    raises UsageError with the traceback of the file.
    """
    loader = _SourceLoader(f"search_file_{path.stem}", location, source)
    spec = importlib.util.spec_from_file_location(loader.name, location, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # Dataclasses look up their module.
    sys.path.insert(0, str(location.parent))  # The file can import modules next to it, as a script can.
    sys.meta_path.insert(0, _NamesakeFinder(location))
    _register_pickle_by_value(module)
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "importlib._bootstrap" not in frame.filename and frame.filename != __file__]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(own)]
        lines += traceback.format_exception_only(type(error), error)
        hint = f" ({found})" if (found := find_hint(error)) else ""
        raise UsageError(f"{path} could not be imported:\n{''.join(lines).rstrip()}{hint}") from error
    return module


def _register_pickle_by_value(module: ModuleType) -> None:
    """Let cloudpickle send the classes of a search file by value, since other processes cannot import the file by name.

    joblib and dask use cloudpickle.
    """
    sys.meta_path.insert(0, _CloudpickleFinder(module))
    for name in _PICKLER_MODULES & sys.modules.keys():
        sys.modules[name].register_pickle_by_value(module)


class _CloudpickleFinder(MetaPathFinder):
    """Registers a module with cloudpickle when cloudpickle is imported. To import it in advance would be too slow."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of cloudpickle with a loader that registers the module; None for other modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _PICKLER_MODULES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(pickler: ModuleType) -> None:
            run(pickler)
            pickler.register_pickle_by_value(self._module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign, assignment]
        return spec


class _SourceLoader(SourceFileLoader):
    """Imports content that was read before. It ignores cached bytecode, which may belong to other content."""

    def __init__(self, name: str, location: Path, source: bytes) -> None:
        super().__init__(name, str(location))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002 - importlib's argument
        code = self.source_to_code(self._source, self.path)
        # Python never refreshes an entry without a time, so tracebacks show the imported lines, not later edits.
        lines = io.StringIO(importlib.util.decode_source(self._source)).readlines()
        linecache.cache[self.path] = (len(self._source), None, lines, self.path)
        return code


class _NamesakeFinder(MetaPathFinder):
    """Finds the installed module if a search file has the same name: for example, torch if the file is torch.py."""

    def __init__(self, location: Path) -> None:
        self._location = location

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module with the name of the search file outside its folder; return None for other names."""
        if fullname != self._location.stem or path is not None:
            return None
        elsewhere = [folder for folder in sys.path if Path(folder).absolute() != self._location.parent]
        return PathFinder.find_spec(fullname, elsewhere, target)
