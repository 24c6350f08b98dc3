"""Test which workers are tested and leave the run because of their failures."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from hpo import Float, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.store.evaluations import Evaluation
from hpo.store.worker_health import Condition, WorkerHealth

ECC_ERROR = "rank 0: RuntimeError: CUDA error: uncorrectable ECC error encountered"
SECONDS = {True: 0.2, False: 3.0}  # of an evaluation, by whether it fails


@dataclass
class Simulation:
    """A run in simulated time, whose workers claim, evaluate and are judged as in a real run."""

    workers: int
    failure_rate: float
    broken: Sequence[int] = ()
    budget: int = 40
    hosts: Sequence[int] = ()
    seed: int = 0
    is_random: bool = True
    """Whether evaluations fail at random.

    Otherwise, an individual that has succeeded once always succeeds.
    """
    left: list[int] = field(default_factory=list, init=False)
    lost: int = field(default=0, init=False)
    """Evaluations that have failed on broken workers."""

    def run(self) -> None:
        rng = random.Random(self.seed)
        health = WorkerHealth(self.hosts or [0] * self.workers)
        # End, number, worker, failed, whether it is a test.
        queue: list[tuple[float, int, int, bool, bool]] = []
        busy: set[int] = set()
        now, number, to_claim = 0.0, 0, self.budget
        while True:
            has_claimed = False
            for worker in sorted(health.list_in_run() - busy):
                # Workers without failures will claim soon, unless the budget is spent.
                claiming = health.list_without_failures() if to_claim else set()
                condition = health.judge(worker, claiming | busy)
                if condition == Condition.BROKEN:
                    self.left.append(worker)
                    to_claim += len(health.remove_worker(worker))
                    has_claimed = True
                is_test = condition == Condition.SUSPECTED
                if is_test or (condition == Condition.HEALTHY and to_claim):
                    may_fail = rng.random() < self.failure_rate and (self.is_random or not is_test)
                    has_failed = worker in self.broken or may_fail
                    seconds = SECONDS[has_failed] * rng.lognormvariate(0, 0.5)
                    number, to_claim = number + 1, to_claim - (not is_test)
                    heapq.heappush(queue, (now + seconds, number, worker, has_failed, is_test))
                    busy.add(worker)
                    has_claimed = True
            if not queue and not has_claimed:
                return
            if not queue:
                continue
            now, trial, worker, has_failed, is_test = heapq.heappop(queue)
            busy.remove(worker)
            self.lost += has_failed and worker in self.broken
            state = "failed" if has_failed else "complete"
            if not is_test:
                health.add_end(
                    Evaluation(trial, state, 0.0, {}, 0, worker, 0, failure="CUDA out of memory")
                )
            elif has_failed:
                health.fail_test(worker, "CUDA out of memory")
            else:
                health.pass_test(worker)


def simulate(count: int, **options: object) -> list[Simulation]:
    simulations = [Simulation(seed=seed, **options) for seed in range(count)]  # type: ignore[arg-type]
    for simulation in simulations:
        simulation.run()
    return simulations


@pytest.mark.parametrize("failure_rate", [0.02, 1 / 3, 0.5, 0.9])
def test_healthy_workers_stay_if_evaluations_fail_at_random(failure_rate: float) -> None:
    runs = simulate(300, workers=4, failure_rate=failure_rate, budget=60)
    assert sum(bool(run.left) for run in runs) <= 3


def test_healthy_workers_stay_if_individuals_fail() -> None:
    runs = simulate(300, workers=8, failure_rate=1 / 3, budget=100, is_random=False)
    assert not any(run.left for run in runs)


def test_broken_worker_leaves_after_few_failures() -> None:
    runs = simulate(100, workers=4, failure_rate=0.0, broken=[1])
    assert {(*run.left,) for run in runs} == {(1,)}
    assert max(run.lost for run in runs) <= 4


@pytest.mark.slow
def test_broken_worker_leaves_in_a_space_with_failures() -> None:
    runs = simulate(300, workers=4, failure_rate=1 / 3, broken=[1], budget=200)
    assert sum(1 in run.left for run in runs) >= 297
    assert sum(run.left not in ([1], []) for run in runs) <= 3


def test_workers_of_a_broken_host_leave() -> None:
    runs = simulate(
        50, workers=8, failure_rate=0.05, broken=[4, 5, 6, 7], budget=100, hosts=[0] * 4 + [1] * 4
    )
    assert all(set(run.left) >= {4, 5, 6, 7} for run in runs)
    assert sum(len(run.left) > 4 for run in runs) <= 1


def test_no_worker_leaves_if_all_fail() -> None:
    assert not any(run.left for run in simulate(20, workers=4, failure_rate=1.0))


def test_device_error_is_suspected_at_once_unless_tests_pass() -> None:
    health = WorkerHealth([0, 0])

    def end(worker: int, failure: str | None) -> None:
        state = "complete" if failure is None else "failed"
        health.add_end(Evaluation(0, state, 0.0, {}, 0, worker, 0, failure=failure))

    end(0, ECC_ERROR)
    assert health.judge(0, {1}) == Condition.WAITING, "there is no individual to test it with"
    assert health.judge(0, set()) == Condition.HEALTHY, "no other worker is left"
    end(1, None)
    assert health.judge(0, {1}) == Condition.SUSPECTED
    health.pass_test(0)
    end(0, ECC_ERROR)
    assert health.judge(0, {1}) == Condition.HEALTHY, "the error belongs to hyperparameters"


def test_failed_test_with_a_device_error_suffices() -> None:
    health = WorkerHealth([0, 0])
    health.add_end(Evaluation(1, "failed", 0.0, {}, 0, 0, 0, failure=ECC_ERROR))
    health.add_end(Evaluation(2, "complete", 0.0, {}, 0, 1, 0))
    health.fail_test(0, ECC_ERROR)
    assert health.judge(0, {1}) == Condition.BROKEN
    assert [evaluation.trial for evaluation in health.remove_worker(0)] == [1]
    assert health.judge(0, {1}) == Condition.LEFT


@pytest.mark.parametrize("failure", ["no disk", ECC_ERROR])
def test_no_worker_leaves_if_all_fail_from_some_time_on(failure: str) -> None:
    health = WorkerHealth([0, 0, 0, 1])
    for trial in range(80):
        health.add_end(Evaluation(trial, "complete", 0.0, {}, 0, trial % 4, 0))
    for trial in range(80):
        health.add_end(Evaluation(trial, "failed", 0.0, {}, 0, trial % 4, 0, failure=failure))
    assert {health.judge(worker, set()) for worker in range(4)} == {Condition.HEALTHY}


def test_history_forgets_failures_of_a_broken_worker() -> None:
    space = SearchSpace(x=Float(0.0, 1.0))
    history = EvaluationHistory(space)
    ended = [
        Evaluation(trial, "failed", math.inf, {"x": trial / 10}, 0, 0, 0) for trial in range(3)
    ]
    history.add_evaluations(ended)
    history.add_evaluations([replace(ended[1], state="interrupted")])
    assert history.make_founder_sample().genes.ravel().tolist() == [0.0, 0.2]
    history.add_evaluations([Evaluation(3, "complete", 0.5, {"x": 0.1}, 0, 1, 0, retry_of=1)])
    assert history.make_founder_sample().genes.ravel().tolist() == [0.0, 0.2, 0.1]
    assert history.make_founder_sample().succeeded.tolist() == [False, False, True]
