"""Test the verdict on the ends of an evaluation on all ranks, and the comparison of reports."""

from __future__ import annotations

import pytest

from hpo.evaluation.verdict import FailureKind, RankEnd, State, Verdict, judge_ends
from hpo.trainer.report_exchange import ReportPart, find_difference


def fail_rank(rank: int, text: str, at: float, **more: object) -> RankEnd:
    return RankEnd(rank, failure=text, at=at, traceback=f"of rank {rank}", **more)  # type: ignore[arg-type]


def test_judge_ends_without_failure_is_complete() -> None:
    assert judge_ends([RankEnd(0), RankEnd(1), RankEnd(2)]) == Verdict(State.COMPLETE)


def test_find_difference_of_agreeing_parts_is_empty() -> None:
    assert not find_difference([ReportPart(0, 0.5), ReportPart(1, 0.5 + 1e-7)])
    assert not find_difference([ReportPart(0, 0.0), ReportPart(1, 0.0)])
    assert not find_difference([ReportPart(0, None), ReportPart(1, None)])
    assert not find_difference([ReportPart(0, 0.5, has_ended=True), ReportPart(1, 0.5)])


@pytest.mark.parametrize(
    ("parts", "difference"),
    [
        (
            [ReportPart(0, 1.0, "x.py:3"), ReportPart(1, 1.1, "x.py:4")],
            "the ranks yielded different losses: rank 0 1.0 at x.py:3, rank 1 1.1 at x.py:4; "
            "all_reduce it, for example",
        ),
        (
            [ReportPart(0, 1e-3), ReportPart(1, 0.0)],
            "the ranks yielded different losses: rank 0 0.001, rank 1 0.0; all_reduce it, "
            "for example",
        ),
        (
            [ReportPart(0, None), ReportPart(1, 1.0)],
            "the ranks do not yield equally many losses: rank 0 ended, rank 1 1.0",
        ),
        (
            [ReportPart(0, 1.0, "x.py:3", gathers_weights=True), ReportPart(1, 1.0)],
            "not all ranks offered a function, which all of them have to call: "
            "rank 0 did at x.py:3, rank 1 did not",
        ),
        (
            [ReportPart(0, 0.5, "x.py:3", gathers_checkpoint=True), ReportPart(1, 0.5, "x.py:5")],
            "not all ranks saved a function, or sharded tensors, which all of them have to gather: "
            "rank 0 did at x.py:3, rank 1 did not at x.py:5",
        ),
    ],
)
def test_find_difference_names_what_each_rank_did(parts: list[ReportPart], difference: str) -> None:
    assert find_difference(parts) == difference


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ([fail_rank(0, "b", 2.0), fail_rank(1, "a", 1.0), RankEnd(2)], "rank 1: a"),
        (
            [fail_rank(0, "Connection closed by peer", 1.0, echo=True), fail_rank(1, "cause", 2.0)],
            "rank 1: cause",
        ),
        (
            [
                fail_rank(0, "a peer failed", 1.0, kind=FailureKind.CANCELLED, place="x.py:3"),
                fail_rank(1, "cause", 2.0),
            ],
            "rank 1: cause",
        ),
        ([RankEnd(0), fail_rank(1, "cause", 2.0, place="x.py:3")], "rank 1, x.py:3: cause"),
        (
            [
                fail_rank(0, "waited", 2.0, kind=FailureKind.TIMEOUT, place="x.py:3"),
                fail_rank(1, "waited", 1.0, kind=FailureKind.TIMEOUT, has_reported=True),
            ],
            "timeout: rank 1 waited at its end for rank 0, which was at x.py:3",
        ),
        (
            [
                fail_rank(0, "waited", 2.0, kind=FailureKind.TIMEOUT, has_reported=True),
                fail_rank(1, "waited", 1.0, kind=FailureKind.TIMEOUT, place="x.py:3"),
            ],
            "timeout: rank 1 waited at x.py:3 for rank 0, which had ended",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, kind=FailureKind.TIMEOUT, place="x.py:9"),
                fail_rank(1, "a peer", 2.0, kind=FailureKind.CANCELLED, place="x.py:3"),
                fail_rank(
                    2,
                    "Connection closed",
                    2.0,
                    kind=FailureKind.CANCELLED,
                    echo=True,
                    place="x.py:9",
                ),
            ],
            "timeout: rank 0 waited at x.py:9 for rank 1, which was at x.py:3",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, kind=FailureKind.TIMEOUT),
                fail_rank(1, "closed", 2.0, kind=FailureKind.CANCELLED, echo=True, place="x.py:3"),
            ],
            "timeout: rank 0 waited at its end for rank 1, which was at x.py:3",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, kind=FailureKind.TIMEOUT, place="x.py:3"),
                fail_rank(
                    1,
                    "a peer waited",
                    1.0,
                    kind=FailureKind.CANCELLED,
                    has_reported=True,
                    place="x.py:9",
                ),
                fail_rank(2, "a peer waited", 1.0, kind=FailureKind.CANCELLED, has_reported=True),
            ],
            "timeout: rank 0 waited at x.py:3 for rank 1, which had yielded at x.py:9, "
            "rank 2, which had ended",
        ),
        (
            [fail_rank(0, "timeout: no loss", 1.0, kind=FailureKind.CANCELLED, place="x.py:3")],
            "timeout: no loss; rank 0 was at x.py:3",
        ),
        (
            [
                fail_rank(0, "timeout: no loss", 1.0, kind=FailureKind.CANCELLED),
                fail_rank(1, "timeout: no loss", 2.0, kind=FailureKind.CANCELLED, place="x.py:3"),
            ],
            "timeout: no loss; rank 0 was at an unknown place, rank 1 was at x.py:3",
        ),
        (
            [fail_rank(0, "Broken pipe", 1.0, echo=True)],
            "rank 0: Broken pipe",
        ),  # The worker has one rank, so no peer caused it.
    ],
)
def test_judge_ends_with_failure_names_its_cause(ends: list[RankEnd], reason: str) -> None:
    verdict = judge_ends(ends)
    assert (verdict.state, verdict.failure) == (State.FAILED, reason)


