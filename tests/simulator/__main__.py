"""Simulate the lives of many runs, and print those that do what a run must not do.

Run it as `python -m tests.simulator --lives 1000`. A life depends on its seed alone:
`python -m tests.simulator --show SEED` repeats it, and prints what happened.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from multiprocessing.pool import Pool

from tests.simulator import mpi

mpi.install()  # before hpo is imported

# Sessions import these when they need them. Here they are imported once.
import hpo.run.leader_stages  # noqa: E402
import hpo.views.summary_tables  # noqa: E402, F401
from tests.simulator.life import Life, ViolationError, begin_life  # noqa: E402
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
    if arguments.show is not None:
        sys.exit(show_life(arguments.show))
    if arguments.mutants:
        sys.exit(run_mutants(arguments.lives, arguments.jobs))
    seeds = range(arguments.first, arguments.first + arguments.lives)
    sys.exit(run_lives(seeds, arguments.jobs, arguments.until_failure))


def run_lives(seeds: range, jobs: int, ends_at_failure: bool) -> int:
    """Run lives, print the failures and a summary, and return the number of failures."""
    began = time.monotonic()
    lives = evaluations = steps = 0
    failed: list[int] = []
    with Pool(jobs) as pool:
        results: Iterable[tuple[int, str, int, int]] = pool.imap_unordered(run_life, seeds)
        for seed, failure, evaluation_count, step_count in results:
            lives += 1
            evaluations += evaluation_count
            steps += step_count
            if failure:
                failed.append(seed)
                print(f"life {seed}: {failure}", flush=True)
                if ends_at_failure:
                    break
    seconds = time.monotonic() - began
    print(
        f"{lives} lives, {evaluations} evaluations and {steps} steps in {seconds:.0f} s; "
        f"{len(failed)} failed"
    )
    if failed:
        print(f"To repeat the first: python -m tests.simulator --show {min(failed)}")
    return len(failed)


def run_life(seed: int) -> tuple[int, str, int, int]:
    """Run a life. Return its seed, the violation or "", and its evaluations and steps."""
    with begin_life(seed) as life:
        failure = _find_violation(life)
        return seed, failure.partition("\n")[0], life.evaluations, life.switches


def show_life(seed: int) -> int:
    """Run a life, and print what happened; return 1 after a violation."""
    with begin_life(seed) as life:
        failure = _find_violation(life)
        for path in sorted(life.folder.glob("output-?")):
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
