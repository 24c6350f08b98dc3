"""Test the surrogate of `ga`: transformations, Gaussian process and acquisition functions."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from scipy import integrate, stats

from hpo import Float, SearchSpace
from hpo.breeding import surrogate
from hpo.breeding.evaluation_history import (
    EvaluationHistory,
    RecordedHistory,
    TimeBudget,
    find_informative,
)
from hpo.breeding.gaussian_process import (
    GaussianProcess,
    Vector,
    apply_power_transform,
    compute_normal_scores,
    select_learned,
)
from hpo.breeding.population import Individual
from hpo.breeding.propagators import make_propagator
from hpo.breeding.surrogate import (
    DurationModel,
    HypervolumeImprovement,
    SuccessModel,
    Surrogate,
    log_expected_improvement,
    select_latest,
)
from hpo.dominance import compute_hypervolume
from hpo.objectives import ONLY_LOSS
from hpo.space import Value
from hpo.store.evaluations import Evaluation
from tests.support.evaluations import make_evaluation

FIVE = SearchSpace(**{f"x{index}": Float(-1.0, 1.0) for index in range(5)})


def test_power_transformed_losses_are_normal_in_their_order() -> None:
    losses = np.random.default_rng(0).lognormal(0, 1, 200)
    transformed = apply_power_transform(losses)
    assert stats.skew(losses) > 1.5
    assert abs(stats.skew(transformed)) < 0.2
    assert (np.argsort(transformed) == np.argsort(losses)).all()
    assert transformed.mean() == pytest.approx(0, abs=1e-9)
    assert transformed.std() == pytest.approx(1)


def test_power_transform_agrees_with_scipy() -> None:
    losses = np.random.default_rng(1).gamma(2.0, size=100)
    centered = losses - np.median(losses)
    theirs, _ = stats.yeojohnson(centered / np.median(np.abs(centered)))
    ours = apply_power_transform(losses)
    assert ours == pytest.approx((theirs - theirs.mean()) / theirs.std(), abs=1e-3)


@pytest.mark.parametrize("outlier", [1e9, 1e300, 1.7e308, -1.7e308, math.inf])
def test_power_transform_keeps_differences_despite_outlier(outlier: float) -> None:
    losses = np.append(np.linspace(1.0, 2.0, 20), [outlier, outlier])
    transformed = apply_power_transform(losses)
    assert np.isfinite(transformed).all()
    assert transformed[19] - transformed[0] > 0.5, "in units of a standard deviation"
    assert np.diff(transformed[:20]).min() > 0
    assert (transformed[20:] == (transformed.max() if outlier > 0 else transformed.min())).all()
    assert np.isfinite(compute_normal_scores(losses)).all()


def test_transforms_of_equal_losses_are_zero() -> None:
    for losses in (np.full(5, 3.0), np.full(5, math.inf)):
        assert (compute_normal_scores(losses) == 0).all()
        assert (apply_power_transform(losses) == 0).all()


def test_normal_scores_of_equal_losses_are_equal() -> None:
    scores = compute_normal_scores(np.array([5.0, 1.0, math.inf, 1.0]))
    assert scores == pytest.approx(stats.norm.ppf([5 / 8, 1 / 4, 7 / 8, 1 / 4]))


def test_log_expected_improvement_matches_integral() -> None:
    for standardized in (-3.0, -1.1, -0.9, 0.0, 2.5):
        rng = np.linspace(-12, 12, 100_001)
        gain = integrate.trapezoid(np.maximum(standardized - rng, 0) * stats.norm.pdf(rng), rng)
        assert log_expected_improvement(np.array([standardized]))[0] == pytest.approx(
            math.log(gain), abs=1e-6
        )
    far = log_expected_improvement(-np.logspace(0, 6, 200))
    assert np.isfinite(far).all()
    assert (np.diff(far) < 0).all(), "the gain must fall with the distance"


def _breed_after(space: SearchSpace, count: int) -> dict[str, Value]:
    """Breed after `count` random evaluations. The loss is the squared distance to 0.25."""
    draws = random.Random(0)
    propagator = make_propagator("ga", space, 1)
    for _ in range(count):
        individual = Individual(space, space.encode(space.draw(draws)))
        propagator.history.start(individual)
        distance = sum((float(value) - 0.25) ** 2 for value in individual.params.values())
        propagator.tell(individual, distance)
    return propagator.ask().params


def test_ga_breeds_further_from_promising_candidates() -> None:
    bred = _breed_after(FIVE, 60)
    assert max(abs(float(str(value)) - 0.25) for value in bred.values()) < 0.2, (
        "the best of 150 random candidates has 0.36"
    )


def _learn(*known: Evaluation) -> Callable[..., Vector]:
    history = EvaluationHistory(FIVE)
    history.add_evaluations(known)
    return Surrogate(history, np.random.default_rng(0)).learn(history.make_founder_sample())


def _draw_evaluations(count: int) -> list[Evaluation]:
    """Return `count` random evaluations. The loss is the squared distance to 0."""
    rng = random.Random(0)
    drawn = [FIVE.draw(rng) for _ in range(count)]
    return [
        make_evaluation(trial, loss=sum(float(x) ** 2 for x in p.values()), params=p)
        for trial, p in enumerate(drawn)
    ]


@pytest.mark.parametrize("exploration_share", [0.0, 1.0])
def test_surrogate_imputes_pending_evaluations(
    exploration_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surrogate, "_EXPLORATION_SHARE", exploration_share)
    running = make_evaluation(40, state="running", params=dict.fromkeys(FIVE.parameters, 0.0))
    beside = np.array([[0.1, 0.0, 0.0, 0.0, 0.0]])
    before, after = _learn(*_draw_evaluations(40)), _learn(*_draw_evaluations(40), running)
    assert after(beside) < before(beside)


def _fail_above(evaluations: list[Evaluation], limit: float) -> list[Evaluation]:
    """Return evaluations of which those with x0 above a limit have failed."""
    return [
        dataclasses.replace(e, state="failed", loss=math.inf)
        if float(e.params["x0"]) > limit
        else e
        for e in evaluations
    ]


@pytest.mark.parametrize("exploration_share", [0.0, 1.0])
def test_surrogate_avoids_region_where_evaluations_fail(
    exploration_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surrogate, "_EXPLORATION_SHARE", exploration_share)
    inside, outside = np.array([[0.4, 0.0, 0.0, 0.0, 0.0]]), np.array([[-0.4, 0.0, 0.0, 0.0, 0.0]])
    evaluations = _draw_evaluations(80)
    without, with_failures = _learn(*evaluations), _learn(*_fail_above(evaluations, 0.2))
    assert abs(without(inside) - without(outside)) < 1
    assert with_failures(inside) < with_failures(outside) - 2


def test_surrogate_excludes_candidates_near_failed_ones() -> None:
    evaluations = _fail_above(_draw_evaluations(40), 0.2)
    failed = next(evaluation for evaluation in evaluations if evaluation.state == "failed")
    genes = np.array(list(FIVE.encode(failed.params).values()))
    assert _learn(*evaluations)(genes[np.newaxis] + 0.01) == -np.inf


def test_surrogate_learns_loss_near_failures_from_successes() -> None:
    limit, best = 0.2, np.array([[0.0, 0.0, 0.0, 0.0, 0.0]])
    evaluations = _fail_above(_draw_evaluations(80), limit)
    compute_merits = _learn(*evaluations)
    far = np.array([[-0.8, 0.0, 0.0, 0.0, 0.0]])
    assert compute_merits(best) > compute_merits(far), (
        "the best region must not lose its merit next to failures"
    )


def test_surrogate_learns_from_one_success() -> None:
    evaluations = _fail_above(_draw_evaluations(12), -2.0)
    evaluations[5] = _draw_evaluations(12)[5]
    merits = _learn(*evaluations)(np.random.default_rng(0).uniform(-1, 1, (50, 5)))
    assert np.isfinite(merits).all()


def test_success_model_predicts_probabilities_of_a_half_space() -> None:
    points = np.random.default_rng(0).random((240, 5))
    succeeded = points @ np.array([1.0, 1.0, 0.0, 0.0, 0.0]) < 1.2
    model = SuccessModel(np.arange(5))
    model.fit(points[:120], succeeded[:120], known=120)
    probabilities = np.exp(model.compute_log_weight(points[120:]) / surrogate._CAUTION)
    assert np.mean((probabilities > 0.5) == succeeded[120:]) > 0.9
    assert probabilities[succeeded[120:]].mean() > 0.85
    assert probabilities[~succeeded[120:]].mean() < 0.25


def test_success_model_far_away_predicts_share_of_successes() -> None:
    points = np.random.default_rng(0).random((30, 2)) / 10
    model = SuccessModel(np.arange(2))
    model.fit(points, np.arange(30) % 3 > 0, known=30)
    far = np.exp(model.compute_log_weight(np.array([[1e3, 1e3]])) / surrogate._CAUTION)
    assert 0.4 < far < 0.7


def test_unknown_region_stays_attractive_if_most_fail() -> None:
    points = np.random.default_rng(0).random((40, 8))
    succeeded = points[:, 0] + points[:, 1] < 0.85
    assert 0.1 < succeeded.mean() < 0.4
    model = SuccessModel(np.arange(8))
    model.fit(points, succeeded, known=40)
    assert model.compute_log_weight(points[succeeded]).min() > -1.5
    assert -3.5 < model.compute_log_weight(np.full((1, 8), 1e3))[0] < -2, (
        "a search must leave its first successes"
    )


def test_uninformative_failures_do_not_lower_merits() -> None:
    """A streak of failures does not depend on hyperparameters."""
    evaluations = _draw_evaluations(20)
    failed = [dataclasses.replace(one, state="failed", loss=math.inf) for one in evaluations[:9]]
    genes = np.random.default_rng(0).uniform(-1, 1, (50, 5))
    with_streak, without = _learn(*failed, *evaluations[9:])(genes), _learn(*evaluations[9:])(genes)
    np.testing.assert_allclose(with_streak, without, rtol=1e-9)


def test_find_informative_leaves_out_long_streaks_of_failures() -> None:
    streak = [True, False, True, *[False] * 9, True, *[False] * 8, True]
    chosen = find_informative(np.array(streak))
    assert chosen.tolist() == [0, 1, 2, *range(12, 22)]
    assert select_latest(np.arange(300)).tolist() == list(range(64, 300))
    assert select_latest(np.arange(256)).tolist() == list(range(256))


def test_resumed_run_learns_in_the_order_of_ends() -> None:
    """Twelve short failures came before twelve long successes: a streak, which teaches nothing."""
    known = [
        make_evaluation(
            trial,
            "failed" if trial % 2 else "complete",
            params=dict.fromkeys(FIVE.parameters, trial / 32),
            ended=float(trial if trial % 2 else 100 + trial),
        )
        for trial in range(24)
    ]
    running = make_evaluation(24, "running", params=dict.fromkeys(FIVE.parameters, -0.5))
    history = RecordedHistory(FIVE, ONLY_LOSS, list)
    history.restore([running, *known])
    sample = history.make_founder_sample()
    assert sample.succeeded.tolist() == [False] * 12 + [True] * 12
    assert len(sample.running) == 1


@pytest.mark.parametrize("exploration_share", [0.0, 1.0])
def test_surrogate_excludes_candidates_near_known_ones(
    exploration_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surrogate, "_EXPLORATION_SHARE", exploration_share)
    known = _draw_evaluations(40)
    running = make_evaluation(40, state="running", params=dict.fromkeys(FIVE.parameters, 0.0))
    compute_merits = _learn(*known, running)
    for evaluation in (known[7], running):
        genes = np.array(list(FIVE.encode(evaluation.params).values()))
        # The range is 2.
        within, outside = genes + 0.019, genes + np.array([0.0, 0.021, 0.0, 0.0, 0.0])
        assert compute_merits(within[np.newaxis]) == -np.inf
        assert np.isfinite(compute_merits(outside[np.newaxis]))


@pytest.mark.parametrize("objectives", [2, 3])
def test_hypervolume_improvement_is_the_added_hypervolume(
    objectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    known, candidates = rng.random((objectives, 30)), 0.5 * rng.random((objectives, 200))
    reference = known.max(axis=1)
    monkeypatch.setattr(surrogate, "_RAYS", 5000)
    monkeypatch.setattr(surrogate, "_SMOOTHING", 1e-4)
    monkeypatch.setattr(surrogate, "compute_reference_point", lambda *_: reference)
    before = compute_hypervolume(known.T, reference)
    added = np.array(
        [compute_hypervolume(np.vstack([known.T, own]), reference) - before for own in candidates.T]
    )
    gained = np.exp(HypervolumeImprovement(known, rng)(candidates[None]))
    is_large = added > 0.01
    assert 10 < is_large.sum() < 200
    assert gained[is_large] / gained[is_large].sum() == pytest.approx(
        added[is_large] / added[is_large].sum(), rel=0.15
    )
    assert gained[~is_large].max() < gained[is_large].min()


def test_hypervolume_improvement_behind_front_prefers_near() -> None:
    known = np.array([[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]])
    behind = np.array([[0.6, 0.8, 2.0, 1e3, 1e150], [0.6, 0.8, 2.0, 1e3, 1e150]])
    gained = HypervolumeImprovement(known, np.random.default_rng(0))(behind[None])
    assert np.isfinite(gained).all()
    assert (np.diff(gained) < 0).all()
    alone = HypervolumeImprovement(np.array([[1.0], [2.0]]), np.random.default_rng(0))
    ahead = alone(np.array([[0.5, 1.0, 1.5], [1.0, 2.0, 3.0]])[None])
    assert (np.diff(ahead) < 0).all(), "a front of a single point must work, too"


def test_select_learned_takes_the_best_and_the_last() -> None:
    losses = np.random.default_rng(0).random((1000, 1))
    chosen = select_learned(losses)
    assert len(chosen) == 256
    assert set(range(872, 1000)) <= set(chosen)
    assert set(np.argsort(losses[:872, 0])[:128]) <= set(chosen)
    assert select_learned(losses[:9]).tolist() == list(range(9))


def test_select_learned_prefers_the_first_of_equal_losses() -> None:
    losses = np.tile([[2.0], [1.0]], (300, 1))
    assert select_learned(losses)[:128].tolist() == list(range(1, 256, 2))


def test_gaussian_process_learns_incrementally() -> None:
    rng = np.random.default_rng(0)
    points, values, others = rng.random((150, 5)), rng.standard_normal(150), rng.random((20, 5))
    bit_by_bit, at_once = (GaussianProcess(np.array([0, 1, 2, 2, 2])) for _ in range(2))
    bit_by_bit.fit(points[:140], values[:140], known=140)
    bit_by_bit.assume_predictions(others[:3])
    bit_by_bit.fit(points, values, known=145)
    at_once.fit(points[:140], values[:140], known=140)
    at_once.fit(points[::-1], values[::-1], known=145)
    for found, expected in zip(bit_by_bit.predict(others), at_once.predict(others), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert bit_by_bit.means == pytest.approx(at_once.means[::-1], abs=1e-9)


def test_assume_predictions_changes_only_deviations() -> None:
    rng = np.random.default_rng(0)
    points, others = rng.random((60, 4)), rng.random((9, 4))
    model = GaussianProcess(np.arange(4))
    model.fit(points, np.sin(5 * points[:, 0]) - 2 * points[:, 1] ** 2, known=60)
    (mean, deviation), lowest = model.predict(others), model.means.min()
    model.assume_predictions(others[:5])
    there, sure = model.predict(others)
    assert there == pytest.approx(mean, abs=1e-4)
    assert (sure[:5] < deviation[:5]).all()
    assert model.means[60:] == pytest.approx(mean[:5], abs=1e-4)
    assert model.lowest_mean == pytest.approx(min(lowest, mean[:5].min()), abs=1e-4)


def test_misfit_gradient_matches_finite_differences() -> None:
    rng = np.random.default_rng(0)
    points, values = rng.random((40, 4)), rng.standard_normal(40)
    model = GaussianProcess(np.array([0, 1, 2, 2]))
    logs, squares = np.array([-0.5, 0.1, -1.0, -4.0]), model._compute_half_squares(points)
    _, gradient = model._compute_misfit(logs, squares, values)
    for index, step in enumerate(1e-5 * np.eye(4)):
        rise = (
            model._compute_misfit(logs + step, squares, values)[0]
            - model._compute_misfit(logs - step, squares, values)[0]
        )
        assert gradient[index] == pytest.approx(rise / 2e-5, rel=1e-5)


def test_merits_up_to_useless_skip_the_distance_check() -> None:
    known = _draw_evaluations(40)
    genes = np.array([list(FIVE.encode(known[7].params).values()), [0.5] * 5])
    compute_merits = _learn(*known)
    assert compute_merits(genes)[0] == -np.inf
    assert np.isfinite(compute_merits(genes, math.inf)).all()
    assert compute_merits(genes, math.inf)[1] == compute_merits(genes)[1]


def test_durations_matter_only_if_they_differ() -> None:
    rng = np.random.default_rng(0)
    points = rng.random((40, 2))
    model = DurationModel(np.arange(2))
    assert not model.fit(points, np.exp(0.3 * rng.standard_normal(40)), 1.0, known=40)
    assert not model.fit(points[:4], 100 ** points[:4, 0], 1.0, known=4)
    seconds = 100 ** points[:, 0]
    seconds[3] = math.nan
    assert not model.fit(points, seconds, 0.0, known=40)
    assert model.fit(points, seconds, 1.0, known=40)


def test_weight_of_duration_is_a_power_of_the_duration() -> None:
    points = np.random.default_rng(0).random((60, 2))
    seconds = 100 ** points[:, 0]
    model, median = DurationModel(np.arange(2)), np.median(seconds)
    some = np.array([[0.1, 0.5], [0.5, 0.2], [0.95, 0.7]])
    expected = -np.log(1 + 100 ** some[:, 0] / median)
    for scarcity in (1.0, 0.4):
        assert model.fit(points, seconds, scarcity, known=60)
        assert model.compute_log_weight(some) == pytest.approx(scarcity * expected, abs=0.1)


def test_time_is_scarce_while_it_ends_before_the_evaluations() -> None:
    now = 100.0
    budget = TimeBudget(60.0, 20, 100.0, lambda: now)
    assert budget.compute_scarcity(0) == 0, "The pace is unknown."
    now = 115.0
    assert budget.compute_scarcity(4) == 0.75, "20 evaluations would take 75 s."
    assert budget.compute_scarcity(5) == 0, "20 evaluations take 60 s."
    now = 170.0
    assert budget.compute_scarcity(4) == 0, "The time is over."
    assert TimeBudget(math.inf, 20, 100.0, lambda: now).compute_scarcity(1) == 0


def suggest_slow_share(scarcity: float) -> float:
    """Return the share of suggestions with x0 > 0, where evaluations may take 100 times as long."""
    budget = SimpleNamespace(compute_scarcity=lambda _: scarcity)
    chosen = []
    for seed in range(6):
        propagator = make_propagator("ga", FIVE, seed)
        propagator.history.time_budget = cast(Any, budget)
        for _ in range(30):
            individual = Individual(FIVE, FIVE.encode(FIVE.draw(propagator.rng)))
            propagator.history.start(individual)
            loss = sum(float(x) ** 2 for x in individual.params.values())
            propagator.tell(individual, loss, seconds=100 ** float(individual.params["x0"]))
        chosen += [float(propagator.ask().params["x0"]) > 0 for _ in range(5)]
    return float(np.mean(chosen))


@pytest.mark.slow
def test_short_evaluations_are_suggested_while_time_is_scarce() -> None:
    assert suggest_slow_share(1.0) < suggest_slow_share(0.0) - 0.2
