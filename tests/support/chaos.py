"""Find all processes of an MPI job, and kill or suspend them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launch import Mpi
from tests.support.limits import scale
from tests.support.template_server import start_template_server

MARK = "HPO_TEST_JOB"
_MAX_NAME_CHARACTERS = 15  # of the name of a process; Linux cuts longer names.


@dataclass
class Victim:
    """A running MPI job, some of whose processes a test kills or suspends.

    Its output goes to `log`. Each of its processes has `mark` in its environment or as its name, by
    which it is found.
    """

    mpi: Mpi
    ranks: int
    arguments: list[object]
    folder: Path
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    job: subprocess.Popen[str] = field(init=False)
    # The process that forks its templates, or 0.
    _template_server: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.mpi.forks_templates:
            self._template_server = start_template_server().process
        with self.log.open("a") as out:
            self.job = self.mpi.start(
                self.ranks,
                *self.arguments,
                cwd=self.folder,
                stdout=out.fileno(),
                **{**self.variables, MARK: self.mark},
            )

    def find_processes(self) -> dict[int, str]:
        """Return the running processes of the job and their command lines."""
        return find_marked_processes(self.mark)

    def find_ranks(self) -> list[int]:
        """Return the processes that are ranks, without the processes that ranks have started."""
        pythons = [
            pid
            for pid, command in self.find_processes().items()
            if Path(command.split("\0")[0]).name[:6] == "python"
        ]
        # A process that has just ended has no parent.
        others = (0, *pythons, self._template_server)
        return [pid for pid in pythons if _find_parent(pid) not in others]

    def find_templates(self) -> list[int]:
        """Return the processes from which trainers are forked.

        These are the Python processes that ranks or the template server have started.
        """
        parents = (*self.find_ranks(), self._template_server)
        return [
            pid
            for pid, command in self.find_processes().items()
            if "python" in command and _find_parent(pid) in parents
        ]

    def find_trainers(self) -> list[int]:
        """Return the trainers, without the processes that trainers have started."""
        templates = self.find_templates()
        return [pid for pid in self.find_processes() if _find_parent(pid) in templates]

    def kill(self, part: str, chance: random.Random) -> str:
        """Kill processes of the job, and return a description.

        Args:
            part: "rank", "trainer" or "template" to kill one process of this kind, "mpirun", or
                "all" to kill all processes.
            chance: The random number generator that chooses the process.
        """
        processes = self.find_processes()
        choices = {
            "rank": self.find_ranks,
            "trainer": self.find_trainers,
            "template": self.find_templates,
        }
        chosen = {"mpirun": [self.job.pid], "all": list(processes)}.get(part) or choices[part]()
        if part in choices:
            chosen = [chance.choice(sorted(chosen))] if chosen else []
        if part == "rank":
            chosen = chosen or [self.job.pid]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{part} ({len(chosen)} of {len(processes)} processes)"

    def suspend(self, seconds: float) -> bool:
        """Suspend all processes for `seconds`. Return False if the job had already ended."""
        processes = [pid for pid in self.find_processes() if pid != os.getpid()]
        if self.job.poll() is not None:
            return False
        for signal_, order in ((signal.SIGSTOP, 1), (signal.SIGCONT, -1)):
            for pid in processes[::order]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal_)
            time.sleep(seconds if signal_ == signal.SIGSTOP else 0.0)
        return True

    def wait_for(self, text: str, seconds: float = 60) -> bool:
        """Wait until the job has printed `text`.

        Return False if the job ends without printing it.
        """
        end = time.monotonic() + scale(seconds)
        while text not in self.log.read_text():
            assert time.monotonic() < end, f"no {text!r} in {self.log.read_text()}"
            if self.job.poll() is not None:
                return False
            time.sleep(0.01)
        return True

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, or less if the job ends."""
        end = time.monotonic() + seconds
        while self.job.poll() is None and time.monotonic() < end:
            time.sleep(0.01)

    def wait(self, seconds: float = 60, seconds_to_end: float = 10) -> tuple[int, str]:
        """Wait for mpirun and all processes of the job.

        Return the status of mpirun and its standard error.
        """
        _, errors = self.job.communicate(timeout=scale(seconds))
        end = time.monotonic() + scale(seconds_to_end)
        while self.find_processes():
            assert time.monotonic() < end, f"left behind: {self.find_processes()}"
            time.sleep(0.05)
        return self.job.returncode, errors


@contextmanager
def kill_at_end(victim: Victim) -> Iterator[Victim]:
    """Kill the remaining processes of a job at the end of `with`, and wait for mpirun."""
    try:
        yield victim
    finally:
        for pid in victim.find_processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        victim.job.communicate(timeout=scale(20))


def find_children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [child for child in read_command_lines() if _find_parent(child) == pid]


def _find_parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def read_command_lines() -> dict[int, str]:
    """Return the command line of each process by its id.

    Each word is followed by a null character. The text of an ended process is empty.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
    return found


def list_open_files(process: int) -> list[str]:
    """Return the name of each open file of a process."""
    names = []
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # It has just been closed.
            names.append(str(file.readlink()))
    return names


def find_marked_processes(mark: str) -> dict[int, str]:
    found = {}
    for pid, command in read_command_lines().items():
        with suppress(OSError):
            is_named = Path(f"/proc/{pid}/comm").read_text().strip() == mark[:_MAX_NAME_CHARACTERS]
            if command and (
                is_named or f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
            ):
                found[pid] = command
    return found
