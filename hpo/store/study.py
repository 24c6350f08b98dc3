"""Finding the study of a run in its storage, with one message for whatever may be wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpo.errors import OutageError, RunError, UsageError
from hpo.store.manifest import Manifest, confirming
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, studies
from hpo.store.url import file_of, without_password
from hpo.text import message, short


def open_study(storage: str, study_name: str) -> Record | None:
    """Open the record of a run; None where its storage has no such study."""
    with mistakes(storage):
        try:
            return Record(storage, study_name)
        except KeyError:
            return None


def confirmations_of(storage: str, study_name: str) -> Record | None:
    """Open the record of the evaluations that confirm the best of a run; None where there is none yet.

    Raises UsageError where the study that would hold it is another run's.
    """
    name = confirming(study_name)
    if is_missing(storage):
        return None
    record = open_study(storage, name)
    if record is None or record.about().get("confirms") == study_name:
        return record
    if "space" in record.about() or record.evaluations():
        raise UsageError(
            f"--confirm-seeds: {without_password(storage)} already holds a study named {name!r}, which is another "
            f"run's: "
            "name another --run-dir, since a study has the name of its run directory"
        )
    return None


def existing_study(run_dir: RunDir, storage: str, study_name: str) -> Record:
    """Open the record of a run that is known to have one; raises UsageError where its storage has no such study."""
    if is_missing(storage):
        raise UsageError(f"{file_of(storage)}, the study of this run, is missing: restore it")
    check_readable(storage)
    record = open_study(storage, study_name)
    if record is None:
        with mistakes(storage):
            names = short(", ".join(map(repr, studies(storage))) or "none")
        raise UsageError(
            f"{run_dir.path}: there is no study {study_name!r} in {without_password(storage)}, which holds {names}"
        )
    return record


def check_objectives(record: Record, manifest: Manifest, run_dir: RunDir) -> None:
    """Raise a UsageError where a study has other objectives than its run."""
    if record.objectives != manifest.objectives:
        there, here = (", ".join(one.described()) for one in (record.objectives, manifest.objectives))
        raise UsageError(
            f"the study {manifest.study!r} has the objectives {there}, and {run_dir.run_json} says {here}: one of them "
            "is not this run's"
        )


def is_missing(storage: str) -> bool:
    """Tell whether the file that should hold a storage is not there."""
    path = file_of(storage)
    return path is not None and not path.is_file()


@contextmanager
def mistakes(storage: str) -> Iterator[None]:
    """Turn what a storage raises into UsageError, but for outages: each kind of storage has its own exceptions."""
    try:
        yield
    except (UsageError, OutageError):
        raise
    except RunError as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        shown = without_password(storage)
        if shown.endswith("://..."):
            raise UsageError(
                f"the storage {shown}: {type(error).__name__}: it is no URL that can be read; in user names and "
                "passwords, write %40 for @, %3A for : and %2F for /"
            ) from None
        reason = short(message(error))
        raise UsageError(f"the storage {shown}: {type(error).__name__}: {reason}") from error
