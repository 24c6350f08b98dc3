"""Ask SLURM about a job, and start small job steps."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_SECONDS_PER_COMMAND = 20.0


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
    variables = {
        name: value
        for name, value in environment.items()
        if name in kept or not name.startswith("SLURM_")
    }
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def read_output(command: Sequence[str]) -> str:
    """Return the standard output of a command; an empty text if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_SECONDS_PER_COMMAND
        )
        return done.stdout
    return ""
