"""Test how individuals that crash the job are found: they are isolated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpo import Int, SearchSpace
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.record import Record
from hpo.store.study_writer import Claims

SPACE = SearchSpace(k=Int(0, 999))


class Job:
    """Simulate a run whose evaluations end in a random order.

    The individuals `guilty` crash the job.
    """

    def __init__(
        self, folder: Path, workers: int, budget: int, guilty: set[int], seed: int
    ) -> None:
        self._folder = folder
        self._workers = workers
        self._budget = budget
        self._guilty = guilty
        self._chance = random.Random(seed)
        Record.create(folder / "study.log", "run", SPACE.describe())

    def opened(self) -> Record:
        return Record(self._folder / "study.log", "run")

    def session(self, killed_after: int = 10**9) -> bool:
        """Evaluate until the job crashes, is killed after `killed_after`, or has ended.

        Return whether it crashed or was killed.
        """
        record, in_flight = self.opened(), list[Assignment]()
        record.requeue_interrupted()
        free = self._workers
        for _ in range(killed_after):
            while free:
                free -= 1
                assignment = self._start(record)
                in_flight += [assignment] if assignment else []
            if not in_flight:
                return False
            ended = in_flight.pop(self._chance.randrange(len(in_flight)))
            if ended.params["k"] in self._guilty:
                return True
            record.complete(ended, float(ended.params["k"]), 1.0, {})
            free += 1
        return True

    def _start(self, record: Record) -> Assignment | None:
        new = (
            max((evaluation.params["k"] for evaluation in record.read_evaluations()), default=-1)
            + 1
        )
        return Claims(record, SPACE.make_distributions(), self._budget).claim(
            {"k": new}, island=0, worker=0, generation=0
        )

    def ended(self) -> list[Evaluation]:
        return [
            evaluation for evaluation in self.opened().read_evaluations() if evaluation.is_finished
        ]


@pytest.mark.parametrize(("workers", "guilty"), [(1, {0}), (2, {3}), (6, {0, 5, 17}), (24, {0, 1})])
def test_crash_isolation_fails_only_culprits(
    tmp_path: Path, workers: int, guilty: set[int]
) -> None:
    budget = 18 if workers < 10 else 40
    job = Job(tmp_path, workers, budget, guilty, seed=0)
    crashes = 0
    while job.session():
        crashes += 1
        assert crashes <= 3 * len(guilty), "each culprit may crash the job three times"
    ended = job.ended()
    assert len(ended) == budget
    assert {
        evaluation.params["k"] for evaluation in ended if evaluation.state == "failed"
    } == guilty
    for evaluation in ended:
        if evaluation.state == "failed":
            assert evaluation.failure == (
                "the job crashed 3 times during this evaluation, the last time with no other "
                "running"
            )


def test_crashes_without_culprit_fail_no_individual(tmp_path: Path) -> None:
    job = Job(tmp_path, 6, 40, set(), seed=0)
    for _ in range(4):
        assert job.session(killed_after=9)
    assert not job.session()
    assert [evaluation.state for evaluation in job.ended()] == ["complete"] * 40


def test_individuals_running_at_regular_stop_are_not_suspected(tmp_path: Path) -> None:
    job = Job(tmp_path, 1, 3, set(), seed=0)
    for _ in range(4):
        record = job.opened()
        record.requeue_interrupted(crashed=False)
        assert job._start(record) is not None
    assert not job.session()
    assert [evaluation.state for evaluation in job.ended()] == ["complete"] * 3


def test_individual_with_later_checkpoints_is_not_suspected(tmp_path: Path) -> None:
    job = Job(tmp_path, 1, 1, set(), seed=0)
    for saved in (3, 5, 9):
        record = job.opened()
        record.requeue_interrupted()
        assignment = job._start(record)
        assert assignment is not None
        record.record_resume(assignment, [1.0] * (saved - 2), 2.0)
        record.record_checkpoint(assignment, saved)
    for crashes in (0, 1, 2):
        record = job.opened()
        record.requeue_interrupted()
        assert record.read_evaluations()[-1].crash_count == crashes
        assignment = job._start(record)
        assert assignment is not None
        assert assignment.root == 0
        record.record_resume(assignment, [1.0] * 9, 2.0)
        record.record_checkpoint(assignment, 9)  # As at a regular stop.
    job.opened().requeue_interrupted()
    (failed,) = job.ended()
    assert failed.state == "failed"
    assert failed.resumed_from_step == 9
    assert job.opened().find_resumable_roots() == set()
