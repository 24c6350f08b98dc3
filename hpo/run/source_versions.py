"""Keep a copy of the search file of each session, and describe its changes."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from hpo.problem import SearchDescription
from hpo.script_objective import Script
from hpo.store.manifest import SEARCH_FILE_PATTERN, SessionEntry
from hpo.store.run_dir import RunDir, write_atomically
from hpo.text_format import cut_text, format_count, format_list, make_printable

_MOST_DIFFERENCE_LINES = 10  # The user should notice a difference, not review it.
_SECONDS_TO_ANSWER = 5.0  # enough for a large repository on a slow file system
# Without these options, git may write to the repository, and start a process that stays.
_GIT_OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false")
_STATUS_COMMAND = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
# In a git hook, they name another repository.
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


@dataclass(frozen=True)
class Commit:
    """A commit of a repository."""

    id: str
    """The hash in hexadecimal digits."""
    dirty: bool
    """Whether tracked files have changed since this commit."""

    def __str__(self) -> str:
        return self.id[:7] + (" with uncommitted changes" if self.dirty else "")


def keep_source(
    run_dir: RunDir, search: SearchDescription, earlier: Sequence[SessionEntry], started: str
) -> SessionEntry:
    """Copy the search file that was imported; return the session's entry for run.json."""
    kept = _keep_copy(run_dir, search.source, earlier)
    program = hash_program(search.script) if search.script is not None else {}
    entry = SessionEntry(started, kept.name, search.sha256, program=program)
    if commit := find_commit(search.location):
        entry = replace(entry, commit=commit.id, dirty=commit.dirty)
    return entry


def describe_source_changes(
    run_dir: RunDir, search: SearchDescription, earlier: Sequence[SessionEntry], now: SessionEntry
) -> list[str]:
    """Return lines about changes of the search file or its repository since the last session."""
    if not earlier:
        return []
    before = earlier[-1]
    program = _describe_program_changes(before.program, now.program)
    if before.sha256 != now.sha256:
        is_made = search.script is not None and str(search.path) == str(Path(search.script.name))
        subject = "the search on the command line" if is_made else str(search.path)
        files = ", ".join(dict.fromkeys(session.file for session in earlier))
        difference, lines = _describe_difference(
            search, before.sha256, run_dir.path / before.file, now.file
        )
        return [
            *program,
            f"{subject} has changed since the last session{difference}; earlier evaluations "
            f"used {files} in {run_dir.path}: losses may not be comparable",
            *lines,
        ]
    if program or before.commit is None or now.commit is None:
        return program
    commit_before = Commit(before.commit, bool(before.dirty))
    commit_now = Commit(now.commit, bool(now.dirty))
    if commit_before == commit_now:
        return []
    return [
        f"{search.path} has not changed, but its repository was at commit {commit_before} before, "
        f"and is at {commit_now} now: imported modules may differ"
    ]


class _LocalModuleFinder(ModuleFinder):
    """Finds modules, but none in folders without __init__.py, for which ModuleFinder crashes.

    Such a folder may hold the output of a package of the same name, such as wandb.
    """

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except (AttributeError, TypeError) as error:
            raise ImportError(name) from error


def hash_program(script: Script) -> dict[str, str]:
    """Return the checksums of a Python program and of the modules next to it that it imports.

    They are given by their paths from the program's folder, or from the working directory for a
    module. The result is empty for a command that is not a Python file or module.
    """
    path = Path(script.command[0]).resolve()  # Python imports from its folder without links.
    folder = path.parent
    if script.command[0] == "-m":
        folder = Path.cwd()
        path = folder / f"{script.command[1].replace('.', '/')}.py"
    if path.suffix != ".py":
        return {}
    finder = _LocalModuleFinder([str(folder)])  # It finds no other modules, and runs none.
    # The evaluations will say what is wrong with the program.
    with warnings.catch_warnings(), suppress(OSError, SyntaxError, ValueError):
        warnings.simplefilter("ignore")
        finder.run_script(str(path))
    found = (module.__file__ for module in finder.modules.values())  # type: ignore[attr-defined]
    files = {Path(file) for file in found if file}
    sources = {os.path.relpath(file, folder): _read_bytes(file) for file in sorted({path, *files})}
    return {
        name: hashlib.sha256(source).hexdigest()
        for name, source in sources.items()
        if source is not None
    }


def _describe_program_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    # A new file next to the script is only used if an earlier one has changed.
    changed = sorted(name for name in before if before[name] != now.get(name))
    if not changed:
        return []
    have = "has" if len(changed) == 1 else "have"
    return [
        f"{format_list(changed)} {have} changed since the last session: losses may not be "
        "comparable"
    ]


def _keep_copy(run_dir: RunDir, source: bytes, earlier: Sequence[SessionEntry]) -> Path:
    """Return the path of a copy of the search file. A new copy gets a new number."""
    copies = [path for path in run_dir.path.iterdir() if SEARCH_FILE_PATTERN.fullmatch(path.name)]
    for path in copies:
        if _read_bytes(path) == source:
            return path
    names = [*(path.name for path in copies), *(session.file for session in earlier)]
    numbers = [int(match[1]) for match in map(SEARCH_FILE_PATTERN.fullmatch, names) if match]
    path = run_dir.path / f"search_space-{1 + max(numbers, default=0)}.py"
    write_atomically(path, source)
    return path


def _describe_difference(
    search: SearchDescription, sha256: str, before: Path, now: str
) -> tuple[str, list[str]]:
    """Compare the search file with its copy `before`, whose SHA-256 hash must be `sha256`.

    Return the numbers of added and removed lines as text, and the first changed lines. `now` is the
    name of the new copy.
    """
    source = _read_bytes(before)
    if source is None or hashlib.sha256(source).hexdigest() != sha256:
        return f", and its copy {before} is missing or was edited", []
    before_lines, now_lines = (
        content.decode(errors="surrogateescape").split("\n") for content in (source, search.source)
    )
    difference = list(difflib.unified_diff(before_lines, now_lines, n=0, lineterm=""))[2:]
    added = sum(line.startswith("+") for line in difference)
    removed = sum(line.startswith("-") for line in difference)
    lines = [
        f"  {cut_text(make_printable(line.expandtabs(4)))}".rstrip()
        for line in difference[:_MOST_DIFFERENCE_LINES]
    ]
    if len(difference) > _MOST_DIFFERENCE_LINES:
        command = shlex.join(["diff", str(before), str(before.with_name(now))])
        lines.append(f"  and {len(difference) - _MOST_DIFFERENCE_LINES} more: {command}")
    return f": {format_count(added, 'line')} added, {removed} removed", lines


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def find_commit(path: Path) -> Commit | None:
    """Return the commit of the repository that contains a file; None if there is none."""
    git = shutil.which("git")
    if git is None:
        return None
    lines = _read_output_lines([git, *_GIT_OPTIONS, *_STATUS_COMMAND], path.resolve().parent)
    is_dirty = any(not line.startswith("#") for line in lines)
    for line in lines:
        if match := re.fullmatch("# branch.oid ([0-9a-f]{40,64})", line):
            return Commit(match[1], is_dirty)
    return None


def _read_output_lines(command: list[str], folder: Path) -> list[str]:
    """Return the lines that a command prints, or [] if it fails or takes too long."""
    environment = {
        name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES
    }
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The command and all processes that it starts can then be killed together.
            start_new_session=True,
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
