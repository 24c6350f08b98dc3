"""Store a study in a journal file that survives crashes, full disks and other writers."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from hpo.errors import RunError
from hpo.process import clock
from hpo.store.json_values import is_mapping, is_mapping_of, is_number, is_text, is_whole_number
from hpo.text_format import format_repr

# Other programs, such as Optuna's dashboard, write lines without a checksum. The next checksum
# covers such lines, too.
_CRC = re.compile(rb',"crc":(\d{1,10})\}\n')


class RunningChecksum:
    """Hold the checksum of the first `offset` bytes of a journal, and extend it line by line."""

    def __init__(self) -> None:
        self.offset = 0
        self._crc = 0

    def add(self, content: bytes) -> None:
        """Extend the checksum by the bytes after `offset`."""
        self.offset += len(content)
        self._crc = zlib.crc32(content, self._crc)

    def format_line(self, entry: Mapping[str, Any]) -> bytes:
        """Return an entry as the next line of the journal, with its checksum."""
        text = json.dumps(entry, separators=(",", ":")).encode()
        return text[:-1] + b',"crc":%d}\n' % zlib.crc32(text, self._crc)

    def matches(self, line: bytes) -> bool:
        """Return whether the checksum in the next line is correct, or missing."""
        position = line.rfind(b',"crc":')
        found = _CRC.fullmatch(line, position) if position >= 0 else None
        return found is None or int(found[1]) == zlib.crc32(line[:position] + b"}", self._crc)


def parse_entry(line: bytes) -> dict[str, Any]:
    """Return the entry in a line; raise ValueError if Optuna cannot have written the line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"is not JSON: {line[:40]!r}") from None
    operation = entry.get("op_code") if isinstance(entry, dict) else None
    if (
        not isinstance(entry, dict)
        or type(operation) is not int
        or not 0 <= operation < len(_REQUIRED_FIELDS)
    ):
        raise ValueError(f"is not an entry of a journal: {line[:40]!r}")
    required = _REQUIRED_FIELDS[operation]
    for fields in (required, _OPTIONAL_FIELDS):
        for name, fits in fields.items():
            if name in entry:
                if not fits(entry[name]):
                    found = format_repr(entry[name])[:40]
                    raise ValueError(f"is not an entry of a journal: {name!r} is {found}")
            elif fields is required:
                raise ValueError(f"is not an entry of a journal: {name!r} is missing")
    return entry


def _is_single_item(value: object) -> bool:
    return type(value) is dict and len(value) == 1


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _allow_null(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


_Fields = dict[str, Callable[[object], bool]]
_STUDY: _Fields = {"study_id": is_whole_number}
_TRIAL: _Fields = {"trial_id": is_whole_number}
# Fields that an entry must have, with a check of each value; the index is the op_code.
_REQUIRED_FIELDS: tuple[_Fields, ...] = (
    {"study_name": is_text, "directions": lambda value: type(value) is list},
    _STUDY,
    {**_STUDY, "user_attr": _is_single_item},
    {**_STUDY, "system_attr": _is_single_item},
    {**_STUDY, "datetime_start": _allow_null(is_text)},
    {**_TRIAL, "param_name": is_text, "param_value_internal": _is_finite, "distribution": is_text},
    {**_TRIAL, "state": is_whole_number, "values": lambda _: True},
    {**_TRIAL, "step": is_whole_number, "intermediate_value": is_number},
    {**_TRIAL, "user_attr": _is_single_item},
    {**_TRIAL, "system_attr": _is_single_item},
    {},
)
# Fields that an entry of any op_code may have.
_OPTIONAL_FIELDS: _Fields = {
    "worker_id": is_text,
    "state": is_whole_number,
    "value": _allow_null(is_number),
    "values": _allow_null(
        lambda value: type(value) is list and bool(value) and all(map(is_number, value))
    ),
    "params": is_mapping_of(_is_finite),
    "intermediate_values": is_mapping_of(is_number),
    "distributions": is_mapping_of(is_text),
    "user_attrs": is_mapping,
    "system_attrs": is_mapping,
}


# Seconds after which the lock of another program is removed, since the program may have crashed. A
# rank that is suspended for a shorter time keeps its lock. Without the lock, it would later write
# lines that do not fit the file.
STALE_LOCK_SECONDS = 3600

# A writer releases the lock after this time without new entries, so that other programs can write.
_REST_SECONDS = 0.2
# A writer releases the lock after this time even if entries keep coming.
_MAX_LOCK_SECONDS = 5.0


class Journal(JournalFileBackend):
    """Store a study in a journal file (one entry per line), with a checksum in each line.

    A writer that is killed, or whose disk is full, leaves an incomplete line. Optuna's backend
    would append the next entry to this line, and the file would become unreadable. This class
    removes an incomplete line before it writes. If writing its own lines fails, it removes the
    written part.

    Optuna numbers trials by counting lines, so a lost line would change the numbers of all later
    trials. To detect this, each line contains a checksum of the file up to this line, and readers
    verify it.

    An entry is on disk when `append_logs` returns. Inside `batch_writes`, it is on disk when the
    batch is committed.
    """

    def __init__(self, path: Path, stale_lock_seconds: int = STALE_LOCK_SECONDS) -> None:
        self._path = path.absolute()
        self._guard = JournalFileSymlinkLock(str(self._path), stale_lock_seconds)
        super().__init__(str(self._path), self._guard)
        self._read_sum = RunningChecksum()
        self._lines_read = 0
        self._unread: deque[dict[str, Any]] = deque()  # The last of these lines.
        self._group_commit: GroupCommit | None = None

    @contextmanager
    def batch_writes(self) -> Iterator[GroupCommit]:
        """Inside ``with``, collect entries; `commit` of the yielded object writes them."""
        with _open_file(self._path) as file:
            self._group_commit = GroupCommit(self, file)
            try:
                yield self._group_commit
                self._group_commit.close()
            except BaseException:
                with suppress(RunError):
                    self._group_commit.close()
                # The file may lack lines that were added. So all are read again.
                self._unread.clear()
                raise
            finally:
                self._group_commit = None

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Yield all entries but the first `log_number_from`; raise RunError for a damaged file."""
        if log_number_from != self._lines_read - len(self._unread):
            self._read_sum = RunningChecksum()
            self._lines_read = 0
            self._unread.clear()
        while self._unread:
            yield self._unread.popleft()
        if self._group_commit is not None:
            return
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
            # The line is incomplete: it is being written, its writer has crashed, or another writer
            # has cut it off.
            if not line.endswith(b"\n") or self._read_sum.offset + len(line) > end:
                return
            yield self._parse_line(line)

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        number = self._lines_read + 1
        try:
            entry = parse_entry(line)
            if not self._read_sum.matches(line):
                raise ValueError(
                    "does not match its checksum, so this line or one before it was changed or lost"
                )
        except ValueError as error:
            # A study begins with two lines.
            keep = f", or keep the lines before it: head -n {number - 1}" if number > 2 else ""
            raise RunError(
                f"{self._path} is damaged: line {number} {error}. Restore the file{keep}"
            ) from None
        self._read_sum.add(line)
        self._lines_read = number
        return entry

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write entries durably, all of them or none. Raises RunError if they cannot be written."""
        if self._group_commit is not None:
            self._group_commit.add(logs)
            return
        with self._convert_write_errors(), self.batch_writes() as commit:
            commit.add(logs)

    @contextmanager
    def _convert_write_errors(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except RuntimeError as error:  # The lock raises it.
            raise RunError(
                f"{self._path}: another process removed the lock while this rank wrote. Was this "
                "rank suspended?"
            ) from error
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}. It is undamaged: continue "
                "with --resume"
            ) from error


