"""Damage run directories, kill runs at random times, and measure recoveries.

`make soak` runs it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.searches.dying import CRASHES
from tests.support.endurance import (
    WAYS,
    Tally,
    measure_crash_recovery,
    measure_failure_recovery,
    measure_slowdown,
    survive,
    suspend_run,
)
from tests.support.fuzz import fuzz_runs
from tests.support.launch import list_available_mpis
from tests.support.saving import kill_and_resume
from tests.support.sharing import WAYS as SHARED
from tests.support.sharing import measure_worst_recovery


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="runs that are killed")
    parser.add_argument("--suspended", type=int, default=6, help="runs that are suspended")
    parser.add_argument(
        "--damages", type=int, default=1000, help="run directories that are damaged"
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the random kills"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    mpis = list_available_mpis()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcome = fuzz_runs(folder / "fuzz", arguments.seed, arguments.damages)
        print(
            f"{arguments.damages} damaged run directories: {outcome['read']} times read, "
            f"{outcome['refused']} times refused; {outcome['resumed']} resumed, "
            f"{outcome['resume refused']} refused; no other outcome\n"
        )
        total = Tally()
        for run in range(arguments.runs):
            mpi = mpis[run % len(mpis)]
            print(f"run {run + 1} of {arguments.runs}, {mpi.mpirun}", flush=True)
            chance, slow = random.Random(arguments.seed + run), 0.005 * (run // len(mpis) % 2)
            tally = survive(
                mpi, folder / f"run{run}", chance, budget=60, most_kills=4, seconds_of_files=slow
            )
            for field, value in vars(tally).items():
                setattr(total, field, getattr(total, field) + value)
        print(
            f"{arguments.runs} runs, every other one with 5 ms more for each file operation: "
            f"{total.kills} kills, {total.resumes} resumes, {total.finished} evaluations "
            f"finished, {total.repeated} of them repeated after a kill, {total.lost} lost; the "
            f"journal was read {total.readings} times in the meantime\n{total.trainers} trainers "
            f"and {total.templates} templates were killed, too: {total.failed} evaluations failed "
            "because of it\n"
        )
        survival = kill_and_resume(
            mpis[0], folder / "saving", random.Random(arguments.seed), kills=arguments.runs * 2
        )
        print(
            "12 evaluations of 80 epochs, each of 0.2 s, on 2 workers, saved every second: "
            f"{survival.kills} kills; {survival.given_up} evaluations given up, after three kills "
            "before any progress; all losses are those of a run that was not killed; "
            f"{survival.again} epochs trained again, "
            f"{0.2 * survival.again / 2 / max(1, survival.kills):.2f} s of each worker for a "
            "kill\n",
            flush=True,
        )
        evaluations, stopped = 0, 0.0
        for run in range(arguments.suspended):
            chance = random.Random(arguments.seed + run)
            more, seconds = suspend_run(
                mpis[run % len(mpis)], folder / f"suspended{run}", chance, stops=4
            )
            evaluations, stopped = evaluations + more, stopped + seconds
        print(
            f"{arguments.suspended} suspended runs, 3 s for ranks to wait: stopped for "
            f"{stopped:.0f} s in all; {evaluations} evaluations complete, 0 failed\n"
        )
        print(
            "worst recovery, seconds     "
            + "".join(f"{size} rank{'s' if size > 1 else ''}".rjust(9) for size in (1, 2, 3))
        )
        times = [
            measure_failure_recovery(mpis[0], size, folder / f"recovery{size}")
            for size in (1, 2, 3)
        ]
        for way in WAYS:
            print(
                f"{way:28}"
                + "".join(
                    f"{of_size[way]:9.2f}" if way in of_size else "        -" for of_size in times
                )
            )
        crashes = [
            measure_crash_recovery(mpis[0], size, folder / f"crashes{size}") for size in (1, 2, 3)
        ]
        for way in CRASHES:
            print(f"{'crash: ' + way:28}" + "".join(f"{of_size[way]:9.2f}" for of_size in crashes))
        times += crashes
        for way in SHARED:
            shared = [
                measure_worst_recovery(mpis[0], way, size, folder / f"{way}{size}")
                for size in (2, 3)
            ]
            times.append({way: max(shared)})
            print(
                f"{way + ', at any line':28}        -"
                + "".join(f"{seconds:9.2f}" for seconds in shared)
            )
        worst = max(max(of_size.values()) for of_size in times)
        print(f"{'worst':28}{worst:9.2f}\n")
        well, ill, states = measure_slowdown(mpis[0], folder / "slowdown")
        print(
            f"60 evaluations on 8 ranks: {well:.1f} s; with every third failing {ill:.1f} s, "
            f"{ill / well:.2f} times ({states['COMPLETE']} complete, {states['FAIL']} failed)"
        )
        sys.exit(worst > 2.0 or ill > 2 * well)


if __name__ == "__main__":
    main()
