"""Optuna storages: a run's own journal file, or any that a URL names."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection

from hpo.journal import Journal

_SECRETS = ("pass", "pwd", "secret", "token", "key")


def studies(storage: str | Path) -> dict[str, list[StudyDirection]]:
    """Give the studies in a storage by their names: in which directions they go."""
    return {study.study_name: list(study.directions) for study in open_storage(storage).get_all_studies()}


def file_of(storage: str) -> Path | None:
    """Give the file that a storage URL names, if that is what it names."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(storage)
    except (ArgumentError, ValueError):
        return None
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def without_password(storage: str) -> str:
    """Replace the password in a storage URL, or URL#STUDY, by asterisks; a path stays as it is."""
    if "://" not in storage:
        return storage
    before, mark, study = storage.partition("#")
    if mark:
        return before.split("://")[0] + "://..." if "@" in study else without_password(before) + mark + study
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(storage)
    except (ArgumentError, ValueError):
        return storage.split("://")[0] + "://..."
    if "@" in (url.host or "") or "@" in (url.database or ""):  # of a password that is not percent-encoded
        return storage.split("://")[0] + "://..."
    secret = [name for name in url.query if any(word in name.lower() for word in _SECRETS)]
    hidden = url.update_query_dict(dict.fromkeys(secret, "***")).render_as_string(hide_password=True)
    return hidden.replace("%2A%2A%2A", "***")


def open_storage(storage: str | Path) -> BaseStorage:
    """Open the journal file at a path, or the storage that a URL names."""
    if isinstance(storage, str) and "://" in storage:
        return optuna.storages.get_storage(storage)
    return JournalStorage(Journal(Path(storage)))
