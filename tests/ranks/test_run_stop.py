"""Which request stops a run, and which one replaces or ends another stop."""

from __future__ import annotations

from hpo.errors import StopRequest
from hpo.evaluation.leader import make_target_stop
from hpo.ranks.rank_watch import RunStop


def test_late_requests_for_cancelled_stops_are_ignored() -> None:
    """Two leaders reach the target at the same time. One asks after the search has ended."""
    run_stop = RunStop()
    target = make_target_stop(2.0)
    assert run_stop.begin_stop(target)
    run_stop.cancel_stop(target)
    assert run_stop.reason is None
    assert not run_stop.begin_stop(make_target_stop(2.0))
    assert run_stop.reason is None
    assert run_stop.measure_seconds() < 0
    assert run_stop.begin_stop(StopRequest("SIGTERM"))
    assert run_stop.measure_seconds() >= 0


def test_only_the_end_of_a_search_is_replaced_by_another_stop() -> None:
    run_stop = RunStop()
    target, signal = make_target_stop(2.0), StopRequest("SIGTERM")
    assert run_stop.begin_stop(target)
    assert not run_stop.begin_stop(target)
    assert run_stop.begin_stop(signal)
    assert not run_stop.begin_stop(StopRequest("SIGINT"))
    assert run_stop.reason == signal