@pytest.mark.parametrize(
    ("ends", "traceback"),
    [
        (
            [fail_rank(0, "Connection closed by peer", 1.0, echo=True), fail_rank(1, "cause", 2.0)],
            "of rank 1",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, kind=FailureKind.TIMEOUT),
                fail_rank(1, "closed", 2.0, kind=FailureKind.CANCELLED),
                RankEnd(2),
            ],
            "Rank 1:\nof rank 1\n\nRank 0:\nof rank 0",
        ),
        (
            [fail_rank(0, "timeout: no loss", 1.0, kind=FailureKind.CANCELLED), RankEnd(1)],
            "Rank 0:\nof rank 0",
        ),
    ],
)
def test_judge_ends_with_failure_has_its_tracebacks(ends: list[RankEnd], traceback: str) -> None:
    assert judge_ends(ends).traceback == traceback


@pytest.mark.parametrize(
    "ends",
    [
        [
            fail_rank(0, "Connection closed by peer", 1.0, echo=True),
            fail_rank(1, "Broken pipe", 2.0, echo=True),
        ],
        [
            fail_rank(0, "Broken pipe", 1.0, echo=True),
            fail_rank(1, "a peer failed", 2.0, kind=FailureKind.CANCELLED),
        ],
        [fail_rank(0, "the trainer was ended by SIGKILL", 1.0, kind=FailureKind.ORPHANED)],
        [
            fail_rank(0, "the trainer was ended by SIGKILL", 1.0, kind=FailureKind.ORPHANED),
            fail_rank(1, "cause", 2.0),
        ],
    ],
)
def test_judge_ends_without_cause_in_objective_repeats(ends: list[RankEnd]) -> None:
    assert judge_ends(ends).state == State.REPEATED


def test_broken_connection_after_timeout_is_its_effect() -> None:
    timeout = "timeout: not finished within --evaluation-timeout"
    cancelled = fail_rank(0, timeout, 2.0, kind=FailureKind.CANCELLED, place="x.py:3")
    verdict = judge_ends([cancelled, fail_rank(1, "Connection closed by peer", 1.0, echo=True)])
    assert verdict.state == State.FAILED, "the evaluation must not be repeated"
    assert verdict.failure.startswith(f"{timeout}; rank 0 was at x.py:3, rank 1 was ")


def test_judge_ends_after_suspension_repeats() -> None:
    waited = fail_rank(0, "waited", 1.0, kind=FailureKind.SUSPENDED)
    cancelled = fail_rank(1, "a peer waited", 2.0, kind=FailureKind.CANCELLED)
    assert judge_ends([waited, cancelled]) == Verdict(State.REPEATED)
    assert judge_ends([waited, fail_rank(1, "cause", 0.5)]).failure == "rank 1: cause"


def test_judge_ends_with_loss_not_finite_is_diverged() -> None:
    verdict = judge_ends(
        [fail_rank(0, "ValueError: the validation loss is nan", 1.0, diverged=True), RankEnd(1)]
    )
    assert (verdict.state, verdict.diverged) == (State.FAILED, True)


def test_judge_ends_while_run_stops_is_stopped() -> None:
    stops = fail_rank(1, "the run stops", 2.0, kind=FailureKind.STOPPED)
    assert judge_ends([fail_rank(0, "echo", 1.0), stops]).state == State.STOPPED
    assert (
        judge_ends([fail_rank(0, "SIGKILL", 1.0, kind=FailureKind.ORPHANED), stops]).state
        == State.STOPPED
    )


@pytest.mark.parametrize(
    ("state", "is_last", "ends", "after"),
    [
        (State.RUNNING, False, False, State.RUNNING),
        (State.RUNNING, True, True, State.COMPLETE),
        (State.PRUNED, True, True, State.PRUNED),
        (State.PAUSED, False, True, State.PAUSED),
    ],
)
def test_last_loss_completes_evaluation_that_runs(
    state: State, is_last: bool, ends: bool, after: State
) -> None:
    verdict = Verdict(state, 0.5, is_last=is_last)
    assert (verdict.ends_evaluation, verdict.conclude().state) == (ends, after)
