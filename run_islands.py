"""Search hyperparameters with islands of multi-rank workers: mpirun -n 8 python run_islands.py."""

from pathlib import Path

from hpo.cli import run_islands

if __name__ == "__main__":
    run_islands(default_search_space=Path(__file__).parent / "search_spaces" / "digits_cnn.py")
