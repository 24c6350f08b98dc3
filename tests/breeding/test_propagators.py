"""Test all propagators on simulated islands, with evaluations that take different times."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState

from hpo import Categorical, Float, Int, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.gaussian_process import GaussianProcess
from hpo.breeding.population import Individual
from hpo.breeding.propagators import make_propagator
from hpo.breeding.tpe import TPEPropagator
from hpo.errors import UsageError
from hpo.options import NUMERIC_PROPAGATORS, PROPAGATORS
from hpo.run.request import check_space
from hpo.space.search_space import list_individuals
from tests.support.evaluations import make_evaluation
from tests.support.simulation import SimulatedIslands, simulate

NUMBERS = SearchSpace(depth=Int(1, 12), width=Float(0.0, 2.0), lr=Float(1e-5, 1.0, log=True))
EVERYTHING = SearchSpace(
    **NUMBERS.parameters,
    act=Categorical("relu", "tanh", "elu"),
    flag=Categorical(True, False),
    one=Categorical(7),
)


def compute_loss(params: dict[str, Any]) -> float:
    """Return a loss whose minimum is 0 at depth 8, width 0.5, lr 0.01, elu and True."""
    off = [
        (params.get("depth", 8) - 8) / 11,
        (params.get("width", 0.5) - 0.5) / 2,
        math.log10(params.get("lr", 0.01) / 0.01) / 5,
    ]
    wrong = (params.get("act", "elu") != "elu") + (params.get("flag", True) is not True)
    return float(sum(part**2 for part in off) + wrong / 4)


def run_islands(
    space: SearchSpace, names: list[str], evaluations: int, seed: int = 0
) -> tuple[list[dict[str, Any]], Any]:
    """Simulate two islands. Return the hyperparameters in the order of their start, and the losses.

    The losses are in the order in which the evaluations end.
    """
    started = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        space.check(params)
        started.append(params)
        return compute_loss(params), 1.0 + params["depth"]

    losses = simulate(SimulatedIslands(space, names, 2, seed), evaluate, evaluations)
    return started, losses


@pytest.mark.parametrize("name", PROPAGATORS)
def test_propagators_breed_new_individuals_of_the_space(name: str) -> None:
    space = NUMBERS if name in NUMERIC_PROPAGATORS else EVERYTHING
    started, losses = run_islands(space, [name], 60)
    assert len(losses) == 60
    assert len({tuple(params.values()) for params in started}) == 60, "no individual must repeat"
    for params in started:
        assert space.decode(space.encode(params)) == params
    values = {
        parameter: {params[parameter] for params in started} for parameter in space.parameters
    }
    assert all(len(values[parameter]) > 3 for parameter in NUMBERS.parameters), (
        "all numbers must vary"
    )
    if space is EVERYTHING:
        assert values["act"] == {"relu", "tanh", "elu"}
        assert values["flag"] == {True, False}


@pytest.mark.parametrize("name", PROPAGATORS)
def test_propagators_search_in_a_plain_process(name: str) -> None:
    space = NUMBERS if name in NUMERIC_PROPAGATORS else EVERYTHING
    propagator = make_propagator(name, space, seed=0)
    for _ in range(50):
        individual = propagator.ask()
        propagator.tell(individual, compute_loss(individual.params))
    params = {tuple(member.params.values()) for member in propagator.population}
    assert len(params) == 50, "no individual must repeat"
    best = min(member.loss for member in propagator.population)
    assert best < propagator.population[0].loss


def test_make_propagator_makes_another_class_for_each_name() -> None:
    space = SearchSpace(x=Float(0.0, 1.0))
    classes = {type(make_propagator(name, space)) for name in PROPAGATORS}
    assert len(classes) == len(PROPAGATORS)


def test_make_propagator_with_unknown_name_names_all() -> None:
    with pytest.raises(ValueError, match=r"name must be one of ga, tpe, .*, got 'GA'"):
        make_propagator("GA", NUMBERS)


@pytest.mark.parametrize("name", PROPAGATORS)
def test_ask_before_tell_returns_other_individuals(name: str) -> None:
    space = NUMBERS if name in NUMERIC_PROPAGATORS else EVERYTHING
    propagator = make_propagator(name, space)
    asked = [propagator.ask() for _ in range(20)]
    assert len({tuple(individual.params.values()) for individual in asked}) == 20
    for individual in reversed(asked):
        propagator.tell(individual, math.nan)
    assert {individual.loss for individual in asked} == {math.inf}
    assert propagator.history.ended_count == 20
    assert not propagator.history.make_founder_sample().succeeded.any()


@pytest.mark.parametrize(("name", "factor"), [("ga", 0.1), ("tpe", 0.5)])
@pytest.mark.slow
def test_learning_propagators_beat_random_search(name: str, factor: float) -> None:
    def mean_best(propagator: str) -> float:
        return float(
            np.mean([run_islands(EVERYTHING, [propagator], 60, seed)[1].min() for seed in range(4)])
        )

    assert mean_best(name) < factor * mean_best("random")


def test_propagators_exhaust_a_finite_space() -> None:
    space = SearchSpace(depth=Int(1, 5), act=Categorical("relu", "tanh"))
    for name in ("ga", "tpe", "propulate", "random"):
        started, _ = run_islands(space, [name], 10)
        assert len({tuple(params.values()) for params in started}) == 10
    evaluations = [
        make_evaluation(trial, params=params)
        for trial, params in enumerate(space.all_individuals or ())
    ]
    history = EvaluationHistory(space)
    history.add_evaluations(evaluations)
    assert history.draw_new(random.Random(0)) is None


class DiagonalSpace:
    """A space of which a constraint allows 600 of 360,000 individuals. `calls` counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.space = SearchSpace(a=Int(1, 600), b=Int(1, 600))
        self.space.require(self.is_allowed, "a is b")

    def is_allowed(self, params: dict[str, Any]) -> bool:
        self.calls += 1
        return bool(params["a"] == params["b"])

    def make_history(
        self, known: int, is_stopping: Callable[[], bool] = lambda: False
    ) -> EvaluationHistory:
        """Return the history of a run with `known` complete evaluations."""
        history = EvaluationHistory(self.space)
        history.is_stopping = is_stopping  # type: ignore[method-assign]
        history.add_evaluations(
            make_evaluation(trial, params={"a": trial + 1, "b": trial + 1})
            for trial in range(known)
        )
        return history


