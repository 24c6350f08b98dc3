"""Which git commit a file is at: git is asked, and writes nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SECONDS_TO_ANSWER = 5.0  # for git to answer, also about a large repository on a slow file system
_GIT_OPTIONS = (
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
)  # else git may write, and start a process that stays
_STATUS_COMMAND = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
)  # variables that name another repository, as in a hook


@dataclass(frozen=True)
class Commit:
    """The commit that a repository is at; `dirty` tells whether files that git knows have changed since."""

    id: str
    dirty: bool

    def __str__(self) -> str:
        return self.id[:7] + (" with uncommitted changes" if self.dirty else "")


def find_commit(path: Path) -> Commit | None:
    """Return the commit of the repository that a file lies in; None where there is none, or git does not tell it."""
    git = shutil.which("git")
    lines = _read_output_lines([git, *_GIT_OPTIONS, *_STATUS_COMMAND], path.resolve().parent) if git else []
    found = [match[1] for match in (re.fullmatch("# branch.oid ([0-9a-f]{40,64})", line) for line in lines) if match]
    return Commit(found[0], any(not line.startswith("#") for line in lines)) if found else None


def _read_output_lines(command: list[str], folder: Path) -> list[str]:
    """Return what a command prints; nothing where it fails or takes too long."""
    environment = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that it can be ended with all processes that it starts
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return []
    try:
        output, _ = process.communicate(timeout=_SECONDS_TO_ANSWER)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # git cannot end while its file system hangs
            process.communicate(timeout=1)
        if isinstance(error, subprocess.TimeoutExpired):
            return []
        raise
    return output.splitlines() if process.returncode == 0 else []
