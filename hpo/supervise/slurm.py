"""Ask SLURM about a job, start small job steps, and requeue a job whose batch host is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

_SECONDS_PER_COMMAND = 20.0
_SECONDS_TO_CHANGE = 60.0  # to requeue or cancel a job
_SECONDS_BETWEEN_CHECKS = 15.0
_SECONDS_TO_END = 10.0
_MAX_REQUEUES = 20


def expand_nodes(text: str) -> list[str]:
    """Return the nodes in a text of SLURM such as ``n[1-3]``; [] if it is empty or not valid."""
    if not text.strip():
        return []
    return read_output(["scontrol", "show", "hostnames", text.strip()]).split()


def expand_counts(text: str) -> list[int]:
    """Return the numbers in a text of SLURM such as ``4(x2),1``."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]


def make_small_step(node: str) -> list[str]:
    """Return the start of a command that runs one process on a node of the job.

    The process runs next to other job steps. Start the command with `start_silently`.
    """
    options = ["--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--mem=0"]
    return ["srun", *options, f"--nodelist={node}"]


def start_silently(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command without input and output, and without the options of the job script.

    srun reads these options, such as the GPUs per task, from variables. A small step must have none
    of them.
    """
    kept = ("SLURM_CONF", "SLURM_JOB_ID")
    hidden = {name for name in environment if name.startswith("SLURM_") and name not in kept}
    return subprocess.Popen(
        command,
        env={name: value for name, value in environment.items() if name not in hidden},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def read_output(command: Sequence[str], timeout: float = _SECONDS_PER_COMMAND) -> str:
    """Return the standard output of a command; an empty text if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=timeout,
        ).stdout
    return ""


class BatchHostGuard:
    """Keeps a job step on another node, which requeues the job if the batch host is lost.

    The batch host is the node that runs the job script. With ``sbatch --no-kill``, a job keeps its
    other nodes if a node is lost. If that is the batch host, the job script is lost too, but SLURM
    22.05 does not notice: the job keeps its nodes, without any process, until its time limit.

    The environment variables are those of the job script.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._job = environment.get("SLURM_JOB_ID", "")
        self._own = environment.get("SLURMD_NODENAME", "")
        self._step: subprocess.Popen[bytes] | None = None

    def end(self) -> None:
        """End the step."""
        if self._step is not None:
            self._step.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._step.wait(_SECONDS_TO_END)
            self._step.kill()
            self._step.wait()

    def restart(self, missing: Sequence[str]) -> None:
        """Restart the step on a node that is not missing. Without a job script, do nothing."""
        self.end()
        nodes: list[str] = []
        if self._job and self._own:
            nodes = expand_nodes(self._environment.get("SLURM_JOB_NODELIST", ""))
        others = [node for node in nodes if node != self._own and node not in missing]
        if others:
            command = [*make_small_step(others[-1]), sys.executable, "-m", __name__, self._job]
            self._step = start_silently(command, self._environment)


def is_batch_host_lost(job: str) -> bool:
    """Return whether SLURM has removed the batch host of a job. False if SLURM does not answer."""
    squeue = ["squeue", "--noheader", f"--jobs={job}", "--format=%T|%N|%B"]
    state, nodes, batch_host = [*read_output(squeue).strip().split("|"), "", ""][:3]
    listed = expand_nodes(nodes) if state == "RUNNING" else []
    return bool(listed and batch_host) and batch_host not in listed


def main() -> None:
    """Wait until the batch host is lost. Then requeue the job, or cancel it if that fails."""
    # SLURM sends it to all steps before the end of the job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    job = sys.argv[1]
    while not is_batch_host_lost(job):
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    for _ in range(_MAX_REQUEUES):  # The controller may be busy. A requeue ends this step.
        read_output(["scontrol", "requeue", job], _SECONDS_TO_CHANGE)
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    read_output(["scancel", job], _SECONDS_TO_CHANGE)


if __name__ == "__main__":
    main()
