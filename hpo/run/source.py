"""The source of a run: which version of the search space file each session ran, and what has changed since the last."""

from __future__ import annotations

import difflib
import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpo.problem import Description
from hpo.run.git import Commit, commit_of
from hpo.store.manifest import VERSION, SessionEntry
from hpo.store.run_dir import RunDir, write_whole
from hpo.text import counted, printable, short

_MOST_LINES = 10  # of a difference, which a person is to notice and not to review


def keep(run_dir: RunDir, search: Description, earlier: Sequence[SessionEntry], started: str) -> SessionEntry:
    """Keep the file in the run directory as it was imported, and return what run.json is to say of this session."""
    commit, kept = commit_of(search.location), _kept(run_dir, search.source, earlier)
    version = (commit.id, commit.dirty) if commit else (None, None)
    return SessionEntry(started, kept.name, search.sha256, *version)


def changes(run_dir: RunDir, search: Description, earlier: Sequence[SessionEntry], now: SessionEntry) -> list[str]:
    """Return lines that say what is different from the session before."""
    if not earlier:
        return []
    before = earlier[-1]
    if before.sha256 != now.sha256:
        files = ", ".join(dict.fromkeys(session.file for session in earlier))
        difference, lines = _difference(search, before.sha256, run_dir.path / before.file, now.file)
        return [
            f"{search.path} is not what ran before{difference}; evaluations from before were made by {files} in "
            f"{run_dir.path}: losses may not compare",
            *lines,
        ]
    then, here = _commit(before), _commit(now)
    if then is None or here is None or then == here:
        return []
    return [
        f"{search.path} is what ran before, but its repository was at commit {then} before, and is at {here} now: what "
        "it imports may differ"
    ]


def _kept(run_dir: RunDir, source: bytes, earlier: Sequence[SessionEntry]) -> Path:
    """Return the copy of the file, or make one, under a number that no session and no other file has had."""
    there = [path for path in run_dir.path.iterdir() if VERSION.fullmatch(path.name)]
    for path in there:
        if _bytes(path) == source:
            return path
    names = [*(path.name for path in there), *(session.file for session in earlier)]
    number = 1 + max((int(match[1]) for match in map(VERSION.fullmatch, names) if match), default=0)
    path = run_dir.path / f"search_space-{number}.py"
    write_whole(path, source)
    return path


def _difference(search: Description, sha256: str, before: Path, now: str) -> tuple[str, list[str]]:
    """Return the number of lines that differ from an earlier copy, in words, and the first of them to be shown."""
    source = _bytes(before)
    if source is None or hashlib.sha256(source).hexdigest() != sha256:
        return f", of which the copy {before} is missing or was edited", []
    difference = list(difflib.unified_diff(_lines(source), _lines(search.source), n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in difference) for sign in "+-")
    lines = [f"  {short(printable(line.expandtabs(4)))}".rstrip() for line in difference[:_MOST_LINES]]
    if len(difference) > _MOST_LINES:
        command = shlex.join(["diff", str(before), str(before.with_name(now))])
        lines.append(f"  and {len(difference) - _MOST_LINES} more: {command}")
    return f": {counted(added, 'line')} added, {removed} removed", lines


def _lines(source: bytes) -> list[str]:
    return source.decode(errors="surrogateescape").split("\n")


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _commit(session: SessionEntry) -> Commit | None:
    return Commit(session.commit, bool(session.dirty)) if session.commit else None
