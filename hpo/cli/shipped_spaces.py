"""Find search spaces that are part of the package. The user gives them by name instead of by path."""

from __future__ import annotations

from pathlib import Path

from hpo.errors import UsageError

_PACKAGE = Path(__file__).parents[1]


def find_search_space(path: Path) -> Path:
    """Return the path of a search file that is given by path or by name.

    Args:
        path: The path of a file, or the name of a search space of the package. If both exist, the
        file is used.

    Raises:
        UsageError: The file does not exist, and the package does not have a search space with this
        name.
    """
    shipped = list_search_spaces()
    if str(path) in shipped and not path.is_file():
        return shipped[str(path)]
    if not path.exists():
        names = f", or one of {', '.join(shipped)}" if shipped else ""
        raise UsageError(f"SEARCH_SPACE must be the path of a file{names}, got {path}")
    return path


def list_search_spaces() -> dict[str, Path]:
    """Return the path of each search space of the package, by its name."""
    # In a wheel, they are in the package. In a checkout, they are next to it.
    files = [*_PACKAGE.glob("search_spaces/*.py")] or [*_PACKAGE.parent.glob("search_spaces/*.py")]
    return {path.stem: path for path in sorted(files)}
