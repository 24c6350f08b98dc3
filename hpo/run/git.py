"""Find the git commit of a file, without changes to the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SECONDS_TO_ANSWER = 5.0  # enough for a large repository on a slow file system
# Without these options, git may write to the repository, and start a process that stays.
_GIT_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
_STATUS_COMMAND = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # In a git hook, they name another repository.


@dataclass(frozen=True)
class Commit:
    """A commit of a repository."""

    id: str
    """The hash in hexadecimal digits."""
    dirty: bool
    """Whether tracked files have changed since this commit."""

    def __str__(self) -> str:
        return self.id[:7] + (" with uncommitted changes" if self.dirty else "")


def find_commit(path: Path) -> Commit | None:
    """Return the commit of the repository that contains a file; None if no repository contains it, or if git fails."""
    git = shutil.which("git")
    lines = _read_output_lines([git, *_GIT_OPTIONS, *_STATUS_COMMAND], path.resolve().parent) if git else []
    found = [match[1] for match in (re.fullmatch("# branch.oid ([0-9a-f]{40,64})", line) for line in lines) if match]
    return Commit(found[0], any(not line.startswith("#") for line in lines)) if found else None


def _read_output_lines(command: list[str], folder: Path) -> list[str]:
    """Return the lines that a command prints, or [] if it fails or takes too long."""
    environment = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # The command and all processes that it starts can then be killed together.
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
        with suppress(subprocess.TimeoutExpired):  # git cannot end while its file system hangs.
            process.communicate(timeout=1)
        if isinstance(error, subprocess.TimeoutExpired):
            return []
        raise
    return output.splitlines() if process.returncode == 0 else []
