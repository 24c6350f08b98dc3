"""Help tests of `hpo watch`: snapshots, run directories, and commands in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.results.run_snapshot import RunSnapshot
from hpo.run.session import Session
from hpo.store.evaluations import Evaluation
from hpo.trainer.search_file import load_search_file
from tests.support.launch import ROOT
from tests.support.limits import scale
from tests.support.runs import QUICK, claim_evaluation, make_manifest, start_session

PARAMS = {"depth": 1, "act": "relu", "flag": True, "lr": 0.1}
HOLDER_CODE = """
import sys
from pathlib import Path
from hpo.store.run_dir import RunDir
with RunDir(Path(sys.argv[1])).hold_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def make_snapshot(evaluations: list[Evaluation], at: float = 200.0, **values: Any) -> RunSnapshot:
    """Return a snapshot (state at one time) of an active run.

    The keyword argument `manifest_values` replaces fields of its manifest. All others replace
    fields of the snapshot.
    """
    run = make_manifest(**{"budget": 100, **values.pop("manifest_values", {})})
    return RunSnapshot(
        **{
            "taken_at": at,
            "manifest": run,
            "evaluations": evaluations,
            "confirmations": [],
            "is_in_use": True,
            **values,
        }
    )


def record_evaluation(session: Session, number: int, losses: int = 1, budget: int = 9) -> None:
    """Record an evaluation with a number of losses.

    It runs if it has one loss, and is complete if it has more.
    """
    record, distributions = (
        session.open_record(),
        load_search_file(QUICK).space.make_distributions(),
    )
    place = {"island": number % 2, "worker": 0, "generation": 0}
    assignment = claim_evaluation(
        record, {**PARAMS, "depth": number}, distributions, budget, **place
    )
    for epoch in range(losses):
        record.report(assignment, epoch + 1, 1.0 / number)
    if losses > 1:
        record.complete(assignment, 1.0 / number, 1.0, {"accuracy": 0.5})


def set_budget(path: Path, budget: int) -> None:
    """Change the number of evaluations in the run.json of a run."""
    run_json = path / "run.json"
    run_json.write_text(json.dumps({**json.loads(run_json.read_text()), "budget": budget}))


def make_finished_run(path: Path, budget: int = 5) -> None:
    """Make a run directory whose evaluations are all complete."""
    session = start_session(path)
    set_budget(path, budget)
    for number in range(1, budget + 1):
        record_evaluation(session, number, losses=2)


@contextmanager
def hold_run_dir(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Lock a run directory by another process, which the code in ``with`` may kill."""
    command, pipe = [sys.executable, "-c", HOLDER_CODE, str(run_dir)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
        process.wait(timeout=scale(20))


def make_light_command(*arguments: object) -> list[str]:
    """Return a command line that runs hpo, and fails if hpo imports torch, mpi4py or propulate."""
    # A terminal on standard input becomes the controlling terminal of the process, so that Ctrl-C
    # reaches it.
    code = "import fcntl, os, sys, termios\n"
    code += "if os.isatty(0): fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code += "from hpo.cli import main\n"
    code += "try: main()\n"
    code += "finally: assert not {'torch', 'mpi4py', 'propulate'} & sys.modules.keys()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment variables of a terminal with colours, with some of them changed."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    return {**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}


@dataclass
class Terminal:
    """A process in a terminal of 80 columns and 24 lines.

    `written` is the output that was read so far.
    """

    process: subprocess.Popen[bytes]
    terminal: int
    slave: int
    before: list[Any]
    written: str = ""

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until the process writes `text`. Output before this call does not count."""
        end = time.monotonic() + scale(seconds)
        start = len(self.written)
        while text not in self.written[start:]:
            assert time.monotonic() < end, f"no {text!r} in {self.written[start:][-2000:]!r}"
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.written += os.read(self.terminal, 65536).decode(errors="replace")
            else:
                assert self.process.poll() is None, (
                    f"ended without {text!r}: {self.written[start:]!r}"
                )

    def press(self, keys: bytes) -> None:
        """Send keys to the process, as if a user pressed them."""
        os.write(self.terminal, keys)

    def wait_for_end(self) -> int:
        """Wait for the end, check that the terminal is restored, and return the status."""
        end = time.monotonic() + scale(30)
        while self.process.poll() is None or select.select([self.terminal], [], [], 0)[0]:
            assert time.monotonic() < end, self.written[-2000:]
            if select.select([self.terminal], [], [], 0.05)[0]:
                self.written += os.read(self.terminal, 65536).decode(errors="replace")
        assert termios.tcgetattr(self.slave) == self.before
        for taken, given_back in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert self.written.rfind(taken) <= self.written.rfind(given_back)
        return int(self.process.returncode)

    @property
    def takes_keys(self) -> bool:
        """Whether the process reads keys one by one, without echo."""
        return not termios.tcgetattr(self.slave)[3] & (termios.ICANON | termios.ECHO)

    @property
    def left_behind(self) -> str:
        """The output after the process has closed its full-screen view."""
        return self.written.rpartition("\x1b[?1049l")[2]


@contextmanager
def run_in_terminal(*arguments: object, **variables: str) -> Iterator[Terminal]:
    """Run `hpo` in a terminal, and kill it at the end of ``with``."""
    terminal, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        make_light_command(*arguments),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=make_environment(**variables),
        start_new_session=True,
    )
    try:
        yield Terminal(process, terminal, slave, before)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(slave)
