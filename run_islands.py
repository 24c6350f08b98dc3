"""Search hyperparameters on MPI ranks: mpirun -n 8 python run_islands.py."""

import sys
from pathlib import Path

from hpo.cli import search

if __name__ == "__main__":
    default = Path(__file__).parent / "search_spaces" / "digits_cnn.py"
    search("run_islands.py", sys.argv[1:], default)