@pytest.mark.slow
def test_draw_new_exhausts_a_constrained_space() -> None:
    diagonal = DiagonalSpace()
    assert diagonal.space.all_individuals is None
    history = diagonal.make_history(598)
    rest = []
    for trial in (598, 599):
        new = history.draw_new(random.Random(trial))
        assert new is not None
        history.add_evaluations([make_evaluation(trial, params=new)])
        rest.append(new["a"])
    assert sorted(rest) == [599, 600]
    before = diagonal.calls
    assert [history.draw_new(random.Random(0)) for _ in range(20)] == [None] * 20
    assert (before < 2_000_000, diagonal.calls - before) == (True, 0), (
        "10,000 draws would call the constraint 6,000,000 times"
    )


def test_draw_new_from_exhausted_space_stops() -> None:
    diagonal = DiagonalSpace()
    history = diagonal.make_history(600, is_stopping=lambda: diagonal.calls > 2000)
    assert history.draw_new(random.Random(0)) is None
    assert diagonal.calls < 10_000
    diagonal.calls = 0
    seen = list_individuals(diagonal.space, math.inf, math.inf, lambda: diagonal.calls > 5000)
    assert (seen, diagonal.calls < 10_000) == (None, True)


def test_draw_new_ends_if_a_constraint_makes_space_finite() -> None:
    space = SearchSpace(kind=Categorical("a", "b"), x=Float(0, 1, when={"kind": "b"}))
    space.require(lambda p: p["kind"] == "a", "kind is a")
    history = EvaluationHistory(space)
    assert history.draw_new(random.Random(0)) == {"kind": "a"}
    history.add_evaluations([make_evaluation(0, params={"kind": "a"})])
    assert history.draw_new(random.Random(0)) is None


