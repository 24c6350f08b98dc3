"""Import the packages of a training script in the template, once for all evaluations.

The template is the process that trainers are forked from. Only imports at the top of the script are found.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sysconfig
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

from hpo.process.linux import count_threads

_EFFECTLESS_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Try)


def import_packages(path: Path, source: bytes, skipped: Container[str]) -> Iterator[str]:
    """Import the installed packages that a script imports, except `skipped`, and yield each name after its import.

    Packages that cannot be imported are ignored, since the script reports the error when it runs.
    """
    with suppress(SyntaxError, ValueError):
        for module, names in _find_imports(ast.parse(source)):
            package = module.partition(".")[0]
            if package not in skipped and _is_installed(module, path.absolute().parent):
                with suppress(Exception, SystemExit):
                    imported = importlib.import_module(module)
                    for name in names:  # Some packages, such as transformers, import a module when its name is read.
                        getattr(imported, name, None)
                yield package


def find_fork_hazard() -> str:
    """Return the reason why this process is unsafe to fork; an empty text if it is safe."""
    threads = count_threads() - 1
    if threads:
        return f"it starts {threads} thread{'s' if threads > 1 else ''}"
    return "it asks the driver of the GPUs" if _has_asked_driver() or _is_bad_fork() else ""


def _has_asked_driver() -> bool:
    """Return whether this process has initialised CUDA or ROCm, with torch or with another library."""
    files: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The descriptor of this list is already closed.
            files.append(str(path.readlink()))
    # NVML, which does not prevent a fork, opens only /dev/nvidiactl.
    return any(re.fullmatch(r"/dev/(nvidia-uvm|nvidia\d+|kfd)", file) for file in files)


def _is_bad_fork() -> bool:
    """Return whether torch could not use its accelerator in a process that is forked from this one."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return False
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            status = int(getattr(torch.get_device_module(kind), "_is_in_bad_fork", lambda: False)())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _find_imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a script imports at its top, and the names that it imports from each.

    The search ends at the first statement that is not an import, a definition, a `try` or a constant. Such a statement
    may set an environment variable for later imports.
    """
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module, [alias.name for alias in node.names]
        elif not isinstance(node, _EFFECTLESS_STATEMENTS) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            return


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether a module belongs to an installed package, and not to the user's files in `folder`."""
    root = name.partition(".")[0]
    if (folder / root).exists() or (folder / f"{root}.py").exists():
        return False
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(root)
        origin = spec.origin if spec is not None else None
        folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
        return origin is not None and any(Path(origin).is_relative_to(folder) for folder in folders)
    return False
