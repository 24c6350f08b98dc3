"""Lose nodes of a simulated cluster, run a search through many jobs, and start many ranks.

`make cluster-soak` runs it. It prints what it has measured.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import time
from pathlib import Path

from tests.cluster.conftest import make_cluster
from tests.cluster.job_results import PMI, read_documented_script, read_summary, shorten
from tests.cluster.simulation import NODES, SlurmCluster, find_missing_requirement, wait_until
from tests.support.run_output import parse_lines

_SECONDS_TO_CONTINUE = 150  # until the next result after a node is lost
_RANKS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=10, help="nodes that are lost during a run of 60 evaluations"
    )
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="seconds of an evaluation of this run"
    )
    parser.add_argument(
        "--starts", type=int, default=4, help="starts of 48 ranks, on three nodes and on one"
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="seed of the random kills"
    )
    arguments = parser.parse_args()
    if missing := find_missing_requirement():
        parser.exit(1, f"{missing}\n")
    print(f"seed {arguments.seed}", flush=True)
    measure_lost_nodes(random.Random(arguments.seed), arguments.kills, arguments.seconds)
    run_through_jobs()
    measure_starts(arguments.starts)


def measure_lost_nodes(chance: random.Random, kills: int, seconds: float) -> None:
    """Kill random nodes at random moments during the documented job script.

    A node is back after 5 to 35 s.
    """
    with make_cluster() as cluster:
        began = time.monotonic()
        cluster.submit(shorten(read_documented_script("clusters.md"), 60, seconds), **PMI)
        back_at: dict[str, float] = {}
        waits: list[float] = []
        while len(waits) < kills and cluster.list_jobs():
            _wait_for_results(cluster, 1, back_at)
            _pass_time(cluster, chance.uniform(0, 15), back_at)
            if not cluster.list_jobs():
                break
            node = chance.choice([name for name in NODES if name not in back_at])
            done, killed_at = len(parse_lines(cluster.read_output())), time.monotonic()
            cluster.kill_node(node)
            back_at[node] = killed_at + chance.uniform(5, 35)
            _wait_for_results(cluster, done + 1, back_at)
            waits.append(time.monotonic() - killed_at)
            print(
                f"{node} was lost after {done} results; the next result came {waits[-1]:.0f} s "
                "later",
                flush=True,
            )
        _pass_time(cluster, 0, back_at)
        while cluster.list_jobs():
            assert time.monotonic() < began + 3600
            _pass_time(cluster, 1, back_at)
        evaluations = read_summary(cluster.folder / "runs" / "my_search")
        print(
            f"{len(waits)} lost nodes in {time.monotonic() - began:.0f} s: {evaluations}\n",
            flush=True,
        )
        assert (evaluations["complete"], evaluations["failed"]) == (60, 0)


def _wait_for_results(cluster: SlurmCluster, count: int, back_at: dict[str, float]) -> None:
    """Wait until the job has printed `count` results or has ended, and start lost nodes."""
    end = time.monotonic() + _SECONDS_TO_CONTINUE
    while len(parse_lines(cluster.read_output())) < count and cluster.list_jobs():
        assert time.monotonic() < end, (
            f"{cluster.list_jobs()}\n{cluster.read_output()}\n{cluster.read_logs()}"
        )
        _pass_time(cluster, 0.5, back_at)


def _pass_time(cluster: SlurmCluster, seconds: float, back_at: dict[str, float]) -> None:
    end = time.monotonic() + seconds
    while True:
        for name in [name for name, at in back_at.items() if time.monotonic() >= at]:
            del back_at[name]
            cluster.start_node(name)
        if time.monotonic() >= end:
            return
        time.sleep(0.2)


def run_through_jobs() -> None:
    """Run the documented job script, with a time limit of a minute, until its budget is spent."""
    with make_cluster() as cluster:
        began = time.monotonic()
        script = read_documented_script("clusters.md").replace("USR1@120", "USR1@40")
        cluster.submit(shorten(script, 75, seconds=4), SBATCH_TIMELIMIT="1", **PMI)
        output = cluster.wait_for_jobs(1200)
        jobs = len(re.findall(r"my_search: 75 evaluations on 12 ranks", output))
        evaluations = read_summary(cluster.folder / "runs" / "my_search")
        print(
            f"{jobs} jobs with a time limit, in {time.monotonic() - began:.0f} s: {evaluations}\n",
            flush=True,
        )
        assert jobs >= 6
        assert evaluations["complete"] == 75


def measure_starts(count: int) -> None:
    """Compare the time until the first result of 48 ranks, on three nodes and on one."""
    options = {
        3: ["--nodes=3", f"--ntasks-per-node={_RANKS // 3}"],
        1: ["--nodes=1", "--overcommit"],
    }
    times: dict[int, list[float]] = {nodes: [] for nodes in options}
    with make_cluster() as cluster:
        for _ in range(count):
            for nodes, given in options.items():
                search = [
                    "hpo",
                    "search",
                    "my_search.py",
                    "--evaluations",
                    24,
                    "--set",
                    "seconds=0",
                ]
                srun = ["srun", "--mpi=pmi2", f"--ntasks={_RANKS}", *given]
                times[nodes].append(_time_first_result(cluster, [*srun, *search]))
                wait_until(lambda: not cluster.list_jobs(), 100)
    middle = {nodes: statistics.median(several) for nodes, several in times.items()}
    print(
        f"{_RANKS} ranks: first result after {middle[3]:.1f} s on three nodes, {middle[1]:.1f} s "
        f"on one (medians of {count}): {middle[3] / middle[1]:.2f} times",
        flush=True,
    )


def _time_first_result(cluster: SlurmCluster, command: list[object]) -> float:
    began = time.monotonic()
    output = Path(cluster.folder / "controller.out")
    offset = len(output.read_text()) if output.exists() else 0
    process: subprocess.Popen[bytes] = cluster.start(*command, on="controller")
    wait_until(lambda: bool(parse_lines(output.read_text()[offset:])), 100, output.read_text)
    seconds = time.monotonic() - began
    assert process.wait(100) == 0, output.read_text()
    return seconds


if __name__ == "__main__":
    main()