def test_migrants_of_another_propagator_become_parents() -> None:
    """An island whose propagator uses only its population breeds from immigrants."""
    propagator = make_propagator("propulate", NUMBERS, 1, workers=2)
    best = {"depth": 8, "width": 0.5, "lr": 0.01}
    migrants = []
    for _ in range(8):
        migrants.append(Individual(NUMBERS, NUMBERS.encode(best)))
        migrants[-1].loss = 0.0
    bred = [NUMBERS.decode(propagator.breed(migrants) or {}) for _ in range(40)]
    assert sum(params["depth"] == 8 for params in bred) > 20

    started, _ = run_islands(NUMBERS, ["random", "nelder-mead"], 40)
    assert len(started) == 40


def test_propagators_learn_despite_failures() -> None:
    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        return (math.inf if params["act"] == "tanh" else compute_loss(params)), 1.0

    for name in ("ga", "tpe"):
        searcher = SimulatedIslands(EVERYTHING, [name], 2, 0)
        losses = simulate(searcher, evaluate, 60)
        assert losses.min() < 0.1
        assert np.isinf(losses[30:]).sum() < 10, "random search would have 10 failures"


def test_tpe_avoids_failures_beside_the_best() -> None:
    """Losses fall towards a region in which all evaluations fail, as if memory ran out there."""

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        size = params["x"] + params["y"]
        return (math.inf if size > 1 else 3 - size), 1.0

    space = SearchSpace(x=Float(0.0, 1.0), y=Float(0.0, 1.0))
    losses = simulate(SimulatedIslands(space, ["tpe"], 2, 0), evaluate, 80)
    assert losses.min() < 2.05
    assert np.isinf(losses[40:]).sum() < 25, "if failures are ignored, there are 36"


def test_tpe_forgets_a_failure_that_does_not_count() -> None:
    """A failure becomes an interruption if its worker was broken."""
    history = EvaluationHistory(NUMBERS)
    propagator = TPEPropagator(history, random.Random(0))
    params = {"depth": 8, "width": 0.5, "lr": 0.01}

    def learn(state: str) -> list[TrialState]:
        history.add_evaluations([make_evaluation(0, state, params=params, loss=math.inf)])
        propagator._learn()
        return [trial.state for trial in propagator._study.trials]

    assert learn("running") == learn("failed") == [TrialState.RUNNING]
    assert learn("interrupted")[0] == TrialState.FAIL
    propagator._restart_study()
    assert propagator._study.trials == []


def test_check_space_rejects_categories_for_cmaes() -> None:
    check_space(("ga", "cmaes"), NUMBERS)
    with pytest.raises(
        UsageError,
        match=r"cmaes must be used with numbers and ordinals only, got 'act', "
        r"which is Categorical\('relu'",
    ):
        check_space(("ga", "cmaes"), EVERYTHING)


def test_gaussian_process_predicts_with_uncertainty() -> None:
    rng = np.random.default_rng(0)

    def draw(count: int) -> Any:
        return np.column_stack(
            [rng.random((count, 2)), np.eye(3)[rng.integers(3, size=count)] / math.sqrt(2)]
        )

    def truth(points: Any) -> Any:
        # The second coordinate does not matter.
        return np.sin(3 * points[:, 0]) + (points[:, 3] > 0)

    points, others = draw(80), draw(50)
    values = truth(points)
    mean, deviation = values.mean(), values.std()
    model = GaussianProcess(np.array([0, 1, 2, 2, 2]))
    model.fit(points, (values - mean) / deviation, known=80)
    predicted, sure = model.predict(others)
    assert np.abs(predicted * deviation + mean - truth(others)).max() < 0.2
    far = others + np.array([5.0, 0.0, 0.0, 0.0, 0.0])
    _, unsure = model.predict(far)
    assert sure.max() < 0.5 < unsure.min()
    model.assume_predictions(far)
    assert model.predict(far)[1].max() < 0.5


def test_examples_of_propulate_can_be_run() -> None:
    importlib.import_module("hpo.breeding.propulate_compat")  # It replaces GPy.
    from propulate.utils import get_default_propagator
    from propulate.utils.benchmark_functions import get_function_search_space

    function, limits = get_function_search_space("sphere")
    rng = random.Random(0)
    propagator = get_default_propagator(pop_size=4, limits=limits, rng=rng)
    assert math.isfinite(function(propagator([])))
    from propulate.propulator import deepdiff

    assert not deepdiff.DeepDiff({"x": 1}, {"x": 1}), "It checks for duplicates."
