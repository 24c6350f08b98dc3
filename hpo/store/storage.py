"""Open Optuna storages: a run's own journal file, or any storage that a URL names.

While a database is unavailable, because it is being restarted or is locked, its calls are repeated.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from hpo.errors import StorageUnavailableError, UsageError
from hpo.process import clock
from hpo.store.journal import STALE_LOCK_SECONDS, Journal
from hpo.store.storage_url import find_storage_file, is_url
from hpo.text_format import format_duration

_thread_cache = threading.local()


class FileStorage(JournalStorage):
    """Store studies in a journal file."""

    def __init__(self, path: Path, stale_lock_seconds: int = STALE_LOCK_SECONDS) -> None:
        self.journal = Journal(path, stale_lock_seconds)
        super().__init__(self.journal)


def list_studies(
    storage: str | Path, retry: StorageRetry | None = None
) -> dict[str, list[StudyDirection]]:
    """Return the names of all studies in a storage, each with the directions of its objectives."""
    return {
        study.study_name: list(study.directions)
        for study in open_storage(storage, retry).get_all_studies()
    }


def check_readable(storage: str) -> None:
    """Raise UsageError if an SQLite file is missing or is not an Optuna storage.

    This check comes first, because Optuna creates a missing file, and its tables, when it opens a
    storage.
    """
    path = find_storage_file(storage)
    if path is None or not is_url(storage):
        return
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("SELECT study_name FROM studies LIMIT 1")
    except sqlite3.Error as error:
        raise UsageError(f"{path} cannot be read as an Optuna storage: {error}") from error


@contextmanager
def cache_journals() -> Iterator[None]:
    """Inside ``with``, let this thread open each journal file only once.

    Opening takes time: a journal of 5,000 trials with 20 losses each is read in 2 seconds.
    """
    _thread_cache.journals = {}
    try:
        yield
    finally:
        del _thread_cache.journals


def open_storage(
    storage: str | Path | BaseStorage, retry: StorageRetry | None = None
) -> BaseStorage:
    """Open the storage at a path or a URL; an open storage is returned unchanged.

    `retry` repeats the opening, and all later calls, while the database at a URL is unavailable;
    None raises the error.
    """
    if isinstance(storage, BaseStorage):
        return storage
    # It is not cached, since its connections may have been lost.
    if isinstance(storage, str) and is_url(storage):
        opened = partial(optuna.storages.get_storage, storage)
        return wrap_with_retry(retry.call(opened), retry) if retry else opened()
    journals: dict[Path, BaseStorage] = getattr(_thread_cache, "journals", {})
    path = Path(storage)
    if path not in journals:
        journals[path] = FileStorage(path)
    return journals[path]


_MAX_WAIT = 600.0  # Seconds.
# Seconds. Workers that write at the same time may block each other for a moment.
_SILENT_WAIT = 0.5
_MIN_PAUSE = 0.2
_MAX_PAUSE = 5.0
# Messages of users' mistakes. PostgreSQL, MySQL and SQLite raise the same kind of error for
# mistakes and for outages.
_USAGE_ERRORS = (
    "authentication failed",
    "Access denied",
    "no password supplied",
    "does not exist",
    "Unknown database",
    "no such table",
    "readonly database",
    "unable to open database file",
)
_STORAGE_METHODS = [
    name
    for name, member in vars(BaseStorage).items()
    if callable(member) and not name.startswith("_")
]

T = TypeVar("T")


class StorageRetry:
    """Repeat calls of a storage while it is unavailable, for at most ten minutes.

    Threads may share an instance.

    Args:
        report: Function that prints a message at the start and at the end of an outage.
        is_over: Function that returns True if calls must stop waiting.
    """

    def __init__(
        self,
        storage_name: str,
        report: Callable[[str], object],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._storage_name = storage_name
        self._report = report
        self._is_over = is_over
        self._waiting_calls = 0  # Calls that wait and have reported the outage.
        self._lock = threading.Lock()

    def call(self, step: Callable[[], T], retry_step: Callable[[], T] | None = None) -> T:
        """Call `step` until the storage answers, and return its result.

        The first call may have changed the storage although it raised an error. Therefore all later
        calls use `retry_step`, which is `step` by default.

        Raises:
            StorageUnavailableError: If the storage stays unavailable.
        """
        try:
            return step()
        except Exception as error:
            if not is_outage(error):
                raise
            return self._retry_until_timeout(retry_step or step, error)

    def _retry_until_timeout(self, step: Callable[[], T], error: Exception) -> T:
        since = clock.now()
        pause = _MIN_PAUSE
        is_reported = False
        while True:
            waited = clock.now() - since
            if self._is_over() or waited > _MAX_WAIT:
                raise StorageUnavailableError(
                    f"the storage {self._storage_name} has not answered for "
                    f"{format_duration(waited)} ({_format_reason(error)}). It is undamaged: "
                    "continue with --resume"
                ) from error
            if waited > _SILENT_WAIT and not is_reported:
                is_reported = True
                self._report_outage(error)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
            try:
                result = step()
            except Exception as next_error:
                if not is_outage(next_error):
                    raise
                error = next_error
            else:
                if is_reported:
                    self._report_recovery(clock.now() - since)
                return result

    def _report_outage(self, error: Exception) -> None:
        with self._lock:
            self._waiting_calls += 1
            if self._waiting_calls == 1:
                self._report(
                    f"warning: the storage {self._storage_name} does not answer "
                    f"({_format_reason(error)}): waiting for at most {format_duration(_MAX_WAIT)}"
                )

    def _report_recovery(self, waited: float) -> None:
        with self._lock:
            self._waiting_calls -= 1
            if self._waiting_calls == 0:
                self._report(
                    f"the storage {self._storage_name} answers again, after "
                    f"{format_duration(waited)}"
                )


def wrap_with_retry(storage: BaseStorage, retry: StorageRetry) -> BaseStorage:
    """Let all methods of a storage repeat calls while it is unavailable. Return the storage."""
    for name in _STORAGE_METHODS:
        setattr(storage, name, partial(_call_with_retry, storage, getattr(storage, name), retry))
    return storage


def _call_with_retry(
    storage: BaseStorage,
    method: Callable[..., Any],
    retry: StorageRetry,
    *args: Any,
    **options: Any,
) -> Any:
    # A database may have committed a call although its answer was lost. To set a value twice does
    # no harm. But a trial must not be added twice, and the end of an ended trial raises an error.
    step = partial(method, *args, **options)
    if method.__name__ == "set_trial_state_values":
        return retry.call(step, partial(_end_trial, step))
    if method.__name__ == "create_new_trial":
        template = args[1] if len(args) > 1 else options["template_trial"]
        return retry.call(step, partial(_add_trial, step, storage, args[0], template))
    return retry.call(step)


def _end_trial(step: Callable[[], bool]) -> bool:
    """Repeat `step`, which ends a trial; return True if an earlier attempt has ended it."""
    try:
        return step()
    except UpdateFinishedTrialError:
        return True


def _add_trial(
    step: Callable[[], int], storage: BaseStorage, study_id: int, template: FrozenTrial
) -> int:
    """Add a trial, unless one with equal parameters and attributes shows that it was added."""
    for trial in storage.get_all_trials(study_id, deepcopy=False):
        if (trial.params, trial.user_attrs) == (template.params, template.user_attrs):
            return trial._trial_id
    return step()


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error means that a storage is unavailable, not that a call is wrong."""
    from sqlalchemy import exc

    if isinstance(error, StorageInternalError):
        error = error.__cause__
    if any(text in str(error) for text in _USAGE_ERRORS):
        return False
    is_disconnected = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    return is_disconnected or isinstance(
        error, (exc.InterfaceError, exc.OperationalError, exc.TimeoutError)
    )


def _format_reason(error: Exception) -> str:
    cause = (
        error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    )
    return (
        " ".join(str(getattr(cause, "orig", None) or cause).split())[:200] or type(cause).__name__
    )
