"""Write many losses to an Optuna storage, in one transaction if the storage is a database."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage

from hpo.store.storage_retry import StorageRetry

IntermediateValue = tuple[int, int, float]  # Id of the trial, step and loss.


def set_intermediate_values(
    storage: BaseStorage, values: Sequence[IntermediateValue], retry: StorageRetry | None = None
) -> None:
    """Write losses to a storage.

    Optuna writes each loss in its own transaction, and flushes the disk after each transaction. If the storage is a
    database, this function uses one transaction for all losses. `retry` repeats the transaction while the database is
    unavailable; None raises the error at once.
    """
    if isinstance(storage, _CachedStorage) and len(values) > 1:
        step = partial(_set_in_one_transaction, storage._backend, values)
        if retry is None:
            step()
        else:
            retry.call(step)  # To set a value twice does no harm.
        return
    for value in values:
        storage.set_trial_intermediate_value(*value)


def _set_in_one_transaction(database: RDBStorage, values: Sequence[IntermediateValue]) -> None:
    from optuna.storages._rdb.storage import _create_scoped_session

    with _create_scoped_session(database.scoped_session, True) as session:
        for value in values:
            database._set_trial_intermediate_value_without_commit(session, *value)
