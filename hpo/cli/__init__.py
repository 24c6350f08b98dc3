"""The command lines."""

from hpo.cli.entry import main, search

__all__ = ["main", "search"]
