"""Simulate the lives of many runs, and print those that do what a run must not do.

Run it as `python -m tests.simulator --lives 1000`. A life depends on its seed alone:
`python -m tests.simulator --show SEED` repeats it, and prints what happened.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simulator import mpi

mpi.install()  # before hpo is imported

# Sessions import these when they need them. Here they are imported once.
import hpo.run.leader_stages  # noqa: E402
import hpo.views.summary_tables  # noqa: E402, F401
from tests.simulator.life import Life, ViolationError  # noqa: E402
from tests.simulator.mistakes import run_mutants  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=1000, help="number of lives")
    parser.add_argument("--first", type=int, default=0, help="seed of the first life")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="lives at the same time")
    parser.add_argument("--until-failure", action="store_true", help="end at the first failure")
    parser.add_argument("--mutants", action="store_true", help="look for known mistakes instead")
    parser.add_argument("--show", type=int, metavar="SEED", help="repeat one life, and print all")
    arguments = parser.parse_args()
    if arguments.mutants:
        sys.exit(run_mutants(arguments.lives, arguments.jobs))
    with TemporaryDirectory(prefix="hpo-lives-", dir="/dev/shm") as folder:
        if arguments.show is not None:
            sys.exit(show_life(arguments.show, Path(folder)))
        seeds = range(arguments.first, arguments.first + arguments.lives)
        sys.exit(run_lives(seeds, Path(folder), arguments.jobs, arguments.until_failure))


def run_lives(seeds: range, folder: Path, jobs: int, ends_at_failure: bool) -> int:
    """Run lives, print the failures and a summary, and return 1 if there are failures."""
    began = time.monotonic()
    lives = evaluations = steps = 0
    failed: list[int] = []
    with Pool(jobs) as pool:
        run = partial(run_life, folder, ends_at_failure)
        for seed, failure, evaluation_count, step_count in pool.imap_unordered(run, seeds):
            lives += step_count > 0
            evaluations += evaluation_count
            steps += step_count
            if failure:
                failed.append(seed)
                print(f"life {seed}: {failure}", flush=True)
        pool.close()
        pool.join()
    seconds = time.monotonic() - began
    print(
        f"{lives} lives, {evaluations} evaluations and {steps} steps in {seconds:.0f} s; "
        f"{len(failed)} failed"
    )
    if failed:
        print(f"To repeat the first: python -m tests.simulator --show {min(failed)}")
    return int(bool(failed))


def run_life(folder: Path, ends_at_failure: bool, seed: int) -> tuple[int, str, int, int]:
    """Run a life. Return its seed, the violation or "", and its evaluations and steps.

    After a failure of another life, it does not begin if `ends_at_failure` is true.
    """
    failure_mark = folder / "failed"
    if ends_at_failure and failure_mark.exists():
        return seed, "", 0, 0
    own_folder = folder / str(seed)
    own_folder.mkdir()
    life = Life(seed, own_folder)
    failure = _find_violation(life)
    shutil.rmtree(own_folder)
    if failure:
        failure_mark.touch()
    return seed, failure.partition("\n")[0], life.evaluations, life.switches


def show_life(seed: int, folder: Path) -> int:
    """Run a life, and print what happened; return 1 after a violation."""
    life = Life(seed, folder)
    failure = _find_violation(life)
    for path in sorted(folder.glob("output-?")):
        print(f"--- session {path.name.removeprefix('output-')}")
        print(path.read_text(errors="replace"))
    print("\n".join(life.log))
    print(failure or "Nothing is wrong.")
    return int(bool(failure))


def _find_violation(life: Life) -> str:
    try:
        life.run()
    except ViolationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
