"""Protect Optuna's journal file against incomplete lines, which a writer leaves if it crashes or the disk is full."""

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

# Seconds after which the lock of another program is removed, since the program may have crashed. A rank that is
# suspended for a shorter time keeps its lock. Without the lock, it would later write lines that do not fit the file.
_STALE_LOCK_SECONDS = 3600.0

# A writer releases the lock after this time without new entries, so that other programs can write.
_REST_SECONDS = 0.2
# A writer releases the lock after this time even if entries keep coming.
_MAX_LOCK_SECONDS = 5.0


class Journal(JournalFileBackend):
    """Store a study in a journal file (one entry per line), with a checksum in each line.

    A writer that is killed, or whose disk is full, leaves an incomplete line. Optuna's backend would append the next
    entry to this line, and the file would become unreadable. This class removes an incomplete line before it writes. If
    writing its own lines fails, it removes the written part.

    Optuna numbers trials by counting lines, so a lost line would change the numbers of all later trials. To detect
    this, each line contains a checksum of the file up to this line, and readers verify it.

    An entry is on disk when `append_logs` returns. Inside `batch_writes`, it is on disk when the batch is committed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._guard = FileLock(self._path, _STALE_LOCK_SECONDS)
        super().__init__(str(self._path), self._guard)
        self._written_sum, self._read_sum, self._lines_read = RunningChecksum(), RunningChecksum(), 0
        self._group_commit: GroupCommit | None = None

    @contextmanager
    def batch_writes(self) -> Iterator[GroupCommit]:
        """Inside ``with``, collect appended entries. Each `commit` of the yielded object writes them together."""
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
        """Yield all entries except the first `log_number_from`.

        Raises RunError if the file is damaged or cannot be read.
        """
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
        for line in lines:
            # The line is incomplete: it is being written, its writer has crashed, or another writer has cut it off.
            if not line.endswith(b"\n") or self._read_sum.offset + len(line) > end:
                return
            yield self._parse_line(line)

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        number = self._lines_read + 1
        try:
            entry = parse_entry(line)
            if not self._read_sum.matches(line):
                raise ValueError("does not match its checksum, so this line or one before it was changed or lost")
        except ValueError as error:
            # A study begins with two lines.
            keep = f", or keep the lines before it: head -n {number - 1}" if number > 2 else ""
            raise RunError(f"{self._path} is damaged: line {number} {error}. Restore the file{keep}") from None
        self._read_sum.add(line)
        self._lines_read = number
        return entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write entries durably, all of them or none. Raises RunError if they cannot be written."""
        if self._group_commit is not None:
            self._group_commit.add(logs)
            return
        with self._convert_write_errors(), self._guard, _open_file(self._path) as file:
            end = _cut_torn_line(file)
            _write_durably(file, self._seal_entries(logs, file, end), end)

    @contextmanager
    def _convert_write_errors(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:  # The lock raises it.
            raise RunError(
                f"{self._path}: another process removed the lock while this rank wrote. Was this rank suspended?"
            ) from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}. It is undamaged: continue with --resume"
            ) from error

    def _seal_entries(self, logs: list[dict[str, Any]], file: FileIO, end: int) -> bytes:
        """Return entries as lines with checksums, to be appended after the first `end` bytes of the file."""
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
    """Collect entries of a journal, and write them together with one flush.

    The process reads its own entries before they are written, so no other program may add entries in between. Therefore
    the journal is locked when an entry is added. It stays locked for a few seconds, or until no entry has been added
    for a while. Locking it for each entry would be as slow as flushing each entry.
    """

    def __init__(self, journal: Journal, file: FileIO) -> None:
        self._journal = journal
        self._file = file
        self._initial_status = os.fstat(file.fileno())
        self._lines = b""
        self._unread: deque[dict[str, Any]] = deque()
        self._has_lock = False
        self._end_offset = 0  # End of the file while the lock is held.
        self._added_at = self._locked_at = 0.0

    def add(self, logs: list[dict[str, Any]]) -> None:
        """Add entries to the next commit."""
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
        """Yield the entries that this process or another program has added since the previous call."""
        while self._unread:
            yield self._unread.popleft()

    def commit(self) -> bool:
        """Write all entries since the previous commit durably, and return whether there were any.

        Raises RunError if they cannot be written.
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
        """Commit the remaining entries, and release the lock."""
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
            foreign_lines = os.pread(
                self._file.fileno(), self._end_offset - journal._read_sum.offset, journal._read_sum.offset
            )
        self._unread += journal._parse_lines(foreign_lines.splitlines(keepends=True), self._end_offset)

    def _release_lock(self) -> None:
        self._has_lock = False
        self._journal._guard.release()

    def _check_end(self) -> None:
        # Another program may have changed the file in spite of the lock. There is only one call, because a shared file
        # system may take a millisecond for each.
        try:
            status = self._journal._path.stat()
        except FileNotFoundError:
            raise self._make_error("removed") from None
        if not os.path.samestat(status, self._initial_status):
            raise self._make_error("replaced")
        if status.st_size != self._end_offset:
            raise self._make_error("changed")

    def _make_error(self, change: str) -> RunError:
        return RunError(f"{self._journal._path} was {change} while this run wrote to it. Restore it and add --resume")


def _open_file(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_RDWR | os.O_APPEND), "r+")


def _write_durably(file: FileIO, lines: bytes, end: int) -> None:
    """Append lines to a file of `end` bytes, and flush it. If this fails, remove the written part."""
    try:
        while lines:
            lines = lines[file.write(lines) or 0 :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(end)
        raise


def _cut_torn_line(file: FileIO) -> int:
    """Remove an incomplete final line, and return the new size of the file."""
    end = file.seek(0, os.SEEK_END)
    keep = end
    while keep and (file.seek(keep - 1), file.read(1))[1] != b"\n":
        keep -= 1
    if keep < end:
        file.truncate(keep)
    return keep


def has_no_study(path: Path) -> bool:
    """Return whether a journal file contains no study: it is missing, empty, or ends within its first line."""
    if not path.exists():
        return True
    first = b'{"op_code":0,'  # The first line creates the study.
    with path.open("rb") as file:
        content = file.read(65536)
    return b"\n" not in content and (content.startswith(first) or first.startswith(content))
