"""Test the timeline of a report."""

from __future__ import annotations

import pytest

from hpo.views.page.run_figures import draw_timeline
from tests.support.evaluations import make_evaluation


@pytest.mark.parametrize(("workers", "lanes"), [(8, 8), (2, 6)])
def test_timeline_has_a_lane_for_each_worker_of_all_sessions(workers: int, lanes: int) -> None:
    figure = draw_timeline(
        [make_evaluation(0, worker=0), make_evaluation(1, worker=5)], workers, None
    )
    assert figure is not None
    assert figure.layout["yaxis"]["range"] == [lanes - 0.4, -0.6]
