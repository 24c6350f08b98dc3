"""Parse the command lines of run_islands.py and hpo, and run the commands."""

from hpo.cli.entry import main, search

__all__ = ["main", "search"]
