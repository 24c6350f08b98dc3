"""Finding the study of a run in its storage, with one message for whatever may be wrong there."""

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
    """Open the record of a run; None where its storage has no such study."""
    with convert_storage_errors(storage):
        try:
            return Record(storage, study_name)
        except KeyError:
            return None


def open_confirmations(storage: str, study_name: str) -> Record | None:
    """Open the record of the evaluations that confirm the best of a run; None where there is none yet.

    Raises UsageError where the study that would hold it is another run's.
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
            f"run's: "
            "name another --run-dir, since a study has the name of its run directory"
        )
    return None


def open_existing_study(run_dir: RunDir, storage: str, study_name: str) -> Record:
    """Open the record of a run that is known to have one; raises UsageError where its storage has no such study."""
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
    """Raise a UsageError where a study has other objectives than its run."""
    if record.objectives != manifest.objectives:
        there, here = (", ".join(one.describe()) for one in (record.objectives, manifest.objectives))
        raise UsageError(
            f"the study {manifest.study!r} has the objectives {there}, and {run_dir.run_json} says {here}: one of them "
            "is not this run's"
        )


def is_storage_missing(storage: str) -> bool:
    """Tell whether the file that should hold a storage is not there."""
    path = find_storage_file(storage)
    return path is not None and not path.is_file()


@contextmanager
def convert_storage_errors(storage: str) -> Iterator[None]:
    """Turn what a storage raises into UsageError, but for outages: each kind of storage has its own exceptions."""
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
                f"the storage {shown}: {type(error).__name__}: it is no URL that can be read; in user names and "
                "passwords, write %40 for @, %3A for : and %2F for /"
            ) from None
        reason = cut_text(format_error(error))
        raise UsageError(f"the storage {shown}: {type(error).__name__}: {reason}") from error
