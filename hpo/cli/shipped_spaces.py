"""The search spaces that come with the package, which are found by their names."""

from __future__ import annotations

from pathlib import Path

from hpo.errors import UsageError

_PACKAGE = Path(__file__).parents[1]


def find_search_space(named: Path) -> Path:
    """Return the path of a search space file, or of the one with this name that comes with the package.

    A file in the current directory comes first. Raises UsageError if there is neither.
    """
    shipped = list_search_spaces()
    if str(named) in shipped and not named.is_file():
        return shipped[str(named)]
    if not named.exists():
        names = f", or one of {', '.join(shipped)}" if shipped else ""
        raise UsageError(f"{named}: no such file; give the path of a search space file{names}")
    return named


def list_search_spaces() -> dict[str, Path]:
    """Return the paths of the search spaces that come with the package, by their names."""
    # A wheel has them in the package, and a checkout next to it.
    files = [*_PACKAGE.glob("search_spaces/*.py")] or [*_PACKAGE.parent.glob("search_spaces/*.py")]
    return {path.stem: path for path in sorted(files)}
