"""Databases that are away for a while, as when they are restarted or somebody has locked them: they are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from hpo import clock
from hpo.errors import OutageError
from hpo.report.text import duration

_PATIENCE = 600.0  # seconds
_SHORTEST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# What databases raise as the same kind of error: PostgreSQL, MySQL and SQLite.
_MISTAKES = (
    *("authentication failed", "Access denied", "no password supplied", "does not exist", "Unknown database"),
    *("no such table", "readonly database", "unable to open database file"),
)
_METHODS = [name for name, member in vars(BaseStorage).items() if callable(member) and not name.startswith("_")]

T = TypeVar("T")


def _never(_: Exception | None) -> None:
    """Say that a step has not been done where its answer did not come: it can be taken twice."""


class Patience:
    """Waits for a storage, called `shown` to people, for ten minutes at most, and not while `is_over()`.

    It says so by `say`. Several threads may have one: an outage is one to all of them.
    """

    def __init__(self, shown: str, say: Callable[[str], object], is_over: Callable[[], bool] = lambda: False) -> None:
        self._shown = shown
        self._say = say
        self._is_over = is_over
        self._away_since: float | None = None
        self._lock = threading.Lock()

    def call(self, step: Callable[[], T], has_been_done: Callable[[Exception | None], T | None] = _never) -> T:
        """Take a step, again and again while the storage is away; OutageError where it does not come back.

        What has been done though nobody was told so is `has_been_done()`, which gets what the next attempt raised.
        """
        pause, failed = _SHORTEST_PAUSE, False
        while True:
            try:
                if failed and (result := has_been_done(None)) is not None:
                    return result
                result = step()
            except Exception as error:  # noqa: PERF203 - it waits
                if failed and (result := has_been_done(error)) is not None:
                    return result
                if not is_outage(error):
                    raise
                failed = True
                self._wait(error, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self._is_back()
                return result

    def _wait(self, error: Exception, pause: float) -> None:
        reason = _reason(error)
        with self._lock:
            if self._away_since is None:
                self._away_since = clock.now()
                self._say(
                    f"warning: the storage {self._shown} does not answer ({reason}): waiting for it, for "
                    f"{duration(_PATIENCE)} at most"
                )
            away = clock.now() - self._away_since
        if self._is_over() or away > _PATIENCE:
            raise OutageError(
                f"the storage {self._shown} has not answered for {duration(away)} ({reason}): what it holds is whole, "
                "--resume goes on with it"
            ) from error
        time.sleep(pause)

    def _is_back(self) -> None:
        with self._lock:
            if self._away_since is not None:
                self._say(f"the storage {self._shown} answers again, after {duration(clock.now() - self._away_since)}")
                self._away_since = None


def patient(storage: BaseStorage, patience: Patience) -> BaseStorage:
    """Let a storage wait for itself in whatever is asked of it."""
    for name in _METHODS:
        setattr(storage, name, partial(_call, storage, getattr(storage, name), patience))
    return storage


def _call(storage: BaseStorage, method: Callable[..., Any], patience: Patience, *args: Any, **options: Any) -> Any:
    step = partial(method, *args, **options)
    if method.__name__ == "set_trial_state_values":
        return patience.call(step, _ended)
    if method.__name__ == "create_new_trial":
        known = len(storage.get_all_trials(args[0], deepcopy=False))
        template = args[1] if len(args) > 1 else options["template_trial"]
        return patience.call(step, partial(_added, storage, args[0], known, template))
    return patience.call(step)


def _ended(error: Exception | None) -> bool | None:
    """Say so where a trial has ended though no answer came."""
    return True if isinstance(error, UpdateFinishedTrialError) else None


def _added(
    storage: BaseStorage, study_id: int, known: int, template: FrozenTrial, error: Exception | None
) -> int | None:
    """Give the trial that has been added though no answer came; others may have added theirs meanwhile."""
    if error is None:
        for trial in storage.get_all_trials(study_id, deepcopy=False)[known:]:
            if (trial.params, trial.user_attrs) == (template.params, template.user_attrs):
                return trial._trial_id
    return None


def is_outage(error: BaseException | None) -> bool:
    """Tell whether a storage is away, and does not refuse what it was asked for."""
    from sqlalchemy import exc

    if isinstance(error, StorageInternalError):
        error = error.__cause__
    if any(text in str(error) for text in _MISTAKES):
        return False
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, (exc.InterfaceError, exc.OperationalError, exc.TimeoutError))


def _reason(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return " ".join(str(getattr(cause, "orig", None) or cause).split())[:200] or type(cause).__name__
