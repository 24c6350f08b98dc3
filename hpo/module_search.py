"""Check that ``python -m module`` would find its module, without importing the module."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def check_module(name: str) -> None:
    """Raise an error unless ``python -m name`` would find a module.

    A module is not checked if a package that contains it may change its own search path (`__path__`).

    Raises:
        ValueError: The module does not exist.
    """
    names = name.split(".")
    if name.endswith(".py") or "/" in name or not all(names):
        raise ValueError(
            f"-m {name}: -m must be followed by the name of a module, such as package.module. Give a file without -m"
        )
    spec = _find_spec(names[0], [str(Path.cwd()), *sys.path])
    if spec is None:
        raise ValueError(f"-m {name}: there is no module {names[0]!r} in {Path.cwd()}, and it is not installed")
    for depth, inner in enumerate((*names[1:], "__main__"), start=1):
        folders = list(spec.submodule_search_locations or [])
        if _may_define_path(spec) or (inner == "__main__" and not folders):
            return
        if (found := _find_spec(".".join([*names[:depth], inner]), folders)) is None:
            searched = ", ".join(folders) or f"{spec.origin}, which is not a package"
            raise ValueError(f"-m {name}: there is no module {inner!r} in {searched}")
        spec = found


def _find_spec(name: str, folders: list[str]) -> ModuleSpec | None:
    # With the full name, PathFinder would need the parent package, which was not imported.
    if (found := PathFinder.find_spec(name.rpartition(".")[2], folders)) is not None:
        return found
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    specs = (finder.find_spec(name, folders if "." in name else None) for finder in others)
    return next((spec for spec in specs if spec is not None), None)


def _may_define_path(spec: ModuleSpec) -> bool:
    """Return whether the code of a package may change its search path."""
    origin = Path(spec.origin or "")
    return origin.suffix == ".py" and origin.is_file() and b"__path__" in origin.read_bytes()
