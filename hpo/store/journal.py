"""Optuna's journal file, made safe against writers that die or run out of disk in the middle of a line."""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from hpo.errors import RunError
from hpo.process import clock
from hpo.store.file_lock import FileLock
from hpo.store.journal_lines import RunningChecksum, parse_entry

# Seconds after which the lock of another program, which may have died, is taken away. A rank that was stopped for a
# shorter time keeps its lock: if it lost it, it would go on to write lines that no longer fit to the file.
_STALE_LOCK_SECONDS = 3600.0

# A writer keeps the lock until it has had no entry for so long, and for so long at most: other programs write, too.
_REST_SECONDS = 0.2
_MAX_LOCK_SECONDS = 5.0


class Journal(JournalFileBackend):
    """A journal file that a torn line does not make unreadable.

    A writer that was killed, or whose disk was full, leaves the beginning of a line, and Optuna's backend would write
    the next line behind it: neither could be read then, nor anything after them. Here a writer first cuts off what
    another one left, and removes its own lines where it could not write all of them.

    Optuna numbers trials by counting lines: if a line were lost, all trials after it would have wrong numbers. Here
    each line has a checksum of the file up to it, which a reader compares.

    An entry is on disk when it was appended; inside `collecting`, when it was committed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._guard = FileLock(self._path, _STALE_LOCK_SECONDS)
        super().__init__(str(self._path), self._guard)
        self._written_sum, self._read_sum, self._lines_read = RunningChecksum(), RunningChecksum(), 0
        self._group_commit: GroupCommit | None = None

    @contextmanager
    def batch_writes(self) -> Iterator[GroupCommit]:
        """Keep the entries that are appended inside ``with`` until they are committed together."""
        with _open_file(self._path) as file:
            self._group_commit = GroupCommit(self, file)
            try:
                yield self._group_commit
            except BaseException:
                with suppress(RunError):
                    self._group_commit.close()
                raise
            else:
                self._group_commit.close()
            finally:
                self._group_commit = None

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Yield the entries behind the first so many; raises RunError where the file is damaged, or cannot be read."""
        if self._group_commit is not None:
            yield from self._group_commit.take_entries()
            return
        if log_number_from != self._lines_read:
            self._read_sum, self._lines_read = RunningChecksum(), 0
        yield from self._read_entries(log_number_from)

    def _read_entries(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(self._read_sum.offset)
                for entry in self._parse_lines(file, end):
                    if self._lines_read > log_number_from:
                        yield entry
        except OSError as error:
            raise RunError(f"{self._path} cannot be read: {error.strerror}") from error

    def _parse_lines(self, lines: Iterable[bytes], end: int) -> Iterator[dict[str, Any]]:
        """Yield the entries of the next lines, of a file that has ended at a position."""
        for line in lines:
            # The line is being written, or its writer has died, or another writer has just cut it off.
            if not line.endswith(b"\n") or self._read_sum.offset + len(line) > end:
                return
            yield self._parse_line(line)

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        """Return the entry of the next line; raises RunError where the line is damaged."""
        number = self._lines_read + 1
        try:
            entry = parse_entry(line)
            if not self._read_sum.matches(line):
                raise ValueError("is not what was written behind the lines before it: one of them was changed, or lost")
        except ValueError as error:
            keep = f", or keep what is before it: head -n {number - 1}" if number > 2 else ""  # two begin a study
            raise RunError(f"{self._path} is damaged: line {number} {error}; restore it{keep}") from None
        self._read_sum.add(line)
        self._lines_read = number
        return entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write entries durably, all of them or none; raises RunError where they cannot be written."""
        if self._group_commit is not None:
            self._group_commit.add(logs)
            return
        with self._convert_write_errors(), self._guard, _open_file(self._path) as file:
            end = _cut_torn_line(file)
            _write_durably(file, self._seal_entries(logs, file, end), end)

    @contextmanager
    def _convert_write_errors(self) -> Iterator[None]:
        """Raise RunError where entries cannot be written inside ``with``."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:  # the lock raises it
            raise RunError(f"{self._path}: its lock was taken away while this rank wrote; was it stopped?") from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; what it holds is whole, --resume goes on with it"
            ) from error

    def _seal_entries(self, logs: list[dict[str, Any]], file: FileIO, end: int) -> bytes:
        """Return entries as lines, with checksums that begin with the first `end` bytes of an open file."""
        if end < self._written_sum.offset:
            self._written_sum = RunningChecksum()
        file.seek(self._written_sum.offset)
        while chunk := file.read(end - self._written_sum.offset):
            self._written_sum.add(chunk)
        ahead, lines = copy.copy(self._written_sum), b""
        for log in logs:
            line = ahead.format_line(log)
            ahead.add(line)
            lines += line
        return lines


