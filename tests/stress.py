"""Run all tests several times in random order, while other processes use all cores.

Print the failures. `make test-stress` runs it. Further arguments are passed to pytest.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often all tests run")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="seed of the orders"
    )
    arguments, options = parser.parse_known_args()
    failures: Counter[str] = Counter()
    for run in range(arguments.runs):
        seed = arguments.seed + run
        failed, result = run_tests(seed, options)
        failures.update(failed)
        print(
            f"run {run + 1} of {arguments.runs}, --random-order-seed={seed}: {result}", flush=True
        )
    for test, count in failures.most_common():
        print(f"failed {count} of {arguments.runs}  {test}")
    sys.exit(bool(failures))


def run_tests(seed: int, options: Sequence[str]) -> tuple[list[str], str]:
    """Run the tests once. Return the tests that failed, and pytest's last line."""
    with burden_cores(), tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        order = ["--random-order", f"--random-order-seed={seed}"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--numprocesses=4",
            "--dist=worksteal",
            f"--junitxml={report}",
            *order,
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        last = (done.stdout.splitlines() or [""])[-1].strip("= ")
        if done.returncode not in (0, 1) or not report.exists():
            sys.exit(f"pytest has not run:\n{done.stdout}{done.stderr}")
        cases = xml.etree.ElementTree.parse(report).iter("testcase")
        failed = [
            case
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
        for case in failed:
            print("".join(part.text or "" for part in case), flush=True)
        return [f"{case.get('classname')}::{case.get('name')}" for case in failed], last


@contextmanager
def burden_cores() -> Iterator[None]:
    """Run one busy process per core inside `with`."""
    program = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(program) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
