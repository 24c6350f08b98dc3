"""Measure how much of the time a sweeper of Hydra keeps its slots busy.

The application sleeps: the durations of its jobs are log-normal with sigma 1, which is usual for
trainings of networks of different sizes. It appends its times to the file TIMES:

    export TIMES=times.txt
    python benchmarks/hydra_sweepers.py -m hydra/sweeper=hpo hydra.sweeper.workers=8 \
        hydra.sweeper.evaluations=64 'x=interval(0,1)'
    python benchmarks/hydra_sweepers.py --busy times.txt 8

For other sweepers: ``hydra/launcher=joblib hydra.launcher.n_jobs=8 'x=range(0,1,0.015625)'``, and
the same with ``hydra/sweeper=optuna hydra.sweeper.n_jobs=8 hydra.sweeper.n_trials=64``.
docs/training/hydra.md has the results.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

_MEDIAN_SECONDS = 15.0
ConfigStore.instance().store(name="sleep", node={"x": 0.0})


@hydra.main(version_base=None, config_path=None, config_name="sleep")
def main(config: DictConfig) -> float:
    """Sleep, write the times of the start and of the end, and return a loss."""
    started = time.time()
    rng = random.Random(int(HydraConfig.get().job.num))
    time.sleep(_MEDIAN_SECONDS * rng.lognormvariate(0, 1))
    with Path(os.environ["TIMES"]).open("a") as file:
        file.write(f"{started} {time.time()}\n")
    return float(config.x - 0.3) ** 2


def print_busy_share(path: Path, slots: int) -> None:
    """Print the share of time in which slots run jobs, until the last job starts."""
    lines = path.read_text().splitlines()
    times = sorted((float(start), float(end)) for start, end in map(str.split, lines))
    first, last = times[0][0], times[-1][0]
    busy = sum(min(end, last) - start for start, end in times)
    whole = max(end for _, end in times) - first
    print(f"{len(times)} jobs in {whole:.0f} s; busy {busy / slots / (last - first):.1%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--busy"]:
        print_busy_share(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
