"""Optuna storages: a run's own journal file, or any that a URL names."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection

from hpo.errors import UsageError
from hpo.journal import Journal
from hpo.outage import Patience, patient

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_opened = threading.local()
_SECRETS = ("pass", "pwd", "secret", "token", "key")


def studies(storage: str | Path, patience: Patience | None = None) -> dict[str, list[StudyDirection]]:
    """Give the studies in a storage by their names: in which directions they go."""
    return {study.study_name: list(study.directions) for study in open_storage(storage, patience).get_all_studies()}


def check_readable(storage: str) -> None:
    """Raise a UsageError where an SQLite file is not there or is no Optuna storage: opening it would make it one."""
    path = file_of(storage)
    if path is None or not is_remote(storage):
        return
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("SELECT study_name FROM studies LIMIT 1")
    except sqlite3.Error as error:
        raise UsageError(f"{path} cannot be read as an Optuna storage: {error}") from error


def file_of(storage: str) -> Path | None:
    """Give the file that holds a storage; None where a server does, or no file of its own."""
    if not is_remote(storage):
        return Path(storage)
    url = _parsed(storage)
    if url is None or url.get_backend_name() != "sqlite" or not url.database:
        return None
    return None if url.database == ":memory:" or url.database.startswith("file:") else Path(url.database)


def from_anywhere(storage: str) -> str:
    """Give a storage's URL such that it means the same in all folders; a path stays as it is."""
    if not is_remote(storage):
        return storage
    path, url = file_of(storage), _parsed(storage)
    if path is None or url is None or path.is_absolute():
        return storage
    return url.set(database=str(path.absolute())).render_as_string(hide_password=False)


def without_password(storage: str) -> str:
    """Replace the password in a storage URL, or URL#STUDY, by asterisks; a path stays as it is."""
    if not is_remote(storage):
        return storage
    before, mark, study = storage.partition("#")
    if mark:
        return before.split("://")[0] + "://..." if "@" in study else without_password(before) + mark + study
    url = _parsed(storage)
    # An @ in a host or a database is of a password that is not percent-encoded.
    if url is None or "@" in (url.host or "") or "@" in (url.database or ""):
        return storage.split("://")[0] + "://..."
    secret = [name for name in url.query if any(word in name.lower() for word in _SECRETS)]
    hidden = url.update_query_dict(dict.fromkeys(secret, "***")).render_as_string(hide_password=True)
    return hidden.replace("%2A%2A%2A", "***")


def _parsed(storage: str) -> URL | None:
    """Take a storage URL apart; None where it is none."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(storage)
    except (ArgumentError, ValueError):
        return None


def is_hidden(storage: str) -> bool:
    """Tell whether `without_password` has left something out of a storage URL."""
    return "***" in storage or storage.endswith("://...")


def is_remote(storage: str) -> bool:
    """Tell whether a storage is none of a run's own files, and may be away for a while."""
    return "://" in storage


@contextmanager
def opened_once() -> Iterator[None]:
    """Let this thread open each journal once meanwhile: to read 5,000 trials of 20 losses takes 2 s."""
    _opened.journals = {}
    try:
        yield
    finally:
        del _opened.journals


def open_storage(storage: str | Path | BaseStorage, patience: Patience | None = None) -> BaseStorage:
    """Open the journal file at a path, or the storage that a URL names; one that is open stays as it is.

    What a URL names is waited for, now and later, where there is `patience`.
    """
    if isinstance(storage, BaseStorage):
        return storage
    if isinstance(storage, str) and is_remote(storage):  # anew: its connections may have been lost meanwhile
        opened = partial(optuna.storages.get_storage, storage)
        return patient(patience.call(opened), patience) if patience else opened()
    journals: dict[Path, BaseStorage] = getattr(_opened, "journals", {})
    path = Path(storage)
    if path not in journals:
        journals[path] = JournalStorage(Journal(path))
    return journals[path]
