"""A study that one process alone writes to: it reads from memory, and writes what has come together, together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from hpo.store.intermediate_values import set_intermediate_values
from hpo.store.journal import GroupCommit
from hpo.store.storage import FileStorage
from hpo.store.storage_retry import StorageRetry


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: CachedStorage, *arguments: Any, **options: Any) -> Any:
        return getattr(self._storage, name)(*arguments, **options)

    return call


class CachedStorage(BaseStorage):
    """A storage as the one process sees it that writes to one of its studies; all else is the storage's own.

    The study is read once. What changes is changed here and there, but nothing is asked again: of a database, each
    question takes a round trip, and a journal copies all its trials for each. Trials that other programs add are known
    once this process has added one behind them.

    Losses, and all changes of a journal that is `collecting`, are durable when they are committed, and all others at
    once. With `patience`, a database that is away is waited for.
    """

    def __init__(self, storage: BaseStorage, study_id: int, retry: StorageRetry | None = None) -> None:
        self._storage = storage
        self._study_id = study_id
        self._retry = retry
        self._trials: list[FrozenTrial] = list(storage.get_all_trials(study_id, deepcopy=False))
        self._numbers = {trial._trial_id: trial.number for trial in self._trials}
        self._pending_values: list[tuple[int, int, float]] = []
        self._group_commit: GroupCommit | None = None

    @contextmanager
    def batch_writes(self) -> Iterator[None]:
        """Let a journal keep what is written inside ``with`` until it is committed, the last of it by the caller."""
        journal = self._storage.journal if isinstance(self._storage, FileStorage) else None
        with journal.batch_writes() if journal else nullcontext() as self._group_commit:
            yield

    def commit(self) -> bool:
        """Make durable what was written since the last commit, and tell whether there was anything."""
        has_values = bool(self._pending_values)
        self._write_pending_values()
        return self._group_commit.commit() if self._group_commit is not None else has_values

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial, durably unless a journal is collecting, and return its id."""
        self._write_pending_values()
        trial_id = self._storage.create_new_trial(study_id, template_trial)
        trial = self._storage.get_trial(trial_id)
        if trial.number > len(self._trials):  # another program has added some
            self._trials += self._storage.get_all_trials(study_id, deepcopy=False)[len(self._trials) : trial.number]
        self._trials.append(trial)
        self._numbers.update({one._trial_id: one.number for one in self._trials[len(self._numbers) :]})
        return trial_id

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Begin or end a trial."""
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

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Keep a loss for the next commit, or the next other change."""
        self._pending_values.append((trial_id, step, intermediate_value))
        known = self.get_trial(trial_id).intermediate_values
        self._update_trial(trial_id, intermediate_values={**known, step: intermediate_value})

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Set an attribute of a trial."""
        self._write_pending_values()
        self._storage.set_trial_user_attr(trial_id, key, value)
        self._update_trial(trial_id, user_attrs={**self.get_trial(trial_id).user_attrs, key: value})

    def _write_pending_values(self) -> None:
        values, self._pending_values = self._pending_values, []
        if values:
            set_intermediate_values(self._storage, values, self._retry)

    def _update_trial(self, trial_id: int, **fields: Any) -> None:
        """Put a changed copy of a trial in its place: others may still look at the trial as it was."""
        number = self._numbers[trial_id]
        trial = copy.copy(self._trials[number])
        for name, value in fields.items():
            setattr(trial, name, value)
        self._trials[number] = trial

    # What is read from memory

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial of the study; not to be changed."""
        return self._trials[self._numbers[trial_id]]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return trials; without `deepcopy` and `states`, the list of all itself, which grows."""
        if study_id != self._study_id:
            return self._storage.get_all_trials(study_id, deepcopy, states)
        found = self._trials if states is None else [trial for trial in self._trials if trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """Return the id of the study's trial of this number."""
        assert study_id == self._study_id
        return self._trials[trial_number]._trial_id

    # What is the storage's own; hyperparameters are a trial's from its beginning

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
