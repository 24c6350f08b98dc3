"""The errors that end a run, such as mistakes that a person can mend, and the exit statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hpo.text_format import make_printable_lines


class UsageError(ValueError):
    """A bad option, file, path or value: one message that names it, shows it and says what would work."""

    def __str__(self) -> str:
        return make_printable_lines(super().__str__())  # the names and values in it may hold control characters


class CollectiveUsageError(UsageError):
    """A mistake that all ranks of a job know of, and end with at the same time."""


class RunError(RuntimeError):
    """The run cannot go on, as with a full disk or a rank that is stuck: one message, and the whole job ends."""

    def __str__(self) -> str:
        return make_printable_lines(super().__str__())


class StorageUnavailableError(RunError):
    """A storage does not answer, and the run waits no longer: it has waited long enough, or it is stopping."""


class ExitStatus(IntEnum):
    """Exit statuses of run_islands.py, for job scripts; MORE_TO_DO is sysexits' EX_TEMPFAIL, "try again"."""

    BUDGET_SPENT = 0
    CRASHED = 1
    USAGE_ERROR = 2
    NOTHING_SUCCEEDED = 3
    UNFINISHED = 75
    INTERRUPTED = 130


@dataclass(frozen=True)
class StopRequest:
    """Why a whole run is to stop, the exit status that it then has, and the option that a resumed run needs."""

    reason: str
    status: int = ExitStatus.UNFINISHED
    remedy: str = ""


class DuplicateError(Exception):
    """These hyperparameters were evaluated before, or are being evaluated."""