class GroupCommit:
    """Entries of a journal that are written together, with one write and one flush; for a process that writes alone.

    Known at once are the entries to their own process, in the order in which they will be in the file. So other
    programs are kept out by the journal's lock, from the first entry on until none has come for a while: its making and
    removal take as long as a flush, where files are slow.
    """

    def __init__(self, journal: Journal, file: FileIO) -> None:
        self._journal = journal
        self._file = file
        self._initial_status = os.fstat(file.fileno())
        self._lines = b""
        self._unread: deque[dict[str, Any]] = deque()
        self._has_lock = False
        self._end_offset = 0  # of the file, while the lock is held
        self._added_at = self._locked_at = 0.0

    def add(self, logs: list[dict[str, Any]]) -> None:
        """Keep entries for the next commit."""
        if not self._has_lock:
            self._take_lock()
        for log in logs:
            line = self._journal._read_sum.format_line(log)
            self._journal._read_sum.add(line)
            self._journal._lines_read += 1
            self._lines += line
            self._unread.append(json.loads(line))
        self._added_at = clock.now()

    def take_entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries that have not been yielded yet."""
        while self._unread:
            yield self._unread.popleft()

    def commit(self) -> bool:
        """Write what was added since the last commit, durably, and tell whether there was anything to write.

        Raises RunError where it cannot be written.
        """
        lines, self._lines = self._lines, b""
        with self._journal._convert_write_errors():
            if lines:
                self._check_end()
                _write_durably(self._file, lines, self._end_offset)
                self._end_offset += len(lines)
            is_at_rest = not lines and clock.now() - self._added_at > _REST_SECONDS
            if self._has_lock and (is_at_rest or clock.now() - self._locked_at > _MAX_LOCK_SECONDS):
                self._release_lock()
        return bool(lines)

    def close(self) -> None:
        """Commit, and let other programs write."""
        try:
            self.commit()
        finally:
            if self._has_lock:
                with self._journal._convert_write_errors():
                    self._release_lock()

    def _take_lock(self) -> None:
        journal = self._journal
        with journal._convert_write_errors():
            journal._guard.acquire()
            self._has_lock, self._locked_at = True, clock.now()
            if os.fstat(self._file.fileno()).st_size < journal._read_sum.offset:
                raise self._make_error("changed")
            self._end_offset = _cut_torn_line(self._file)
            others = os.pread(
                self._file.fileno(), self._end_offset - journal._read_sum.offset, journal._read_sum.offset
            )
        self._unread += journal._parse_lines(others.splitlines(keepends=True), self._end_offset)

    def _release_lock(self) -> None:
        self._has_lock = False
        self._journal._guard.release()

    def _check_end(self) -> None:
        """Raise RunError where somebody has changed the file in spite of the lock."""
        try:
            status = self._journal._path.stat()  # one question, of a file system that may take a millisecond for each
        except FileNotFoundError:
            raise self._make_error("removed") from None
        if not os.path.samestat(status, self._initial_status):
            raise self._make_error("replaced")
        if status.st_size != self._end_offset:
            raise self._make_error("changed")

    def _make_error(self, what: str) -> RunError:
        return RunError(f"{self._journal._path} was {what} while this run wrote to it: restore it, and --resume")


def _open_file(path: Path) -> FileIO:
    """Open a file that exists, to read, and to write at its end."""
    return FileIO(os.open(path, os.O_RDWR | os.O_APPEND), "r+")


def _write_durably(file: FileIO, lines: bytes, end: int) -> None:
    """Write lines behind the `end` of a file durably, all of them or none."""
    try:
        while lines:
            lines = lines[file.write(lines) or 0 :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(end)
        raise


def _cut_torn_line(file: FileIO) -> int:
    """Cut off what follows the last line break of an open file, and return the position behind it."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep and (file.seek(keep - 1), file.read(1))[1] != b"\n":
        keep -= 1
    if keep < end:
        file.truncate(keep)
    return keep


def has_no_study(path: Path) -> bool:
    """Tell whether a file is missing, empty, or the beginning of a journal's first line, which makes a study."""
    if not path.exists():
        return True
    first = b'{"op_code":0,'
    with path.open("rb") as file:
        content = file.read(65536)
    return b"\n" not in content and (content.startswith(first) or first.startswith(content))
