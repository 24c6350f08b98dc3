"""Waiting for databases that are away for a while, because they are restarted or locked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from hpo.errors import StorageUnavailableError
from hpo.process import clock
from hpo.text_format import format_duration

_MAX_WAIT = 600.0  # seconds
_SILENT_WAIT = 0.5  # seconds, for which workers that write at the same time may hinder each other
_MIN_PAUSE = 0.2
_MAX_PAUSE = 5.0
# Messages of mistakes, which PostgreSQL, MySQL and SQLite raise as the same kind of error as outages.
_USAGE_ERRORS = (
    *("authentication failed", "Access denied", "no password supplied", "does not exist", "Unknown database"),
    *("no such table", "readonly database", "unable to open database file"),
)
_STORAGE_METHODS = [name for name, member in vars(BaseStorage).items() if callable(member) and not name.startswith("_")]

T = TypeVar("T")


class StorageRetry:
    """Waits for a storage for ten minutes at most, and no longer once `is_over()` is true.

    `shown` is the storage's name in the messages that `say` is called with. Several threads may share one Patience: an
    outage is told once for all of them.
    """

    def __init__(self, shown: str, say: Callable[[str], object], is_over: Callable[[], bool] = lambda: False) -> None:
        self._storage_name = shown
        self._report = say
        self._is_over = is_over
        self._waiting_calls = 0  # calls that wait, and have told of the outage
        self._lock = threading.Lock()

    def call(self, step: Callable[[], T], retry_step: Callable[[], T] | None = None) -> T:
        """Take a step, again and again while the storage is away, and return its result.

        A step may have taken effect although it raised an error: then `again` is tried in its place. Raises OutageError
        where the storage does not come back.
        """
        try:
            return step()
        except Exception as error:
            if not is_outage(error):
                raise
            return self._retry_until_timeout(retry_step or step, error)

    def _retry_until_timeout(self, step: Callable[[], T], error: Exception) -> T:
        since, pause, told = clock.now(), _MIN_PAUSE, False
        while True:
            away = clock.now() - since
            self._check_deadline(error, away)
            if away > _SILENT_WAIT and not told:
                told = True
                self._report_outage(error)
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
            try:
                result = step()
            except Exception as another:
                if not is_outage(another):
                    raise
                error = another
            else:
                if told:
                    self._report_recovery(clock.now() - since)
                return result

    def _check_deadline(self, error: Exception, away: float) -> None:
        if self._is_over() or away > _MAX_WAIT:
            raise StorageUnavailableError(
                f"the storage {self._storage_name} has not answered for {format_duration(away)} "
                f"({_format_reason(error)}): what it holds is "
                "whole, --resume goes on with it"
            ) from error

    def _report_outage(self, error: Exception) -> None:
        with self._lock:
            self._waiting_calls += 1
            if self._waiting_calls == 1:
                self._report(
                    f"warning: the storage {self._storage_name} does not answer ({_format_reason(error)}): waiting "
                    f"for it, for "
                    f"{format_duration(_MAX_WAIT)} at most"
                )

    def _report_recovery(self, away: float) -> None:
        with self._lock:
            self._waiting_calls -= 1
            if self._waiting_calls == 0:
                self._report(f"the storage {self._storage_name} answers again, after {format_duration(away)}")


def wrap_with_retry(storage: BaseStorage, retry: StorageRetry) -> BaseStorage:
    """Return a storage with all of its methods changed so that they wait while it is away."""
    for name in _STORAGE_METHODS:
        setattr(storage, name, partial(_call_with_retry, storage, getattr(storage, name), retry))
    return storage


def _call_with_retry(
    storage: BaseStorage, method: Callable[..., Any], retry: StorageRetry, *args: Any, **options: Any
) -> Any:
    step = partial(method, *args, **options)
    if method.__name__ == "set_trial_state_values":
        return retry.call(step, partial(_end_trial, step))
    if method.__name__ == "create_new_trial":
        template = args[1] if len(args) > 1 else options["template_trial"]
        return retry.call(step, partial(_add_trial, step, storage, args[0], template))
    return retry.call(step)


def _end_trial(step: Callable[[], bool]) -> bool:
    """End a trial; where it has been ended already, return true, too."""
    try:
        return step()
    except UpdateFinishedTrialError:
        return True


def _add_trial(step: Callable[[], int], storage: BaseStorage, study_id: int, template: FrozenTrial) -> int:
    """Add a trial unless it is there already, and return its id: no two have the same parameters and attributes."""
    for trial in storage.get_all_trials(study_id, deepcopy=False):
        if (trial.params, trial.user_attrs) == (template.params, template.user_attrs):
            return trial._trial_id
    return step()


def is_outage(error: BaseException | None) -> bool:
    """Tell whether an error says that a storage is away, and not that it refuses a call."""
    from sqlalchemy import exc

    if isinstance(error, StorageInternalError):
        error = error.__cause__
    if any(text in str(error) for text in _USAGE_ERRORS):
        return False
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, (exc.InterfaceError, exc.OperationalError, exc.TimeoutError))


def _format_reason(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return " ".join(str(getattr(cause, "orig", None) or cause).split())[:200] or type(cause).__name__
