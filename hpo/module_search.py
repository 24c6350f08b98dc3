"""The module of a program that is started by ``-m``: looked for as Python does, without importing any code."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def check_module(name: str) -> None:
    """Raise ValueError if ``python -m name`` would find no module, unless its packages may define where it is."""
    names = name.split(".")
    if name.endswith(".py") or "/" in name or not all(names):
        raise ValueError(f"-m {name}: -m needs the name of a module, such as package.module; give a file without -m")
    spec = _find_spec(names[0], [str(Path.cwd()), *sys.path])
    if spec is None:
        raise ValueError(f"-m {name}: there is no module {names[0]!r} in {Path.cwd()}, nor is it installed")
    for count, inner in enumerate((*names[1:], "__main__"), start=1):
        folders = list(spec.submodule_search_locations or [])
        if _may_define_path(spec) or (inner == "__main__" and not folders):
            return
        if (found := _find_spec(".".join([*names[:count], inner]), folders)) is None:
            where = ", ".join(folders) or f"{spec.origin}, which is not a package"
            raise ValueError(f"-m {name}: there is no module {inner!r} in {where}")
        spec = found


def _find_spec(name: str, folders: list[str]) -> ModuleSpec | None:
    # With the full name, PathFinder would ask for the parent package, which was not imported.
    if (found := PathFinder.find_spec(name.rpartition(".")[2], folders)) is not None:
        return found
    others = [finder for finder in sys.meta_path if finder is not PathFinder]
    specs = (finder.find_spec(name, folders if "." in name else None) for finder in others)
    return next((spec for spec in specs if spec is not None), None)


def _may_define_path(spec: ModuleSpec) -> bool:
    """Return whether the code of a package may define where its modules are."""
    origin = Path(spec.origin or "")
    return origin.suffix == ".py" and origin.is_file() and b"__path__" in origin.read_bytes()
