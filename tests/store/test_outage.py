"""Test records in databases that are unavailable for a while.

A thread locks an SQLite file to simulate this.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from hpo import Float, SearchSpace
from hpo.errors import StorageUnavailableError
from hpo.store.record import Record
from hpo.store.storage import StorageRetry, open_storage, wrap_with_retry
from tests.support.runs import claim_evaluation

SPACE = SearchSpace(x=Float(0.0, 1.0))


def make_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}?timeout=0"


def make_record(
    folder: Path, messages: list[str], is_over: Callable[[], bool] = lambda: False
) -> Record:
    Record.create(make_url(folder), "run", SPACE.describe())
    return Record(make_url(folder), "run", StorageRetry("the database", messages.append, is_over))


def lock_database(folder: Path, seconds: float, lock: str = "EXCLUSIVE") -> threading.Thread:
    """Lock the database now, and unlock it after `seconds`, in the returned thread."""
    locked = threading.Event()

    def hold() -> None:
        connection = sqlite3.connect(folder / "study.db", isolation_level=None)
        connection.execute(f"BEGIN {lock}")
        locked.set()
        time.sleep(seconds)
        connection.execute("COMMIT")
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(10)
    return thread


@pytest.mark.slow
def test_record_during_outage_writes_each_change_once(tmp_path: Path) -> None:
    messages: list[str] = []
    record = make_record(tmp_path, messages)
    for number in range(2):
        holder = lock_database(tmp_path, 1.0)
        assignment = claim_evaluation(
            record,
            {"x": number / 2},
            SPACE.make_distributions(),
            9,
            island=0,
            worker=0,
            generation=0,
        )
        record.report(assignment, 1, 0.5)
        holder.join()
        holder = lock_database(tmp_path, 1.0)
        record.complete(assignment, 0.5, 1.0, {})
        holder.join()
    evaluations = Record(make_url(tmp_path), "run").read_evaluations()
    assert [(evaluation.state, dict(evaluation.curve)) for evaluation in evaluations] == [
        ("complete", {1: 0.5})
    ] * 2
    assert len(messages) == 8, "each outage must print one line at its start and one at its end"
    first, second = messages[:2]
    why = "does not answer (database is locked): waiting for at most 10 min 00 s"
    assert first == f"warning: the storage the database {why}"
    assert second.startswith("the storage the database answers again, after ")


@pytest.mark.slow
def test_retry_after_lost_answer_does_not_repeat_change(tmp_path: Path) -> None:
    Record.create(make_url(tmp_path), "run", SPACE.describe())
    storage = open_storage(make_url(tmp_path))
    study, lost = storage.get_study_id_from_name("run"), 0

    def lose_first_answers(method: Callable[..., Any]) -> Callable[..., Any]:
        answered = set[str]()

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal lost
            key = f"{len(storage.get_all_trials(study, deepcopy=False))} {arguments}"
            result = method(*arguments, **options)
            if key not in answered:
                answered.add(key)
                lost += 1
                raise OperationalError("", {}, Exception("the connection was lost"))
            return result

        call.__name__ = method.__name__
        return call

    for name in ("create_new_trial", "set_trial_state_values"):
        setattr(storage, name, lose_first_answers(getattr(storage, name)))
    messages: list[str] = []
    record = Record(wrap_with_retry(storage, StorageRetry("the database", messages.append)), "run")
    # The second trial has the same hyperparameters as the first, which has ended.
    for _ in range(2):
        record.enqueue({"x": 0.5}, SPACE.make_distributions())
        assignment = claim_evaluation(
            record, None, SPACE.make_distributions(), 9, island=0, worker=0, generation=0
        )
        record.complete(assignment, 0.5, 1.0, {})
    assert lost == 6, "two trials are enqueued, started and ended"
    evaluations = Record(make_url(tmp_path), "run").read_evaluations()
    assert [
        (evaluation.state, evaluation.params, evaluation.loss) for evaluation in evaluations
    ] == [("complete", {"x": 0.5}, 0.5)] * 2
    assert messages == []


@pytest.mark.slow
def test_outage_of_writes_is_reported_while_reads_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.store.storage._MAX_WAIT", 3.0)
    messages: list[str] = []
    record = make_record(tmp_path, messages)
    assignment = claim_evaluation(
        record, {"x": 0.5}, SPACE.make_distributions(), 9, island=0, worker=0, generation=0
    )
    holder = lock_database(tmp_path, 7.0, "IMMEDIATE")
    ended: list[BaseException] = []

    def write() -> None:
        try:
            record.report(assignment, 1, 0.5)
        except StorageUnavailableError as error:
            ended.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    while holder.is_alive() and writer.is_alive():
        assert len(record.read_evaluations()) == 1
        time.sleep(0.05)
    holder.join()
    writer.join()
    assert [type(error) for error in ended] == [StorageUnavailableError]
    assert len(messages) == 1, "the outage must be reported once"


def test_short_lock_conflict_prints_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    record = make_record(tmp_path, messages)
    holder = lock_database(tmp_path, 0.1)
    assert record.read_evaluations() == []
    holder.join()
    assert messages == []


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.slow
def test_outage_that_is_too_long_raises_unavailable_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    if not stops:
        monkeypatch.setattr("hpo.store.storage._MAX_WAIT", 0.5)
    record = make_record(tmp_path, [], is_over=lambda: stops)
    holder = lock_database(tmp_path, 1.5)
    with pytest.raises(
        StorageUnavailableError,
        match=r"has not answered for \d\.\d s \(database is locked\)\. It is undamaged",
    ):
        record.read_evaluations()
    holder.join()


def test_error_that_is_not_an_outage_is_raised_at_once(tmp_path: Path) -> None:
    record = make_record(tmp_path, [])
    with pytest.raises(KeyError):
        record._storage.get_study_id_from_name("another")
