"""Which request stops a run, and which one replaces or ends another stop."""

from __future__ import annotations

from hpo.errors import StopRequest
from hpo.evaluation.limits import SearchGoal
from hpo.ranks.run_stop import RunStop


def test_late_requests_for_cancelled_stops_are_ignored() -> None:
    """Two leaders reach the goal at the same time. One request arrives after the search has ended."""
    run_stop = RunStop()
    target, gain = SearchGoal(target_loss=2.0, stop_gain=0.1).list_stops()
    assert run_stop.begin_stop(target)
    for stop in (target, gain):
        run_stop.cancel_stop(stop)
    assert run_stop.reason is None
    assert [run_stop.begin_stop(stop) for stop in (target, gain)] == [False, False]
    assert run_stop.reason is None
    assert run_stop.measure_seconds() < 0
    assert run_stop.begin_stop(StopRequest("SIGTERM"))
    assert run_stop.measure_seconds() >= 0


def test_only_the_end_of_a_search_is_replaced_by_another_stop() -> None:
    run_stop = RunStop()
    (target, gain), signal = SearchGoal().list_stops(), StopRequest("SIGTERM")
    assert run_stop.begin_stop(target)
    assert not run_stop.begin_stop(gain)
    assert run_stop.begin_stop(signal)
    assert not run_stop.begin_stop(StopRequest("SIGINT"))
    assert run_stop.reason == signal
