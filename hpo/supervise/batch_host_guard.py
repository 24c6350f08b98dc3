"""Requeue a SLURM job whose batch host (the node that runs the job script) is lost.

With ``sbatch --no-kill``, a job keeps its other nodes if a node is lost. If that is the batch host,
the job script is lost too, but SLURM 22.05 does not notice: the job keeps its nodes, without any
process, until its time limit. So a small job step on another node watches the batch host.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpo.supervise.slurm import expand_nodes, make_small_step, read_output, start_silently

_SECONDS_BETWEEN_CHECKS = 15.0
_SECONDS_TO_END = 10.0
_SECONDS_PER_COMMAND = 60.0
_MAX_REQUEUES = 20


class BatchHostGuard:
    """Keeps a job step on another node, which requeues the job if the batch host is lost.

    Use it as a context manager: the step ends with it.

    Args:
        environment: The environment variables of the job script.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._job = environment.get("SLURM_JOB_ID", "")
        self._own = environment.get("SLURMD_NODENAME", "")
        self._step: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BatchHostGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._step is not None:
            self._step.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._step.wait(_SECONDS_TO_END)
            self._step.kill()
            self._step.wait()

    def restart(self, missing: Sequence[str]) -> None:
        """Restart the step on a node that is not missing. Without a job script, do nothing."""
        self._end()
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
        _run(["scontrol", "requeue", job])
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    _run(["scancel", job])


def _run(command: Sequence[str]) -> None:
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, check=False, timeout=_SECONDS_PER_COMMAND)


if __name__ == "__main__":
    main()
