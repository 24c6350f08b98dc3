"""Test the writer of a record: durability, updates, other programs, and weights."""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event

from hpo.errors import DuplicateError, RunError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import SHARED_FIELDS, Assignment, Evaluation
from hpo.store.journal import Journal
from hpo.store.pruning import HALVING_SCHEDULES, HalvingSchedule
from hpo.store.record import Record
from hpo.store.study_client import StudyClient
from hpo.store.study_writer import StudyWriter
from hpo.store.weights import read_weights
from tests.support.checkpoints import make_drafts
from tests.support.launch import ROOT
from tests.support.limits import scale
from tests.support.runs import SPACE, make_run
from tests.support.writer_stubs import (
    DelayedClient,
    LeaderStub,
    make_client,
    make_writer,
    open_cached,
)

TWO = Objectives(("loss", "parameters"))
ISLAND_FIELDS = {"island": 0, "worker": 0, "generation": 0}


def make_params(number: int) -> dict[str, Any]:
    """Return hyperparameters that are different for each number."""
    return {
        "layers": 1 + number % 5,
        "activation": "relu",
        "lr": (number + 1) / 1000,
        "gamma": 0.75,
    }


class WriterRun:
    """A run with one writer, in the thread of the test."""

    def __init__(
        self, folder: Path, storage: str = "journal", halving: HalvingSchedule | None = None
    ) -> None:
        self.folder = folder / "run"
        make_run(self.folder)
        self.journal = self.folder / "study.log"
        self.lock = self.folder / "study.log.lock"
        self.storage = str(self.journal) if storage == "journal" else f"sqlite:///{folder}/study.db"
        if storage != "journal":
            Record.create(self.storage, "run", SPACE.describe())
        self.record, self.cached_storage = open_cached(self.storage)
        self.writer: StudyWriter = make_writer(
            self.record, self.folder, cached_storage=self.cached_storage, halving=halving
        )

    def make_leader(self) -> StudyClient:
        return DelayedClient(self.writer)

    def load_with_optuna(self) -> optuna.Study:
        """Load the study with Optuna alone, as another program does."""
        url = self.storage.startswith("sqlite")
        storage = (
            RDBStorage(self.storage) if url else JournalStorage(JournalFileBackend(self.storage))
        )
        return optuna.load_study(study_name="run", storage=storage)

    def reopen(self) -> Record:
        return Record(self.storage, "run")

    def rest(self) -> None:
        """Wait until the writer pauses, so that other programs can write."""
        time.sleep(0.25)
        self.writer.commit()


def claim_params(leader: StudyClient, number: int) -> Assignment:
    assignment = leader.claim(make_params(number), **ISLAND_FIELDS)
    assert assignment is not None
    return assignment


def list_states(evaluations: list[Evaluation]) -> list[tuple[int, str]]:
    return [(evaluation.trial, evaluation.state) for evaluation in evaluations]


