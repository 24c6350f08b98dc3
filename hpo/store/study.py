"""Open the study of a run, and report problems of its storage as UsageError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpo.errors import RunError, StorageUnavailableError, UsageError
from hpo.store.journal import has_no_study
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


def create_study(run_dir: RunDir, storage: str, manifest: Manifest) -> None:
    """Create the study of a new run; raise UsageError if the storage holds another of its name.

    The study already exists if an earlier session was killed before it wrote run.json.
    """
    study = manifest.study
    run_dir.remove_stale_files()
    record = open_study(storage, study)
    if record is None and not has_no_study(run_dir.journal):
        raise UsageError(f"{run_dir.journal} is not the study of a run. Give another --run-dir")
    if record is None or not (record.read_attributes().get("space") or record.read_evaluations()):
        with convert_storage_errors(storage):
            Record.create(storage, study, manifest.space, objectives=manifest.objectives)
    elif record.read_evaluations() or record.read_attributes().get("space") != manifest.space:
        missing = (
            f"{run_dir.run_json} is missing; restore it, or " if run_dir.journal.exists() else ""
        )
        raise UsageError(
            f"{mask_password(storage)} already has a study named {study!r}: {missing}give another "
            "--run-dir, since a study has the name of its run directory"
        )


def open_confirmations(storage: str, study_name: str) -> Record | None:
    """Open the confirmations of a run; raise UsageError if its name belongs to another run."""
    name = make_confirmation_name(study_name)
    if is_storage_missing(storage):
        return None
    record = open_study(storage, name)
    if record is None or record.read_attributes().get("confirms") == study_name:
        return record
    if "space" in record.read_attributes() or record.read_evaluations():
        raise UsageError(
            f"--confirm-seeds: {mask_password(storage)} already holds a study named {name!r}, "
            "which is another run's: choose another --run-dir, because studies are named after "
            "run directories"
        )
    return None


def open_existing_study(run_dir: RunDir, storage: str, study_name: str) -> Record:
    """Open the record of a run; raise UsageError if its storage or its study is missing."""
    if is_storage_missing(storage):
        raise UsageError(
            f"{find_storage_file(storage)}, the study of this run, is missing: restore it"
        )
    check_readable(storage)
    record = open_study(storage, study_name)
    if record is None:
        with convert_storage_errors(storage):
            names = cut_text(", ".join(map(repr, list_studies(storage))) or "none")
        raise UsageError(
            f"{run_dir.path}: there is no study {study_name!r} in {mask_password(storage)}, which "
            f"holds {names}"
        )
    return record


def check_objectives(record: Record, manifest: Manifest, run_dir: RunDir) -> None:
    """Raise UsageError if the objectives of a study differ from the objectives in run.json."""
    if record.objectives != manifest.objectives:
        raise UsageError(
            f"the objectives of the study {manifest.study!r} must be "
            f"{', '.join(manifest.objectives.describe())}, as in {run_dir.run_json}, got "
            f"{', '.join(record.objectives.describe())}. Restore the study, or run.json"
        )


def is_storage_missing(storage: str) -> bool:
    """Return whether a storage should be in a file that is missing."""
    path = find_storage_file(storage)
    return path is not None and not path.is_file()


@contextmanager
def convert_storage_errors(storage: str) -> Iterator[None]:
    """Inside ``with``, convert errors of all storages to UsageError, except outages."""
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
                f"the storage {shown}: {type(error).__name__}: the URL cannot be parsed. In user "
                "names and passwords, write %40 for @, %3A for : and %2F for /"
            ) from None
        reason = cut_text(format_error(error))
        raise UsageError(f"the storage {shown}: {type(error).__name__}: {reason}") from error
