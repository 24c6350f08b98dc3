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

from hpo.errors import OutageError
from hpo.process import clock
from hpo.text import duration

_PATIENCE = 600.0  # seconds
_UNNOTICED = 0.5  # seconds, for which workers that write at the same time may hinder each other
_SHORTEST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# Messages of mistakes, which PostgreSQL, MySQL and SQLite raise as the same kind of error as outages.
_MISTAKES = (
    *("authentication failed", "Access denied", "no password supplied", "does not exist", "Unknown database"),
    *("no such table", "readonly database", "unable to open database file"),
)
_METHODS = [name for name, member in vars(BaseStorage).items() if callable(member) and not name.startswith("_")]

T = TypeVar("T")


class Patience:
    """Waits for a storage for ten minutes at most, and no longer once `is_over()` is true.

    `shown` is the storage's name in the messages that `say` is called with. Several threads may share one Patience: an
    outage is told once for all of them.
    """

    def __init__(self, shown: str, say: Callable[[str], object], is_over: Callable[[], bool] = lambda: False) -> None:
        self._shown = shown
        self._say = say
        self._is_over = is_over
        self._waiting = 0  # calls that wait, and have told of the outage
        self._lock = threading.Lock()

    def call(self, step: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """Take a step, again and again while the storage is away, and return its result.

        A step may have taken effect although it raised an error: then `again` is tried in its place. Raises OutageError
        where the storage does not come back.
        """
        try:
            return step()
        except Exception as error:
            if not is_outage(error):
                raise
            return self._call_until_it_answers(again or step, error)

    def _call_until_it_answers(self, step: Callable[[], T], error: Exception) -> T:
        since, pause, told = clock.now(), _SHORTEST_PAUSE, False
        while True:
            away = clock.now() - since
            self._give_up(error, away)
            if away > _UNNOTICED and not told:
                told = True
                self._tell(error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            try:
                result = step()
            except Exception as another:
                if not is_outage(another):
                    raise
                error = another
            else:
                if told:
                    self._is_back(clock.now() - since)
                return result

    def _give_up(self, error: Exception, away: float) -> None:
        if self._is_over() or away > _PATIENCE:
            raise OutageError(
                f"the storage {self._shown} has not answered for {duration(away)} ({_reason(error)}): what it holds is "
                "whole, --resume goes on with it"
            ) from error

    def _tell(self, error: Exception) -> None:
        with self._lock:
            self._waiting += 1
            if self._waiting == 1:
                self._say(
                    f"warning: the storage {self._shown} does not answer ({_reason(error)}): waiting for it, for "
                    f"{duration(_PATIENCE)} at most"
                )

    def _is_back(self, away: float) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self._say(f"the storage {self._shown} answers again, after {duration(away)}")


def patient(storage: BaseStorage, patience: Patience) -> BaseStorage:
    """Return a storage with all of its methods changed so that they wait while it is away."""
    for name in _METHODS:
        setattr(storage, name, partial(_call, storage, getattr(storage, name), patience))
    return storage


def _call(storage: BaseStorage, method: Callable[..., Any], patience: Patience, *args: Any, **options: Any) -> Any:
    step = partial(method, *args, **options)
    if method.__name__ == "set_trial_state_values":
        return patience.call(step, partial(_end, step))
    if method.__name__ == "create_new_trial":
        template = args[1] if len(args) > 1 else options["template_trial"]
        return patience.call(step, partial(_add, step, storage, args[0], template))
    return patience.call(step)


def _end(step: Callable[[], bool]) -> bool:
    """End a trial; where it has been ended already, return true, too."""
    try:
        return step()
    except UpdateFinishedTrialError:
        return True


def _add(step: Callable[[], int], storage: BaseStorage, study_id: int, template: FrozenTrial) -> int:
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
    if any(text in str(error) for text in _MISTAKES):
        return False
    lost = isinstance(error, exc.DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, (exc.InterfaceError, exc.OperationalError, exc.TimeoutError))


def _reason(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return " ".join(str(getattr(cause, "orig", None) or cause).split())[:200] or type(cause).__name__
