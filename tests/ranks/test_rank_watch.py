"""Test which request stops a run, and how an evaluation is cancelled; without MPI."""

from __future__ import annotations

import math
import os
from typing import Any

from hpo.errors import StopRequest
from hpo.evaluation.leader import make_target_stop
from hpo.ranks.rank_watch import Peers, RunStop, WatchedEvaluation


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


def test_first_cause_of_a_cancelled_evaluation_counts() -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK)
    sent: list[tuple[Any, ...]] = []
    peers = Peers(0, [1], "rank 0", "rank 1", patience=9.0)
    evaluation = WatchedEvaluation(3, event, peers, lambda *message: sent.append(message))
    assert (evaluation.cause, evaluation.cancelled_at) == (None, math.inf)
    evaluation.receive("news", "a line")
    evaluation.receive("cancel", "a peer failed")
    cancelled_at = evaluation.cancelled_at
    evaluation.cancel_on_all("timeout")
    assert (evaluation.cause, evaluation.cancelled_at) == ("a peer failed", cancelled_at)
    assert cancelled_at < math.inf
    assert sent == [(1, "cancel", 3, "timeout")]
    assert evaluation.take_news() == ["a line"]
    assert evaluation.take_news() == []
    assert os.eventfd_read(event) == 2, "both events wake the main thread"
    os.close(event)