@contextmanager
def count_flushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list to which each flushed file is added."""
    flushed: list[int] = []
    flush = os.fsync

    def count(file: int) -> None:
        flushed.append(file)
        flush(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", count)
        yield flushed


# Durability


def test_journal_change_is_durable_only_after_commit(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader = run.make_leader()
    assert run.writer.take_committed() == []
    with run.writer.batch_writes():
        first, second = claim_params(leader, 1), claim_params(leader, 2)
        assert list_states(run.writer.take_committed()) == [(0, "running"), (1, "running")], (
            "a claim must be durable at once"
        )
        assert [trial.state for trial in run.load_with_optuna().trials] == [TrialState.RUNNING] * 2
        leader.notify.report(first, 1, 0.5)
        leader.notify.complete(first, 0.5, 1.0, {"accuracy": 0.25})
        assert list_states(leader.read_changes())[2:] == [(0, "complete")], (
            "leaders must receive uncommitted changes"
        )
        assert run.writer.take_committed() == []
        assert run.load_with_optuna().trials[0].state == TrialState.RUNNING
        leader.call.commit()
        assert list_states(run.writer.take_committed()) == [(0, "complete")]
        trial, running = run.load_with_optuna().trials
        assert (trial.value, trial.intermediate_values, trial.params) == (
            0.5,
            {1: 0.5},
            make_params(1),
        )
        assert (trial.user_attrs["metrics"], running.state) == (
            {"accuracy": 0.25},
            TrialState.RUNNING,
        )
        assert run.writer.take_committed() == []
        leader.notify.fail(second, "rank 0: ValueError: no", "", 1.0)
        assert list_states(leader.read_changes()) == [(1, "failed")]
        assert run.writer.take_committed() == []
        assert run.load_with_optuna().trials[1].state == TrialState.RUNNING
    assert list_states(run.writer.take_committed()) == [(1, "failed")], (
        "the end of the batch must commit"
    )
    assert run.load_with_optuna().trials[1].state == TrialState.FAIL


@pytest.mark.slow
def test_database_change_is_durable_at_once_except_losses(tmp_path: Path) -> None:
    run = WriterRun(tmp_path, "sqlite")
    leader = run.make_leader()
    with run.writer.batch_writes():
        assignment = claim_params(leader, 1)
        leader.notify.report(assignment, 1, 0.5)
        assert list_states(leader.read_changes()) == [(0, "running")]
        (trial,) = run.load_with_optuna().trials
        assert (trial.state, trial.intermediate_values) == (TrialState.RUNNING, {})
        assert list_states(run.writer.take_committed()) == [(0, "running")]
        leader.call.commit()
        assert run.load_with_optuna().trials[0].intermediate_values == {1: 0.5}
        leader.notify.report(assignment, 2, 0.25)
        leader.notify.complete(assignment, 0.25, 1.0, {})
        leader.read_changes()
        (trial,) = run.load_with_optuna().trials
        assert (trial.value, trial.intermediate_values) == (0.25, {1: 0.5, 2: 0.25}), (
            "losses must be written before the end"
        )
        assert run.writer.take_committed() == []
    assert list_states(run.writer.take_committed()) == [(0, "complete")]


def test_commit_with_many_leaders_flushes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WriterRun(tmp_path)
    leaders = [run.make_leader() for _ in range(12)]
    with run.writer.batch_writes():
        assignments = [claim_params(leader, number) for number, leader in enumerate(leaders)]
        with count_flushes(monkeypatch) as flushed:
            for number, (leader, assignment) in enumerate(zip(leaders, assignments, strict=True)):
                for epoch in (1, 2, 3):
                    leader.notify.report(assignment, epoch, number / epoch)
                leader.notify.complete(assignment, number / 3, 1.0, {})
                leader.notify.log_output(assignment.number, "hello\n")
                leader.read_changes()
            assert flushed == []
            run.writer.commit()
            assert len(flushed) == 1
            run.writer.commit()
            assert len(flushed) == 1, "a commit without changes must not flush"
        assert [trial.value for trial in run.load_with_optuna().trials] == [
            number / 3 for number in range(12)
        ]
        assert (run.folder / "logs" / "11.txt").read_text() == "hello\n"


def test_claims_of_a_batch_are_flushed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WriterRun(tmp_path)
    with run.writer.batch_writes(), count_flushes(monkeypatch) as flushed:
        for number in range(12):
            run.writer.answer("claim", make_params(number), **ISLAND_FIELDS)
        assert flushed == []
        assert run.load_with_optuna().trials == []
        run.writer.commit_if_due()
        assert len(flushed) == 1
        assert len(run.load_with_optuna().trials) == 12
        run.writer.commit_if_due()
        assert len(flushed) == 1


def test_direct_connection_makes_change_durable_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_run(tmp_path / "run")
    leader = make_client(make_writer(record, tmp_path / "run"))
    assignment = claim_params(leader, 1)
    with count_flushes(monkeypatch) as flushed:
        for epoch in (1, 2, 3):
            leader.notify.report(assignment, epoch, 1 / epoch)
            assert (
                len(Record(tmp_path / "run" / "study.log", "run").read_evaluations()[0].curve)
                == epoch
            )
    assert len(flushed) == 3


@pytest.mark.parametrize(("flushing", "pause"), [(0.001, 0.1), (0.05, 0.2)])
def test_commit_if_due_waits_longer_after_slow_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushing: float, pause: float
) -> None:
    run, now = WriterRun(tmp_path), [1000.0]
    flush = os.fsync
    monkeypatch.setattr("hpo.process.clock.now", lambda: now[0])
    monkeypatch.setattr(
        os, "fsync", lambda file: (now.__setitem__(0, now[0] + flushing), flush(file))[1]
    )
    leader = run.make_leader()
    with run.writer.batch_writes():
        assignment = claim_params(leader, 1)
        run.writer.commit_if_due()
        assert list_states(run.writer.take_committed()) == [(0, "running")]
        leader.notify.complete(assignment, 0.5, 1.0, {})
        leader.read_changes()
        for waited, is_settled in ((0.0, False), (0.9 * pause, False), (0.2 * pause, True)):
            now[0] += waited
            run.writer.commit_if_due()
            assert bool(run.writer.take_committed()) is is_settled
            assert (run.load_with_optuna().trials[0].state == TrialState.COMPLETE) is is_settled


def test_commit_on_full_disk_writes_nothing(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader = run.make_leader()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_to_full_disk() -> None:
        with run.writer.batch_writes():
            assignment = claim_params(leader, 1)
            run.writer.commit()
            written.append(run.journal.read_bytes())
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(written[0]) + 100, limits[1]))
            leader.notify.complete(assignment, 0.5, 1.0, {})
            leader.call.commit()

    written: list[bytes] = []
    try:
        with pytest.raises(
            RunError, match=r"study\.log cannot be written: File too large. It is undamaged"
        ):
            write_to_full_disk()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.journal.read_bytes() == written[0]
    assert list_states(run.writer.take_committed()) == [(0, "running")], (
        "the end must not be published"
    )


def test_writer_cuts_off_line_of_killed_writer(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader = run.make_leader()
    torn = b'{"op_code": 6, "tri'
    with run.writer.batch_writes():
        for number in (1, 2):
            with run.journal.open("ab") as file:
                file.write(torn)
            leader.notify.complete(claim_params(leader, number), 0.5, 1.0, {})
            leader.call.commit()
            run.rest()
    assert torn not in run.journal.read_bytes()
    assert list_states(run.reopen().read_evaluations()) == [(0, "complete"), (1, "complete")]


# Cached storage


class RandomLeaders:
    """Three leaders that make random calls to the writer."""

    def __init__(self, run: WriterRun, seed: int) -> None:
        self.chance = random.Random(seed)
        self.leaders = [run.make_leader() for _ in range(3)]
        self.running: list[tuple[StudyClient, Assignment]] = []
        self.reported: dict[int, int] = {}

    def step(self) -> None:
        action = self.chance.choice([self.claim, *[self.report] * 4, self.note, self.end])
        if action == self.claim or not self.running:
            self.claim()
        else:
            action()

    def claim(self) -> None:
        leader, chosen = self.chance.choice(self.leaders), make_params(self.chance.randrange(60))
        is_new = self.chance.random() < 0.7
        with suppress(DuplicateError):
            if assignment := leader.claim(chosen if is_new else None, **ISLAND_FIELDS):
                self.running.append((leader, assignment))

    def loss(self) -> float:
        return self.chance.choice([self.chance.random(), 0.5, 1e-300, 1e300, math.inf, math.nan])

    def report(self) -> None:
        leader, assignment = self.chance.choice(self.running)
        self.reported[assignment.number] = epoch = self.reported.get(assignment.number, 0) + 1
        leader.notify.report(assignment, self.chance.choice([epoch, epoch, 1]), self.loss())

    def note(self) -> None:
        (leader, assignment), losses = self.chance.choice(self.running), self.chance.randrange(9)
        actions: list[Callable[[], None]] = [
            lambda: leader.notify.record_checkpoint(assignment, losses),
            lambda: leader.notify.clear_inheritance(assignment),
            lambda: leader.notify.record_resume(
                assignment, [self.loss() for _ in range(losses)], 1.5
            ),
        ]
        self.chance.choice(actions)()

    def end(self) -> None:
        leader, assignment = self.running.pop(self.chance.randrange(len(self.running)))
        loss, metrics = self.chance.random(), {"accuracy": self.chance.random(), "\N{SNOWMAN}": 1.0}
        actions: list[Callable[[], None]] = [
            lambda: leader.notify.complete(assignment, loss, 1.25, metrics),
            lambda: leader.notify.prune(assignment, loss, 1.25, metrics),
            lambda: leader.notify.prune(assignment, loss, 1.25, {}, paused_after=1),
            lambda: leader.notify.fail(
                assignment, "rank 0: '\"\n", "Traceback \N{PILE OF POO}", 0.5
            ),
            lambda: leader.notify.fail(assignment, "rank 0", "", 0.5),
            lambda: leader.notify.interrupt(assignment),
        ]
        self.chance.choice(actions)()

    def commit(self) -> None:
        for leader in self.leaders:
            leader.call.commit()


def describe_trial(trial: FrozenTrial) -> str:
    """Return all fields of a trial as text, except its times.

    So trials with NaN can be compared.
    """
    known = {
        "place": (trial.number, trial._trial_id),
        "end": (trial.state.name, trial.values),
        "params": trial.params,
        "attributes": (trial.user_attrs, trial.system_attrs),
        "distributions": {
            name: str(distribution) for name, distribution in trial.distributions.items()
        },
        "intermediate_values": trial.intermediate_values,
    }
    return json.dumps(known, sort_keys=True)


def assert_trials_equal(actual: list[FrozenTrial], expected: list[FrozenTrial]) -> None:
    assert list(map(describe_trial, actual)) == list(map(describe_trial, expected))
    for first, second in zip(actual, expected, strict=True):
        for time_of in ("datetime_start", "datetime_complete"):
            here, there = getattr(first, time_of), getattr(second, time_of)
            assert (here is None) is (there is None)
            assert here is None or abs((here - there).total_seconds()) < 1


@pytest.mark.parametrize(
    ("storage", "seed"),
    [*(("journal", seed) for seed in range(4)), pytest.param("sqlite", 4, marks=pytest.mark.slow)],
)
def test_cached_storage_after_commit_equals_plain_optuna(
    tmp_path: Path, storage: str, seed: int
) -> None:
    run = WriterRun(tmp_path, storage, HALVING_SCHEDULES["asha"])
    random_leaders, states = RandomLeaders(run, seed), set[str]()
    with run.writer.batch_writes():
        for step in range(1, 401):
            random_leaders.step()
            if step % 20 == 0:
                random_leaders.commit()
                states.update(evaluation.state for evaluation in run.record.read_evaluations())
            # Optuna needs a second to open a database.
            if step % (100 if storage == "sqlite" else 20) == 0:
                assert_trials_equal(list(run.record.read_trials()), run.load_with_optuna().trials)
    assert {
        "running",
        "waiting",
        "complete",
        "pruned",
        "paused",
        "promoted",
        "failed",
        "interrupted",
    } == states
    assert_trials_equal(list(run.record.read_trials()), run.load_with_optuna().trials)
    unlike = {"started": 0.0, "ended": 0.0}  # They come from different clocks.
    here, there = (
        [asdict(e) | unlike for e in record.read_evaluations()]
        for record in (run.record, run.reopen())
    )
    assert [json.dumps(e, sort_keys=True) for e in here] == [
        json.dumps(e, sort_keys=True) for e in there
    ]


def test_file_between_commits_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise, a claim that starts nothing would commit, too, if a step takes so long.
    monkeypatch.setattr("hpo.store.study_writer._MIN_COMMIT_INTERVAL", 3600.0)
    run = WriterRun(tmp_path, halving=HALVING_SCHEDULES["asha"])
    random_leaders, ahead = RandomLeaders(run, seed=7), 0
    with run.writer.batch_writes():
        for step in range(200):
            count = len(random_leaders.running)
            random_leaders.step()
            if step % 20 == 0:
                random_leaders.commit()
            if step % 20 == 0 or len(random_leaders.running) > count:  # A claim commits, too.
                committed, lines = run.load_with_optuna().trials, run.journal.read_bytes()
            assert run.journal.read_bytes() == lines
            ahead += list(map(describe_trial, run.record.read_trials())) != list(
                map(describe_trial, committed)
            )
        assert ahead > 20
        assert list(map(describe_trial, run.load_with_optuna().trials)) == list(
            map(describe_trial, committed)
        )


# Other programs that write


def add_waiting(study: optuna.Study, number: int) -> None:
    """Add a waiting trial to the study, as another program may."""
    distributions = SPACE.make_distributions()
    study.add_trial(
        optuna.create_trial(
            state=TrialState.WAITING, params=make_params(number), distributions=distributions
        )
    )


@pytest.mark.parametrize("storage", ["journal", pytest.param("sqlite", marks=pytest.mark.slow)])
def test_trial_of_other_program_keeps_number_and_is_claimed(tmp_path: Path, storage: str) -> None:
    run = WriterRun(tmp_path, storage)
    leader, other = run.make_leader(), run.load_with_optuna()
    with run.writer.batch_writes():
        first = claim_params(leader, 1)
        run.writer.commit()
        run.rest()
        other.set_user_attr("note", "look at 1")
        add_waiting(other, 77)
        add_waiting(other, 78)
        leader.notify.report(first, 1, 0.5)
        second = claim_params(leader, 2)
        assert (first.number, second.number) == (0, 3)
        third, fourth = claim_params(leader, 3), claim_params(leader, 3)
        assert [(claimed.number, claimed.params) for claimed in (third, fourth)] == [
            (1, make_params(77)),
            (2, make_params(78)),
        ]
        for assignment in (second, third, fourth, first):
            leader.notify.complete(assignment, assignment.number / 8, 1.0, {})
        leader.call.commit()
        assert dict(list_states(leader.read_changes())) == dict.fromkeys(range(4), "complete")
        assert_trials_equal(list(run.record.read_trials()), run.load_with_optuna().trials)
        run.rest()
        other.set_user_attr("note", "look at 2")
        claim_params(leader, 5)
    assert run.load_with_optuna().user_attrs["note"] == "look at 2"
    assert [trial.value for trial in run.load_with_optuna().trials] == [
        0.0,
        0.125,
        0.25,
        0.375,
        None,
    ]
    assert (
        run.record.read_attributes()["note"]
        == run.reopen().read_attributes()["note"]
        == "look at 2"
    )


def test_journal_written_by_two_programs_has_valid_checksums(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader, other = run.make_leader(), run.load_with_optuna()
    with run.writer.batch_writes():
        for turn in range(3):
            leader.notify.complete(claim_params(leader, turn), 0.5, 1.0, {})
            leader.call.commit()
            run.rest()
            other.set_user_attr("note", f"look at {turn}")
    record = run.reopen()
    record.complete(
        record.start_trial(make_params(9), SPACE.make_distributions(), ISLAND_FIELDS), 0.5, 1.0, {}
    )
    lines = run.journal.read_bytes().splitlines(keepends=True)
    assert [b"look at" in line for line in lines] == [b'"crc":' not in line for line in lines]
    assert sum(b"look at" in line for line in lines) == 3
    assert len(list(Journal(run.journal).read_logs(0))) == len(lines)
    first = next(number for number, line in enumerate(lines) if b"look at 0" in line)
    lines[first] = lines[first].replace(b"look at 0", b"look at 9")
    run.journal.write_bytes(b"".join(lines))
    with pytest.raises(
        RunError, match=f"study.log is damaged: line {first + 2} does not match its checksum"
    ):
        list(Journal(run.journal).read_logs(0))


@pytest.mark.slow
def test_other_program_waits_until_writer_rests(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader, other = run.make_leader(), run.load_with_optuna()
    others = threading.Thread(target=other.set_user_attr, args=("note", "look at 1"), daemon=True)
    with run.writer.batch_writes():
        assignment = claim_params(leader, 1)
        assert run.lock.is_symlink(), "the first entry must take the lock"
        others.start()
        for epoch in range(1, 11):
            leader.notify.report(assignment, epoch, 1 / epoch)
            leader.call.commit()
            time.sleep(0.05)
            assert run.lock.is_symlink()
        assert others.is_alive()
        assert b"look at 1" not in run.journal.read_bytes()
        time.sleep(0.25)
        assert others.is_alive(), "only a commit may release the lock"
        run.writer.commit()
        others.join(10)
        assert not others.is_alive()
        assert run.load_with_optuna().user_attrs["note"] == "look at 1"
        leader.notify.complete(assignment, 0.1, 1.0, {})
    assert not run.lock.is_symlink()
    assert len(run.reopen().read_evaluations()[0].curve) == 10


def test_writer_with_frequent_entries_keeps_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = WriterRun(tmp_path), [1000.0]
    monkeypatch.setattr("hpo.process.clock.now", lambda: now[0])
    leader = run.make_leader()
    with run.writer.batch_writes():
        assert not run.lock.is_symlink()
        for number in range(2):
            claim_params(leader, number)
            for waited, is_kept in ((0.0, True), (0.15, True), (0.1, False)):
                now[0] += waited
                run.writer.commit()
                assert run.lock.is_symlink() is is_kept
        claim_params(leader, 2)
    assert not run.lock.is_symlink()
    assert len(run.load_with_optuna().trials) == 3


def test_writer_without_rest_releases_lock_after_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = WriterRun(tmp_path), [1000.0]
    monkeypatch.setattr("hpo.process.clock.now", lambda: now[0])
    leader, free = run.make_leader(), 0
    with run.writer.batch_writes():
        assignment = claim_params(leader, 1)
        for step in range(120):
            now[0] += 0.1
            leader.notify.report(assignment, step, 0.5)
            leader.call.commit()
            free += not run.lock.is_symlink()
    assert free == 2, "the lock must be released every 5 s, in 12 s"
    assert len(run.load_with_optuna().trials[0].intermediate_values) == 120


def test_writer_waits_while_other_program_writes(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader = run.make_leader()
    ended: list[list[tuple[int, str]]] = []

    def write() -> None:
        with run.writer.batch_writes():
            claim_params(leader, 1)
        ended.append(list_states(run.writer.take_committed()))

    run.lock.symlink_to(run.journal)
    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(0.3)
    assert writing.is_alive()
    assert run.load_with_optuna().trials == []
    run.lock.unlink()
    writing.join(10)
    assert ended == [[(0, "running")]]


def replace(journal: Path) -> None:
    copied = journal.with_name("copied")
    copied.write_bytes(journal.read_bytes())
    copied.replace(journal)


def remove_last_line(journal: Path) -> None:
    os.truncate(journal, len(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1])))


def cut_last_line(journal: Path) -> None:
    os.truncate(journal, journal.stat().st_size - 10)


def append_in_spite_of_lock(journal: Path) -> None:
    with journal.open("ab") as file:
        file.write(
            b'{"op_code":2,"worker_id":"another","study_id":0,"user_attr":{"note":"look at 1"}}\n'
        )


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "replaced": (replace, "was replaced while this run wrote to it"),
    "deleted": (Path.unlink, "was removed while this run wrote to it"),
    "cut": (remove_last_line, "was changed while this run wrote to it"),
    "torn": (cut_last_line, "was changed while this run wrote to it"),
    "longer": (append_in_spite_of_lock, "was changed while this run wrote to it"),
}


CHANGE_CASES = [
    (action, rests)
    for action in CHANGES
    for rests in (False, True)
    if (action, rests) != ("longer", True)
]


def change_journal(run: WriterRun, action: str, rests: bool) -> str:
    """Change a journal while its writer runs, and return the error that the writer raises.

    If `rests` is true, the writer pauses before the change.
    """
    leader, (change, _) = run.make_leader(), CHANGES[action]
    left = b""

    def content() -> bytes:
        return run.journal.read_bytes() if run.journal.exists() else b""

    def write() -> None:
        nonlocal left
        with run.writer.batch_writes():
            claim_params(leader, 1)
            claim_params(leader, 2)
            run.writer.commit()
            if rests:
                run.rest()
            change(run.journal)
            left = content()
            claim_params(leader, 3)
            run.writer.commit()

    with pytest.raises(RunError) as raised:
        write()
    assert left.startswith(content()), "the writer must not write to a changed file"
    return str(raised.value)


@pytest.mark.parametrize(("action", "rests"), CHANGE_CASES)
def test_journal_changed_during_run_raises_run_error(
    tmp_path: Path, action: str, rests: bool
) -> None:
    run = WriterRun(tmp_path)
    assert change_journal(run, action, rests).startswith(str(run.journal))
    assert list_states(run.writer.take_committed()) == [(0, "running"), (1, "running")]


@pytest.mark.parametrize(("action", "rests"), CHANGE_CASES)
def test_journal_error_names_the_change(tmp_path: Path, action: str, rests: bool) -> None:
    assert CHANGES[action][1] in change_journal(WriterRun(tmp_path), action, rests)


# Changes that leaders receive


def test_leader_receives_each_change_once_in_order(tmp_path: Path) -> None:
    run = WriterRun(tmp_path, halving=HALVING_SCHEDULES["asha"])
    early, late = run.make_leader(), run.make_leader()
    received: list[Evaluation] = []
    by_listener: list[Evaluation] = []
    late.listeners.append(by_listener.append)

    def read_new() -> list[tuple[int, str]]:
        received.extend(found := early.read_changes())
        return list_states(found)

    with run.writer.batch_writes():
        begun = [claim_params(early, number) for number in range(3)]
        assert read_new() == [(0, "running"), (1, "running"), (2, "running")]
        assert read_new() == []
        for assignment, loss in zip(begun, (0.9, 0.5, 0.7), strict=True):
            early.notify.report(assignment, 1, loss)
            early.notify.prune(assignment, loss, 1.0, {"accuracy": 0.5}, paused_after=1)
        assert read_new() == [(0, "paused"), (1, "paused"), (2, "paused")]
        promoted = claim_params(early, 3)
        assert (promoted.number, promoted.root) == (3, 1)
        assert read_new() == [(1, "promoted"), (3, "running")]
        for epoch in range(1, 10):
            early.notify.report(promoted, epoch, 0.5)
        early.notify.complete(promoted, 0.5, 1.0, {})
        interrupted = claim_params(early, 4)
        early.notify.interrupt(interrupted)
        assert read_new() == [(3, "complete"), (4, "running"), (4, "interrupted"), (5, "waiting")]
        assert list_states(late.read_changes()) == list_states(received)
        late.notify.complete(claim_params(late, 4), 0.25, 1.0, {})
        assert list_states(late.read_changes()) == read_new() == [(5, "running"), (5, "complete")]
        assert late.read_changes() == []
    assert list_states(by_listener) == list_states(received)


def test_leaders_receive_only_shared_fields(tmp_path: Path) -> None:
    make_run(tmp_path / "run", objectives=TWO)
    record, cached_storage = open_cached(tmp_path / "run" / "study.log")
    leader = DelayedClient(
        make_writer(record, tmp_path / "run", cached_storage=cached_storage), TWO
    )
    attributes = {
        "island": 1,
        "worker": 3,
        "generation": 7,
        "propagator": "ga",
        "immigrants": {"0": 2},
    }
    first, second = (leader.claim(make_params(number), **attributes) for number in (1, 2))
    assert first is not None
    assert second is not None
    leader.notify.report(first, 1, 0.5)
    leader.notify.complete(first, 0.5, 1.5, {"parameters": 9.0, "accuracy": 0.75})
    leader.notify.interrupt(second)
    received = leader.read_changes()[2:]
    assert list_states(received) == [(0, "complete"), (1, "interrupted"), (2, "waiting")]
    for evaluation, recorded in zip(received, record.read_evaluations(), strict=True):
        for name in SHARED_FIELDS:
            assert str(getattr(evaluation, name)) == str(getattr(recorded, name)), "also if NaN"
        received_only = Evaluation(**{name: getattr(evaluation, name) for name in SHARED_FIELDS})
        rest = {field.name for field in fields(Evaluation)} - set(SHARED_FIELDS)
        assert {name: str(getattr(evaluation, name)) for name in rest} == {
            name: str(getattr(received_only, name)) for name in rest
        }
    assert (received[0].values, received[0].worker, received[0].seconds, received[2].retry_of) == (
        (0.5, 9.0),
        3,
        1.5,
        1,
    )
    assert (received[0].metrics, received[0].curve) == ({}, {}), (
        "only the record may hold these fields"
    )
    assert record.read_evaluations()[0].curve == {1: 0.5}


def test_resumed_run_sends_all_evaluations_at_first(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    leader = run.make_leader()
    with run.writer.batch_writes():
        leader.notify.complete(claim_params(leader, 1), 0.5, 1.0, {})
        claim_params(leader, 2)
    record, cached_storage = open_cached(run.storage)
    record.requeue_interrupted()
    writer = make_writer(record, run.folder, cached_storage=cached_storage)
    states = [(0, "complete"), (1, "interrupted"), (2, "waiting")]
    assert (
        list_states(writer.take_committed())
        == list_states(DelayedClient(writer).read_changes())
        == states
    )
    assert writer.take_committed() == []


def test_claim_while_run_is_stopping_returns_none(tmp_path: Path) -> None:
    run = WriterRun(tmp_path)
    stopping = [False]
    leader = DelayedClient(run.writer, ONLY_LOSS, lambda: stopping[0])
    with run.writer.batch_writes():
        leader.notify.interrupt(claim_params(leader, 1))
        stopping[0] = True
        assert leader.claim(make_params(2), **ISLAND_FIELDS) is None
        assert leader.claim(None, **ISLAND_FIELDS) is None
        stopping[0] = False
        assert claim_params(leader, 2).params == make_params(1)


# Losses in a database


@pytest.mark.slow
def test_losses_in_database_share_one_transaction(tmp_path: Path) -> None:
    run = WriterRun(tmp_path, "sqlite")
    leaders = [run.make_leader() for _ in range(4)]
    assignments = [claim_params(leader, number) for number, leader in enumerate(leaders)]
    database, happened = run.cached_storage._storage._backend.engine, list[str]()  # type: ignore[attr-defined]
    for operation in ("commit", "rollback"):
        event.listen(database, operation, lambda _, operation=operation: happened.append(operation))
    losses = {1: 0.5, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 1e-300}
    with run.writer.batch_writes():
        for leader, assignment in zip(leaders, assignments, strict=True):
            leader.notify.report(assignment, 5, 0.125)
            for step, loss in losses.items():
                leader.notify.report(assignment, step, loss)
            leader.read_changes()
        assert happened == []
        run.writer.commit()
        assert happened == ["commit"]
        run.writer.commit()
        assert happened == ["commit"], "a commit without changes must not open a transaction"
        leaders[0].notify.report(assignments[0], 6, 0.25)
        leaders[0].call.commit()
        assert happened == ["commit"] * 2
    found = [trial.intermediate_values for trial in run.load_with_optuna().trials]
    assert str([dict(sorted(values.items())) for values in found]) == str(
        [{**losses, 6: 0.25}, losses, losses, losses]
    )


# Output and file descriptors

# Programs that follow this text can use up all descriptors with `take_all`, until `give_back`.
EXHAUST_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from hpo.store.output_log import OutputLog
from tests.support.writer_stubs import DelayedClient, make_writer, open_cached

folder = Path(sys.argv[1])

def take_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        assert len(held) > 20
        return held

def give_back(held):
    for descriptor in held:
        os.close(descriptor)
"""

