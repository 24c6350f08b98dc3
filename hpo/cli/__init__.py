"""The command lines of run_islands.py and hpo."""

from hpo.cli.entry import main, search

__all__ = ["main", "search"]
