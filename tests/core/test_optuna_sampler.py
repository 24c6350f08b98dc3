"""Test the sampler for Optuna (`hpo.optuna.IslandSampler`) on studies of Optuna."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.trial import Trial, TrialState

from hpo.options import PROPAGATORS_WITHOUT_MPI
from hpo.optuna import IslandSampler


def _compute_loss(trial: Trial) -> float:
    """A space that is defined by run: one choice has a parameter of its own."""
    rate = trial.suggest_float("optimizer.lr", 1e-5, 1.0, log=True)
    layers = trial.suggest_int("layers", 1, 8)
    schedule = trial.suggest_categorical("schedule", [None, "cosine", 3])
    trial.suggest_float("constant", 2.0, 2.0)
    loss = (math.log10(rate) + 3) ** 2 + 0.3 * abs(layers - 4) + (schedule != 3)
    if schedule == 3:
        loss += abs(trial.suggest_float("momentum", 0.0, 1.0, step=0.05) - 0.9)
    return loss


def _optimize(
    sampler: optuna.samplers.BaseSampler, trials: int = 60, jobs: int = 1
) -> optuna.Study:
    study = optuna.create_study(sampler=sampler)
    study.optimize(_compute_loss, n_trials=trials, n_jobs=jobs)
    return study


@pytest.mark.slow
def test_sampler_finds_better_values_than_random_draws() -> None:
    def compute_mean(make: Callable[[int], optuna.samplers.BaseSampler]) -> float:
        return sum(_optimize(make(seed)).best_value for seed in range(3)) / 3

    random = compute_mean(optuna.samplers.RandomSampler)
    assert compute_mean(lambda seed: IslandSampler(seed=seed)) < random / 2
    assert compute_mean(lambda seed: IslandSampler("tpe", seed)) < random


@pytest.mark.parametrize("propagator", PROPAGATORS_WITHOUT_MPI)
def test_the_same_seed_suggests_the_same_trials(propagator: str) -> None:
    first, second, other = (
        [trial.params for trial in _optimize(IslandSampler(propagator, seed), 25).trials]
        for seed in (1, 1, 2)
    )
    assert first == second != other
    assert {params["constant"] for params in first} == {2.0}
    assert {"momentum" in params for params in first} == {True, False}


def test_sampler_continues_the_study_of_another_one() -> None:
    study = _optimize(optuna.samplers.RandomSampler(0), 30)
    before = study.best_value
    study.sampler = pickle.loads(pickle.dumps(IslandSampler(seed=0)))
    study.optimize(_compute_loss, n_trials=30)
    assert study.best_value < before
    losses = [trial.value or 0.0 for trial in study.trials]
    assert sum(losses[30:]) < 0.75 * sum(losses[:30])


def test_sampler_learns_floats_of_another_one_at_once() -> None:
    """They have more digits than the floats of this project."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0))

    def compute(trial: Trial) -> float:
        return abs(trial.suggest_float("x", 0, 1) - 0.5) + abs(trial.suggest_float("y", 0, 1) - 0.5)

    study.optimize(compute, n_trials=40)
    study.sampler = IslandSampler(seed=0)
    study.optimize(compute, n_trials=10)
    losses = [trial.value or 0.0 for trial in study.trials]
    assert sum(losses[40:]) / 10 < 0.5 * sum(losses[:40]) / 40


def test_failure_between_two_suggestions_keeps_the_group() -> None:
    study = optuna.create_study(sampler=IslandSampler(seed=0))

    def compute(trial: Trial) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        if trial.number == 3:
            raise ValueError("failed")
        return x + trial.suggest_float("y", 0.0, 1.0)

    study.optimize(compute, n_trials=8, catch=(ValueError,))
    assert isinstance(study.sampler, IslandSampler)
    (group,) = study.sampler._groups.values()
    assert list(group._distributions) == ["x", "y"]


def test_score_is_maximized_and_several_objectives_form_a_front() -> None:
    study = optuna.create_study(direction="maximize", sampler=IslandSampler(seed=0))
    study.optimize(lambda trial: -_compute_loss(trial), n_trials=40)
    assert study.best_value > max(trial.value or 0.0 for trial in study.trials[:10])
    two = optuna.create_study(directions=["minimize", "maximize"], sampler=IslandSampler(seed=0))
    two.optimize(lambda trial: (_compute_loss(trial), trial.params["layers"]), n_trials=40)
    best = {trial.params["layers"] for trial in two.best_trials}
    assert 8 in best, "the largest value is on the front, whatever its loss"


def test_trials_that_fail_or_are_pruned_are_learned_from() -> None:
    def compute(trial: Trial) -> float:
        """Most trials with many layers fail, and most of the others are pruned."""
        loss = _compute_loss(trial)
        if trial.params["layers"] > 4:
            raise ValueError("too large")
        trial.report(loss + 1, 0)
        trial.report(loss, 1)
        if loss > 1.0:
            raise optuna.TrialPruned
        return loss

    study = optuna.create_study(sampler=IslandSampler(seed=0))
    study.enqueue_trial({"layers": 8})
    study.optimize(compute, n_trials=60, catch=(ValueError,))
    states = [trial.state for trial in study.trials]
    assert states[0] == TrialState.FAIL
    assert states[30:].count(TrialState.FAIL) < 8  # Of random trials, half fail.
    assert states[30:].count(TrialState.COMPLETE) > states[:30].count(TrialState.COMPLETE)


def test_threads_suggest_different_trials() -> None:
    """Of 50 random draws from 60 values, 34 differ in the mean."""
    study = optuna.create_study(sampler=IslandSampler(seed=0))
    study.optimize(lambda trial: trial.suggest_int("width", 1, 60), n_trials=50, n_jobs=4)
    # Each thread draws its first value at random, since no trial has had the parameter before. On a
    # busy machine it may do so late, when the others have suggested most values.
    assert len({trial.params["width"] for trial in study.trials}) >= 50 - 4


def test_sampler_learns_each_study_apart_and_knows_nan() -> None:
    sampler = IslandSampler(seed=0)
    studies = [optuna.create_study(sampler=sampler) for _ in range(2)]
    for number, study in enumerate(studies * 20):
        trial = study.ask()
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.suggest_categorical("kind", [math.nan, 1.0, None])
        study.tell(trial, abs(x - 0.2) if number % 2 else abs(x - 0.8))
    low, high = (study.best_params["x"] for study in reversed(studies))
    assert low == pytest.approx(0.2, abs=0.05)
    assert high == pytest.approx(0.8, abs=0.05)


def test_wrong_propagator_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of 'ga', 'tpe', 'random', got 'pso'"):
        IslandSampler("pso")


@pytest.mark.slow
def test_processes_share_a_study(tmp_path: Path) -> None:
    code = """
import optuna, sys
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from hpo.optuna import IslandSampler

storage = JournalStorage(JournalFileBackend(sys.argv[1]))
study = optuna.create_study(study_name="x", storage=storage, load_if_exists=True)
study.sampler = IslandSampler(seed=int(sys.argv[2]))
study.optimize(lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_int("n", 0, 9), 15)
assert not {"torch", "mpi4py", "propulate"} & {*sys.modules}
"""
    command = [sys.executable, "-c", code, str(tmp_path / "journal.log")]
    processes = [
        subprocess.Popen([*command, seed], stderr=subprocess.DEVNULL) for seed in ("0", "1")
    ]
    assert [process.wait() for process in processes] == [0, 0]
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    study = optuna.load_study(study_name="x", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 30
    # Two processes may suggest the same at the same moment. Apart, most would be the same.
    assert len({tuple(trial.params.items()) for trial in study.trials}) >= 25
