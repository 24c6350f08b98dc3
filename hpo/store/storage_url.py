"""Parse the location of a study: a path, or the URL of a storage, perhaps with a password."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

_SECRETS = ("pass", "pwd", "secret", "token", "key")


def has_hidden_password(storage: str) -> bool:
    """Return whether `mask_password` has removed a part of a storage URL."""
    return "***" in storage or storage.endswith("://...")


def is_url(storage: str) -> bool:
    """Return whether `storage` is a URL, and not the path of a journal file."""
    return "://" in storage


def find_storage_file(storage: str) -> Path | None:
    """Return the file of a journal or an SQLite database; None for other storages."""
    if not is_url(storage):
        return Path(storage)
    url = _parse_url(storage)
    if url is None or url.get_backend_name() != "sqlite" or not url.database:
        return None
    if url.database == ":memory:" or url.database.startswith("file:"):
        return None
    return Path(url.database)


def resolve_url(storage: str) -> str:
    """Make the path in an SQLite URL absolute, so that it is valid in all directories."""
    if not is_url(storage):
        return storage
    path = find_storage_file(storage)
    url = _parse_url(storage)
    if path is None or url is None or path.is_absolute():
        return storage
    return url.set(database=str(path.absolute())).render_as_string(hide_password=False)


def mask_password(storage: str) -> str:
    """Return a storage URL, or URL#STUDY, with asterisks instead of the password."""
    if not is_url(storage):
        return storage
    before, mark, study = storage.partition("#")
    if mark:
        if "@" in study:
            return before.split("://")[0] + "://..."
        return mask_password(before) + mark + study
    url = _parse_url(storage)
    # An @ in a host or a database belongs to a password that is not percent-encoded.
    if url is None or "@" in (url.host or "") or "@" in (url.database or ""):
        return storage.split("://")[0] + "://..."
    secret = [name for name in url.query if any(word in name.lower() for word in _SECRETS)]
    hidden = url.update_query_dict(dict.fromkeys(secret, "***")).render_as_string(
        hide_password=True
    )
    return hidden.replace("%2A%2A%2A", "***")


def _parse_url(storage: str) -> URL | None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(storage)
    except (ArgumentError, ValueError):
        return None
