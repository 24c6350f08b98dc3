"""Errors that end a run, and exit statuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hpo.text_format import make_printable_lines


class UsageError(ValueError):
    """An option, file, path or value of the user is not valid. The message has a remedy."""

    def __str__(self) -> str:
        # Names and values may have control characters.
        return make_printable_lines(super().__str__())


class CollectiveUsageError(UsageError):
    """A UsageError that is raised on all ranks of a job."""


class RunError(RuntimeError):
    """The run cannot continue, for example since the disk is full. The job ends with it."""

    def __str__(self) -> str:
        return make_printable_lines(super().__str__())


class StorageUnavailableError(RunError):
    """The storage of the study does not answer, and the run has stopped waiting for it."""


class ExitStatus(IntEnum):
    """Exit statuses of a search, for job scripts.

    After UNFINISHED (EX_TEMPFAIL of sysexits.h), the job should be submitted again.
    """

    BUDGET_SPENT = 0
    CRASHED = 1
    USAGE_ERROR = 2
    NOTHING_SUCCEEDED = 3
    UNFINISHED = 75
    INTERRUPTED = 130


@dataclass(frozen=True)
class StopRequest:
    """A request to stop the whole run."""

    reason: str
    """The reason in words, for messages."""
    status: int = ExitStatus.UNFINISHED
    """The exit status of the job."""
    remedy: str = ""
    """The option that must be given when the run is resumed; "" if none is needed."""


class DuplicateError(Exception):
    """The run already has an evaluation of these hyperparameters, running or ended."""