WRITE_OUTPUT = """
log = OutputLog(lambda trial: folder / "logs" / f"{trial}.txt")
log.add(0, "before\\n")
log.write()
size = (folder / "logs" / "0.txt").stat().st_size
held = take_all()
for number in (1, 2):
    log.add(0, f"later {number}\\n")
    log.add(1, "by another\\n")
    log.write()
assert size == (folder / "logs" / "0.txt").stat().st_size
give_back(held)
log.write()
"""

CLAIM_EVALUATIONS = """
import time
record, cached_storage = open_cached(folder / "study.log", "run")
writer = make_writer(record, folder, cached_storage=cached_storage)
leader = DelayedClient(writer)
with writer.batch_writes():
    held = take_all()
    for number in (1, 2):
        params = {"layers": number, "activation": "relu", "lr": 0.5, "gamma": 0.75}
        claimed = leader.claim(params, island=0, worker=0, generation=0)
        leader.notify.complete(claimed, 0.5, 1.0, {})
        leader.call.commit()
        time.sleep(0.25)
        writer.commit()
    give_back(held)
"""


def run_without_descriptors(folder: Path, program: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EXHAUST_DESCRIPTORS + program, str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=scale(60)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_output_log_without_descriptors_writes_later(tmp_path: Path) -> None:
    run_without_descriptors(tmp_path, WRITE_OUTPUT)
    assert (tmp_path / "logs" / "0.txt").read_text() == "before\nlater 1\nlater 2\n"
    assert (tmp_path / "logs" / "1.txt").read_text() == "by another\n" * 2


@pytest.mark.slow
def test_journal_without_descriptors_records_other_evaluations(
    tmp_path: Path,
) -> None:
    make_run(tmp_path / "run")
    run_without_descriptors(tmp_path / "run", CLAIM_EVALUATIONS)
    evaluations = Record(tmp_path / "run" / "study.log", "run").read_evaluations()
    assert list_states(evaluations) == [(0, "complete"), (1, "complete")]


# Weights


@pytest.mark.parametrize("better_first", [True, False])
@pytest.mark.parametrize("objectives", [ONLY_LOSS, TWO])
def test_weights_of_two_simultaneous_ends_are_the_better_ones(
    tmp_path: Path, objectives: Objectives, better_first: bool
) -> None:
    record = make_run(tmp_path / "run", objectives=objectives)
    writer = make_writer(record, tmp_path / "run")
    clients = [DelayedClient(writer, objectives), DelayedClient(writer, objectives)]
    worse, better = (LeaderStub(writer, client) for client in clients)
    begun = [worse.begin(make_params(1)), better.begin(make_params(2))]
    best = tmp_path / "run" / "best.safetensors"
    assert worse.complete(begun[0], 0.4, {"w": torch.tensor([4.0])}, {"parameters": 9.0})
    assert better.complete(begun[1], 0.3, {"w": torch.tensor([3.0])}, {"parameters": 8.0})
    drafts = {path.name for path in (tmp_path / "run").rglob(".*")}
    of_front = {".0.safetensors.0", ".1.safetensors.1"} if objectives.is_multi_objective else set()
    assert drafts == {".best.safetensors.0", ".best.safetensors.1", *of_front}, (
        "both must have written drafts"
    )
    assert not best.exists()
    for client in reversed(clients) if better_first else clients:
        client.deliver()
    weights = read_weights(best)
    assert weights is not None
    assert (weights.trial, weights.state["w"].item()) == (1, 3.0)
    assert not list((tmp_path / "run").rglob(".*")), "no draft may be left"
    front = {path.name for path in (tmp_path / "run").glob("front/*")}
    assert front == ({"1.safetensors"} if objectives.is_multi_objective else set())


def test_leader_behind_unread_best_keeps_no_weights(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run")
    writer = make_writer(record, tmp_path / "run")
    late, early = LeaderStub(writer), LeaderStub(writer)
    begun = [late.begin(make_params(1)), early.begin(make_params(2))]
    early.complete(begun[1], 0.3, {"w": torch.tensor([3.0])})
    best = tmp_path / "run" / "best.safetensors"
    before = best.stat()
    assert late.keeper.is_wanted(begun[0], 0.4, {}), "the leader has not read the better loss"
    late.recorder.notify.complete(begun[0], 0.4, 1.0, {})
    late.keeper.save_weights(begun[0], make_drafts({"w": torch.tensor([4.0])}))
    assert (best.stat().st_ino, best.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not list((tmp_path / "run").rglob(".*"))
    assert not late.is_wanted(begun[0], 0.4)


def test_leaders_wait_for_all_methods_with_a_result() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hpo").rglob("*.py"))
    notified = set(re.findall(r"\.notify\.(\w+)\(", sources))
    assert {"report", "complete"} <= notified
    methods = {**vars(Record), **vars(StudyWriter)}
    assert [name for name in notified if methods[name].__annotations__["return"] != "None"] == []