class GroupCommit:
    """Collect entries of a journal, and write them together with one flush.

    The process reads its own entries before they are written, so no other program may add entries
    in between. Therefore the journal is locked when an entry is added. It stays locked for a few
    seconds, or until no entry has been added for a while. Locking it for each entry would be as
    slow as flushing each entry.
    """

    def __init__(self, journal: Journal, file: FileIO) -> None:
        self._journal = journal
        self._file = file
        self._initial_status = os.fstat(file.fileno())
        self._lines = b""
        self._has_lock = False
        self._end_offset = 0  # End of the file while the lock is held.
        self._added_at = self._locked_at = 0.0

    def add(self, logs: list[dict[str, Any]]) -> None:
        """Add entries to the next commit."""
        if not self._has_lock:
            # It reads the lines of other programs first, which come before these entries.
            self._take_lock()
        for log in logs:
            line = self._journal._read_sum.format_line(log)
            self._journal._read_sum.add(line)
            self._journal._lines_read += 1
            self._lines += line
            # Parsed from the line, so that this process reads the same values as all other readers
            # of the file.
            self._journal._unread.append(json.loads(line))
        self._added_at = clock.now()

    def commit(self) -> bool:
        """Write all entries since the previous commit durably; return if there were any."""
        # If writing fails, these lines are lost: the error ends the run, which can be resumed.
        lines = self._lines
        self._lines = b""
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
            self._has_lock = True
            self._locked_at = clock.now()
            # The lines that this process has read must still be there: trials are numbered by them.
            if os.fstat(self._file.fileno()).st_size < journal._read_sum.offset:
                raise self._make_error("changed")
            self._end_offset = _cut_torn_line(self._file)
            foreign_lines = os.pread(
                self._file.fileno(),
                self._end_offset - journal._read_sum.offset,
                journal._read_sum.offset,
            )
        journal._unread += journal._parse_lines(
            foreign_lines.splitlines(keepends=True), self._end_offset
        )

    def _release_lock(self) -> None:
        self._has_lock = False
        self._journal._guard.release()

    def _check_end(self) -> None:
        # Another program may have changed the file in spite of the lock. There is only one call,
        # because a shared file system may take a millisecond for each.
        try:
            status = self._journal._path.stat()
        except FileNotFoundError:
            raise self._make_error("removed") from None
        if not os.path.samestat(status, self._initial_status):
            raise self._make_error("replaced")
        if status.st_size != self._end_offset:
            raise self._make_error("changed")

    def _make_error(self, change: str) -> RunError:
        return RunError(
            f"{self._journal._path} was {change} while this run wrote to it. Restore it and add "
            "--resume"
        )


def _open_file(path: Path) -> FileIO:
    return FileIO(os.open(path, os.O_RDWR | os.O_APPEND), "r+")


def _write_durably(file: FileIO, lines: bytes, end: int) -> None:
    """Append lines to a file of `end` bytes, and flush it, or restore it if that fails."""
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
    """Return whether a journal has no study: it is missing, empty, or ends in its first line."""
    if not path.exists():
        return True
    first = b'{"op_code":0,'  # The first line creates the study.
    with path.open("rb") as file:
        content = file.read(65536)
    return b"\n" not in content and (content.startswith(first) or first.startswith(content))
