"""The command lines."""

from hpo.cli.entry import main, run_islands

__all__ = ["main", "run_islands"]
