"""Open Optuna storages: a run's own journal file, or any storage that a URL names."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection

from hpo.errors import UsageError
from hpo.store.journal import Journal
from hpo.store.storage_retry import StorageRetry, wrap_with_retry
from hpo.store.storage_url import find_storage_file, is_url

_thread_cache = threading.local()


class FileStorage(JournalStorage):
    """Store studies in a journal file."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        super().__init__(self.journal)


def list_studies(storage: str | Path, retry: StorageRetry | None = None) -> dict[str, list[StudyDirection]]:
    """Return the names of all studies in a storage, each with the directions of its objectives."""
    return {study.study_name: list(study.directions) for study in open_storage(storage, retry).get_all_studies()}


def check_readable(storage: str) -> None:
    """Raise UsageError if an SQLite file is missing or is not an Optuna storage.

    This check comes first, because Optuna creates a missing file, and its tables, when it opens a storage.
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


def open_storage(storage: str | Path | BaseStorage, retry: StorageRetry | None = None) -> BaseStorage:
    """Open the storage at a path or a URL; an open storage is returned unchanged.

    `retry` repeats the opening, and all later calls, while the database at a URL is unavailable; None raises the error.
    """
    if isinstance(storage, BaseStorage):
        return storage
    if isinstance(storage, str) and is_url(storage):  # It is not cached, since its connections may have been lost.
        opened = partial(optuna.storages.get_storage, storage)
        return wrap_with_retry(retry.call(opened), retry) if retry else opened()
    journals: dict[Path, BaseStorage] = getattr(_thread_cache, "journals", {})
    path = Path(storage)
    if path not in journals:
        journals[path] = FileStorage(path)
    return journals[path]
