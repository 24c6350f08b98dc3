from __future__ import annotations

import pytest

from hpo.evaluation.verdict import Step, Verdict, judge


def fails(rank: int, text: str, at: float, **more: object) -> Step:
    return Step(rank, failure=text, at=at, traceback=f"of rank {rank}", **more)  # type: ignore[arg-type]


def test_equal_losses_go_on_and_a_common_end_is_complete() -> None:
    assert judge([Step(0, 0.5, {"accuracy": 0.9}), Step(1, 0.5 + 1e-7)]) == Verdict("going", 0.5, {"accuracy": 0.9})
    assert judge([Step(0, 0.0), Step(1, 0.0)]).state == "going"
    assert judge([Step(0), Step(1), Step(2)]) == Verdict("complete")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (
            [Step(0, 1.0, place="x.py:3"), Step(1, 1.1, place="x.py:4")],
            "the ranks yielded different losses: rank 0 1.0 at x.py:3, rank 1 1.1 at x.py:4; all_reduce it, "
            "for example",
        ),
        (
            [Step(0, 1e-3), Step(1, 0.0)],
            "the ranks yielded different losses: rank 0 0.001, rank 1 0.0; all_reduce it, for example",
        ),
        ([Step(0), Step(1, 1.0)], "the ranks do not yield equally many losses: rank 0 ended, rank 1 1.0"),
        ([fails(0, "b", 2.0), fails(1, "a", 1.0), Step(2, 1.0)], "rank 1: a"),
        ([fails(0, "Connection closed by peer", 1.0, echo=True), fails(1, "cause", 2.0)], "rank 1: cause"),
        ([fails(0, "a peer failed", 1.0, own=False, place="x.py:3"), fails(1, "cause", 2.0)], "rank 1: cause"),
        ([Step(0, 1.0), fails(1, "cause", 2.0, place="x.py:3")], "rank 1, x.py:3: cause"),
        (
            [fails(0, "waited", 2.0, timeout=True, place="x.py:3"), fails(1, "waited", 1.0, timeout=True)],
            "timeout: rank 1 waited at its end for rank 0, which was at x.py:3",
        ),
        (
            [fails(0, "waited", 2.0, timeout=True), fails(1, "waited", 1.0, timeout=True, place="x.py:3")],
            "timeout: rank 1 waited at x.py:3 for rank 0, which had ended",
        ),
        (
            [
                fails(0, "waited", 1.0, timeout=True, place="x.py:9"),
                fails(1, "a peer", 2.0, own=False, place="x.py:3"),
                fails(2, "Connection closed", 2.0, own=False, echo=True, place="x.py:9"),
            ],
            "timeout: rank 0 waited at x.py:9 for rank 1, which was at x.py:3",
        ),
        (
            [fails(0, "waited", 1.0, timeout=True), fails(1, "closed", 2.0, own=False, echo=True, place="x.py:3")],
            "timeout: rank 0 waited at its end for rank 1, which was at x.py:3",
        ),
        (
            [fails(0, "waited", 1.0, timeout=True, place="x.py:3"), Step(1, 0.5, place="x.py:9"), Step(2)],
            "timeout: rank 0 waited at x.py:3 for rank 1, which had yielded at x.py:9, rank 2, which had ended",
        ),
        (
            [
                fails(0, "Detected", 2.0, collective="barrier", place="x.py:3"),
                fails(1, "Detected", 1.0, collective="allreduce of float [3]", place="x.py:9"),
            ],
            "the ranks are in different collectives: rank 0 barrier at x.py:3, rank 1 allreduce of float [3] at x.py:9",
        ),
        ([fails(0, "timeout: no loss", 1.0, own=False, place="x.py:3")], "timeout: no loss; rank 0 was at x.py:3"),
    ],
)
def test_a_failure_names_its_cause(steps: list[Step], reason: str) -> None:
    verdict = judge(steps)
    assert (verdict.state, verdict.failure) == ("failed", reason)


@pytest.mark.parametrize(
    ("steps", "traceback"),
    [
        ([Step(0, 1.0), Step(1, 1.1)], ""),
        ([fails(0, "Connection closed by peer", 1.0, echo=True), fails(1, "cause", 2.0)], "of rank 1"),
        (
            [fails(0, "waited", 1.0, timeout=True), fails(1, "closed", 2.0, own=False), Step(2)],
            "Rank 1:\nof rank 1\n\nRank 0:\nof rank 0",
        ),
        (
            [fails(rank, "Detected", 1.0, collective=name) for rank, name in enumerate(["barrier", "broadcast"])],
            "Rank 0:\nof rank 0\n\nRank 1:\nof rank 1",
        ),
        ([fails(0, "timeout: no loss", 1.0, own=False), Step(1)], "Rank 0:\nof rank 0"),
    ],
)
def test_a_failure_has_the_tracebacks_of_those_whom_it_names(steps: list[Step], traceback: str) -> None:
    assert judge(steps).traceback == traceback


def test_ranks_in_the_same_collective_are_asked_again() -> None:
    steps = [fails(rank, "Detected", 1.0, collective="allreduce of float [1]") for rank in range(3)]
    assert judge(steps).state == "again"
    assert judge([*steps[:2], fails(2, "Connection closed by peer", 2.0, echo=True)]).state == "failed"


def test_a_run_that_stops_fails_nothing() -> None:
    assert judge([fails(0, "echo", 1.0), fails(1, "the run stops", 2.0, own=False, stopped=True)]).state == "stopped"
