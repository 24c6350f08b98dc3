"""Test the axis of losses in figures, which excludes outliers and shows all other losses."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.views.loss_scale import LossScale, make_loss_scale

LOSSES = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=60)


def make_linear_losses(low: float, high: float, count: int) -> list[float]:
    return [low + (high - low) * index / (count - 1) for index in range(count)]


def make_log_losses(low: float, high: float, count: int) -> list[float]:
    return [10**power for power in make_linear_losses(low, high, count)]


BULK = make_linear_losses(0.1, 2.0, 40)
CONVERGED = [*make_linear_losses(0.033, 0.06, 180), *make_linear_losses(0.06, 2.3, 20)]
CHANCE = random.Random(0)

OUTLIERS: dict[str, tuple[list[float], list[float]]] = {
    "one": (BULK, [1.5e5]),
    "a third": (BULK, make_log_losses(3, 7, 20)),
    "nearly half": (BULK, make_log_losses(3, 7, 38)),
    "several equal": (BULK, [1e10] * 20),
    "in a converged run": (CONVERGED, [1.5e5]),
    "below zero": (make_linear_losses(-2.0, -0.5, 40), [1e4]),
    "a third below zero": (make_linear_losses(-2.0, -0.5, 40), make_log_losses(3, 6, 20)),
    "around zero": (make_linear_losses(-0.5, 0.5, 40), [1e3] * 13),
    "from zero": ([0.0] * 20 + make_linear_losses(0.1, 2.0, 20), [1e6]),
    "not far, but the others are close": (make_linear_losses(0.49, 0.51, 40), [9.0]),
    "far above a great number": (make_linear_losses(-1000.5, -999.0, 40), [-900.0]),
    "of three": ([0.4, 0.5], [1e5]),
    "the largest float": (BULK, [1.7e308]),
}

ORDINARY: dict[str, list[float]] = {
    "spread evenly": BULK,
    "one": [0.5],
    "two, either may be usual": [0.5, 1e5],
    "equal": [0.5] * 30,
    "zeros": [0.0] * 30,
    "converged": CONVERGED,
    "converged to zero": [0.0] * 5
    + make_linear_losses(0.0028, 0.02, 30)
    + make_linear_losses(0.1, 0.9, 20),
    "converged below zero": [
        *make_linear_losses(-0.99, -0.97, 150),
        *make_linear_losses(-0.95, -0.1, 50),
    ],
    "over many powers of ten": make_log_losses(-8, 2, 60),
    "mostly at the bottom of many powers of ten": [1e-8] * 60 + make_log_losses(-8, 2, 40),
    "all diverged": make_log_losses(3, 6, 30),
    "most diverged": [*BULK[:10], *make_log_losses(3, 6, 30)],
    "twenty times as high as others": [*BULK, 40.0],
    "normal": [CHANCE.gauss(0, 1) for _ in range(1000)],
    "exponential": [CHANCE.expovariate(1) for _ in range(1000)],
    "log-normal": [math.exp(CHANCE.gauss(0, 1)) for _ in range(1000)],
    "over all floats": [-1.7e308, 0.0, 1.7e308],
}


@pytest.mark.parametrize("name", OUTLIERS)
def test_loss_scale_excludes_only_outliers(name: str) -> None:
    bulk, far = OUTLIERS[name]
    scale = make_loss_scale([*far, *bulk], [*bulk, *far])
    assert scale == LossScale(min(bulk), max(bulk)) == make_loss_scale(bulk, bulk)
    assert all(scale.is_out_of_range(loss) for loss in far)


@pytest.mark.parametrize("name", ORDINARY)
def test_loss_scale_without_outliers_includes_all(name: str) -> None:
    losses = ORDINARY[name]
    assert (
        make_loss_scale(losses, losses)
        == make_loss_scale(losses)
        == LossScale(min(losses), max(losses))
    )


def test_loss_scale_excludes_losses_unusual_in_run() -> None:
    first_epochs = [1e6 + loss for loss in BULK]
    assert make_loss_scale([*first_epochs, *BULK], BULK) == LossScale(0.1, 2.0), (
        "half of the losses are first epochs"
    )
    assert make_loss_scale([1.5e5, 0.5], BULK) == LossScale(0.5, 0.5), "the best so far"
    assert make_loss_scale([1e6, 0.7, 0.6], [0.6]) == LossScale(0.6, 0.7), "the only evaluation"
    assert make_loss_scale([1e6, 2e6], BULK) == LossScale(1e6, 2e6), "losses of failed evaluations"
    assert make_loss_scale([2.3, 2.2, 0.5, 0.4], [0.0] * 9) == LossScale(0.4, 2.3), (
        "all final losses are equal"
    )
    assert (
        make_loss_scale([], BULK)
        == make_loss_scale([math.inf, math.nan], BULK)
        == LossScale(0.0, 0.0)
    )
    assert make_loss_scale([math.inf, *BULK], BULK) == LossScale(0.1, 2.0)


@given(LOSSES)
def test_loss_scale_of_any_losses_includes_best_and_45_percent(losses: list[float]) -> None:
    scale = make_loss_scale(losses, losses)
    assert scale.lowest == min(losses)
    assert scale.highest in losses
    assert sum(map(scale.is_out_of_range, losses)) <= 0.55 * len(losses)
    assert make_loss_scale(losses[::-1], losses) == scale
    if len(losses) < 3:
        assert scale.highest == max(losses)


@pytest.mark.parametrize("name", OUTLIERS)
def test_loss_scale_does_not_depend_on_unit(name: str) -> None:
    bulk, far = OUTLIERS[name]
    for unit in (2.0**-10, 2.0**10):
        losses = [unit * min(loss, 1e300) for loss in (*bulk, *far)]
        assert make_loss_scale(losses, losses) == LossScale(unit * min(bulk), unit * max(bulk))


def test_loss_scale_of_distant_losses_is_logarithmic() -> None:
    assert not make_loss_scale([*BULK, 1.5e5], BULK).is_logarithmic
    wide = make_loss_scale([*make_log_losses(-3, 1, 40), 1e9])
    assert (wide.lowest, wide.highest, wide.is_logarithmic) == (1e-3, 10.0, True)
    assert wide.compute_fraction(0.1) == pytest.approx(0.5)
    assert wide.compute_loss(0.25) == pytest.approx(1e-2)
    below = LossScale(-1.0, 3.0)
    assert (below.compute_fraction(0.0), below.compute_loss(1.25)) == (0.25, 4.0)
    assert LossScale(-1.7e308, 1.7e308).compute_fraction(0.0) == 0.5
    assert math.isfinite(LossScale(1e-5, 1e305).compute_loss(1.5))
