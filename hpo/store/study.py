"""Open the study of a run in its storage, and raise one clear message if anything is wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpo.errors import RunError, StorageUnavailableError, UsageError
from hpo.store.manifest import Manifest, make_confirmation_name
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, list_studies
from hpo.store.storage_url import find_storage_file, mask_password
from hpo.text_format import cut_text, format_error


def open_study(storage: str, study_name: str) -> Record | None:
    """Open the record of a run; return None if its storage has no such study."""
    with convert_storage_errors(storage):
        try:
            return Record(storage, study_name)
        except KeyError:
            return None


def open_confirmations(storage: str, study_name: str) -> Record | None:
    """Open the record of the evaluations that confirm the best of a run; return None if there is none yet.

    Raises UsageError if another run owns the study of this name.
    """
    name = make_confirmation_name(study_name)
    if is_storage_missing(storage):
        return None
    record = open_study(storage, name)
    if record is None or record.read_attributes().get("confirms") == study_name:
        return record
    if "space" in record.read_attributes() or record.read_evaluations():
        raise UsageError(
            f"--confirm-seeds: {mask_password(storage)} already holds a study named {name!r}, which is another "
            "run's: choose another --run-dir, because studies are named after run directories"
        )
    return None


def open_existing_study(run_dir: RunDir, storage: str, study_name: str) -> Record:
    """Open the record of a run that has one. Raises UsageError if its storage has no such study."""
    if is_storage_missing(storage):
        raise UsageError(f"{find_storage_file(storage)}, the study of this run, is missing: restore it")
    check_readable(storage)
    record = open_study(storage, study_name)
    if record is None:
        with convert_storage_errors(storage):
            names = cut_text(", ".join(map(repr, list_studies(storage))) or "none")
        raise UsageError(
            f"{run_dir.path}: there is no study {study_name!r} in {mask_password(storage)}, which holds {names}"
        )
    return record


def check_objectives(record: Record, manifest: Manifest, run_dir: RunDir) -> None:
    """Raise UsageError if a study has other objectives than its run."""
    if record.objectives != manifest.objectives:
        found, expected = (", ".join(side.describe()) for side in (record.objectives, manifest.objectives))
        raise UsageError(
            f"the objectives of the study {manifest.study!r} must be {expected}, as in {run_dir.run_json}, "
            f"got {found}. Restore the study, or run.json"
        )


def is_storage_missing(storage: str) -> bool:
    """Return whether the file that should hold a storage is missing."""
    path = find_storage_file(storage)
    return path is not None and not path.is_file()


@contextmanager
def convert_storage_errors(storage: str) -> Iterator[None]:
    """Convert all errors of a storage except outages to UsageError. Each kind of storage raises its own exceptions."""
    try:
        yield
    except (UsageError, StorageUnavailableError):
        raise
    except RunError as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        shown = mask_password(storage)
        if shown.endswith("://..."):
            raise UsageError(
                f"the storage {shown}: {type(error).__name__}: the URL cannot be parsed. In user names and "
                "passwords, write %40 for @, %3A for : and %2F for /"
            ) from None
        reason = cut_text(format_error(error))
        raise UsageError(f"the storage {shown}: {type(error).__name__}: {reason}") from error
