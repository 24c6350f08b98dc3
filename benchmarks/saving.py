"""Measure how much longer evaluations take if they save checkpoints.

    python benchmarks/saving.py --data-dir /usr/share/datasets/fashion-mnist

The script trains one individual of mnist_cnn and one of text_transformer on two ranks. It trains
each without checkpoints, with the default of --checkpoint-every, and with a checkpoint each second,
in turn. It prints the seconds of an evaluation, without start-up, and the ratio to an evaluation
without checkpoints. Each ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {"off": ["--checkpoint-every", "off"], "default": [], "1s": ["--checkpoint-every", "1s"]}
SEARCHES = {
    "mnist_cnn": (
        {"conv_layers": 4, "activation": "relu", "lr": 0.01, "gamma": 0.9},
        [
            "dataset=fashion-mnist",
            "epochs=6",
            "patience=6",
            "train_samples=6000",
            "validation_samples=1000",
        ],
    ),
    "text_transformer": (
        {
            "depth": 4,
            "width": 192,
            "heads": 4,
            "dropout": 0.1,
            "lr": 0.003,
            "warmup": 0.1,
            "weight_decay": 0.01,
        },
        ["epochs=6"],
    ),
}


def time_evaluation(folder: Path, name: str, data_dir: str, every: list[str]) -> float:
    """Run a search with a single evaluation, and return the seconds of the evaluation.

    Args:
        folder: Folder for the run.
        name: Name of the search space.
        data_dir: Folder of Fashion-MNIST.
        every: The option --checkpoint-every and its value, or nothing.
    """
    params, settings = SEARCHES[name]
    start, run_dir = folder / "start.json", Path(tempfile.mkdtemp(dir=folder)) / "run"
    start.write_text(json.dumps([params]))
    if name == "mnist_cnn":
        settings = [*settings, f"data_dir={data_dir}"]
    command = [
        "mpirun",
        "-n",
        "2",
        sys.executable,
        ROOT / "run_islands.py",
        ROOT / "search_spaces" / f"{name}.py",
    ]
    command += ["--evaluations", "1", "--enqueue", start, "--run-dir", run_dir, *every]
    command += [part for setting in settings for part in ("--set", setting)]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, timeout=1800)
    summary = json.loads((run_dir / "summary.json").read_text())
    return float(summary["best"]["seconds"])


def main() -> None:
    """Print the seconds of evaluations, and their ratios to evaluations without checkpoints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds; each measures all variants"
    )
    parser.add_argument(
        "--data-dir", required=True, help="folder of the four IDX files of Fashion-MNIST"
    )
    arguments = parser.parse_args()
    print("                         seconds   ratio")
    with tempfile.TemporaryDirectory() as folder:
        for name in SEARCHES:
            times: dict[str, list[float]] = {every: [] for every in VARIANTS}
            for _ in range(arguments.rounds):
                for every, options in VARIANTS.items():
                    times[every].append(
                        time_evaluation(Path(folder), name, arguments.data_dir, options)
                    )
            for every, seconds in times.items():
                ratios = [one / off for one, off in zip(seconds, times["off"], strict=True)]
                spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
                print(
                    f"{name:<17}{every:<8}{median(seconds):>7.2f}{median(ratios):>8.3f}   {spread}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
