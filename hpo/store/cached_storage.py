"""Cache a study in memory for the only process that writes to it; write changes in batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

from optuna.storages import BaseStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

from hpo.store.journal import GroupCommit
from hpo.store.storage import FileStorage, StorageRetry


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: CachedStorage, *arguments: Any, **options: Any) -> Any:
        return getattr(self._storage, name)(*arguments, **options)

    return call


class CachedStorage(BaseStorage):
    """Cache one study of an Optuna storage, for the only process that writes to this study.

    The study is read once, because reads are slow: a database needs a round trip, and a journal
    copies all trials. After that, each change is made in memory and in the storage. A program
    outside the run may add trials. They appear here when this process adds its next trial.

    Losses are durable (on disk) after `commit`. Inside `batch_writes`, all changes of a journal are
    durable after `commit`. All other changes are durable at once.

    Args:
        retry: Repeats writes of losses while a database is unavailable; None to raise the error at
        once.
    """

    def __init__(
        self, storage: BaseStorage, study_id: int, retry: StorageRetry | None = None
    ) -> None:
        self._storage = storage
        self._study_id = study_id
        self._retry = retry
        self._trials: list[FrozenTrial] = list(storage.get_all_trials(study_id, deepcopy=False))
        self._numbers = {trial._trial_id: trial.number for trial in self._trials}
        self._changed_sets: list[set[int]] = []
        self._pending_values: list[tuple[int, int, float]] = []
        self._group_commit: GroupCommit | None = None

    def note_changes(self) -> set[int]:
        """Return a set to which the numbers of all changed trials are added from now on."""
        changed: set[int] = set()
        self._changed_sets.append(changed)
        return changed

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Inside ``with``, collect all changes of a journal; `commit` must end the block."""
        journal = self._storage.journal if isinstance(self._storage, FileStorage) else None
        with journal.batch_writes() if journal else nullcontext() as self._group_commit:
            yield

    def commit(self) -> bool:
        """Make all changes since the previous commit durable, and return whether there were any."""
        has_values = bool(self._pending_values)
        self._write_pending_values()
        return self._group_commit.commit() if self._group_commit is not None else has_values

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial and return its id. In a journal, `batch_writes` delays it to `commit`."""
        self._write_pending_values()
        trial_id = self._storage.create_new_trial(study_id, template_trial)
        trial = self._storage.get_trial(trial_id)
        if trial.number > len(self._trials):  # Another program has added trials.
            self._trials += self._storage.get_all_trials(study_id, deepcopy=False)[
                len(self._trials) : trial.number
            ]
        self._trials.append(trial)
        self._numbers.update(
            {added._trial_id: added.number for added in self._trials[len(self._numbers) :]}
        )
        return trial_id

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Set the state of a trial, and its values; return False if it runs already."""
        self._write_pending_values()
        is_set = self._storage.set_trial_state_values(trial_id, state, values)
        times: dict[str, datetime] = {}
        if state == TrialState.RUNNING:
            times["datetime_start"] = datetime.now()
        elif state.is_finished():
            times["datetime_complete"] = datetime.now()
        found = {"values": list(values)} if values is not None else {}
        self._update_trial(trial_id, state=state, **times, **found)
        return is_set

    def set_trial_intermediate_value(
        self, trial_id: int, step: int, intermediate_value: float
    ) -> None:
        """Add the loss of a step; written at the next commit, or before another change."""
        self._pending_values.append((trial_id, step, intermediate_value))
        known = self.get_trial(trial_id).intermediate_values
        self._update_trial(trial_id, intermediate_values={**known, step: intermediate_value})

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set an attribute of a trial."""
        self._write_pending_values()
        self._storage.set_trial_user_attr(trial_id, key, value)
        self._update_trial(trial_id, user_attrs={**self.get_trial(trial_id).user_attrs, key: value})

    def _write_pending_values(self) -> None:
        """Write losses: those of a database in one transaction, with one flush.

        Optuna writes each loss in its own transaction, and flushes the disk after each.
        """
        values = self._pending_values
        self._pending_values = []
        if not isinstance(self._storage, _CachedStorage) or len(values) <= 1:
            for value in values:
                self._storage.set_trial_intermediate_value(*value)
            return
        database = self._storage._backend

        def write() -> None:
            from optuna.storages._rdb.storage import _create_scoped_session

            with _create_scoped_session(database.scoped_session, True) as session:
                for value in values:
                    database._set_trial_intermediate_value_without_commit(session, *value)

        if self._retry is None:
            write()
        else:
            self._retry.call(write)  # To set a value twice does no harm.

    def _update_trial(self, trial_id: int, **fields: Any) -> None:
        """Replace a cached trial by a changed copy: callers may still use the old object."""
        number = self._numbers[trial_id]
        trial = copy.copy(self._trials[number])
        for name, value in fields.items():
            setattr(trial, name, value)
        self._trials[number] = trial
        for changed in self._changed_sets:
            changed.add(number)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return the cached trial. The caller must not change it."""
        return self._trials[self._numbers[trial_id]]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials of a study, optionally only in some states.

        Without `deepcopy` and `states`, the result is the cached list itself. Trials that are added
        later appear in it.
        """
        if study_id != self._study_id:
            return self._storage.get_all_trials(study_id, deepcopy, states)
        found = self._trials
        if states is not None:
            found = [trial for trial in found if trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """Return the id of the study's trial with this number."""
        assert study_id == self._study_id
        return self._trials[trial_number]._trial_id

    # These methods need no cache: studies do not change here, and trials are created with all
    # hyperparameters.
    create_new_study = _delegate("create_new_study")
    delete_study = _delegate("delete_study")
    set_study_user_attr = _delegate("set_study_user_attr")
    set_study_system_attr = _delegate("set_study_system_attr")
    get_study_id_from_name = _delegate("get_study_id_from_name")
    get_study_name_from_id = _delegate("get_study_name_from_id")
    get_study_directions = _delegate("get_study_directions")
    get_study_user_attrs = _delegate("get_study_user_attrs")
    get_study_system_attrs = _delegate("get_study_system_attrs")
    get_all_studies = _delegate("get_all_studies")
    set_trial_param = _delegate("set_trial_param")
    set_trial_system_attr = _delegate("set_trial_system_attr")
