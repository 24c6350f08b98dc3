"""Test the verdict on the next step of an evaluation, computed from the reports of all ranks of a worker."""

from __future__ import annotations

import pytest

from hpo.evaluation.step_verdict import Step, Verdict, judge_steps


def fail_rank(rank: int, text: str, at: float, **more: object) -> Step:
    return Step(rank, failure=text, at=at, traceback=f"of rank {rank}", **more)  # type: ignore[arg-type]


def test_judge_steps_with_equal_losses_or_common_end() -> None:
    assert judge_steps([Step(0, 0.5, {"accuracy": 0.9}), Step(1, 0.5 + 1e-7)]) == Verdict(
        "going", 0.5, {"accuracy": 0.9}
    )
    assert judge_steps([Step(0, 0.0), Step(1, 0.0)]).state == "going"
    assert judge_steps([Step(0), Step(1), Step(2)]) == Verdict("complete")


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
        ([fail_rank(0, "b", 2.0), fail_rank(1, "a", 1.0), Step(2, 1.0)], "rank 1: a"),
        (
            [fail_rank(0, "Connection closed by peer", 1.0, echo=True), fail_rank(1, "cause", 2.0)],
            "rank 1: cause",
        ),
        (
            [fail_rank(0, "a peer failed", 1.0, own=False, place="x.py:3"), fail_rank(1, "cause", 2.0)],
            "rank 1: cause",
        ),
        ([Step(0, 1.0), fail_rank(1, "cause", 2.0, place="x.py:3")], "rank 1, x.py:3: cause"),
        (
            [
                fail_rank(0, "waited", 2.0, timeout=True, place="x.py:3"),
                fail_rank(1, "waited", 1.0, timeout=True),
            ],
            "timeout: rank 1 waited at its end for rank 0, which was at x.py:3",
        ),
        (
            [
                fail_rank(0, "waited", 2.0, timeout=True),
                fail_rank(1, "waited", 1.0, timeout=True, place="x.py:3"),
            ],
            "timeout: rank 1 waited at x.py:3 for rank 0, which had ended",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, timeout=True, place="x.py:9"),
                fail_rank(1, "a peer", 2.0, own=False, place="x.py:3"),
                fail_rank(2, "Connection closed", 2.0, own=False, echo=True, place="x.py:9"),
            ],
            "timeout: rank 0 waited at x.py:9 for rank 1, which was at x.py:3",
        ),
        (
            [
                fail_rank(0, "waited", 1.0, timeout=True),
                fail_rank(1, "closed", 2.0, own=False, echo=True, place="x.py:3"),
            ],
            "timeout: rank 0 waited at its end for rank 1, which was at x.py:3",
        ),
        (
            [fail_rank(0, "waited", 1.0, timeout=True, place="x.py:3"), Step(1, 0.5, place="x.py:9"), Step(2)],
            "timeout: rank 0 waited at x.py:3 for rank 1, which had yielded at x.py:9, rank 2, which had ended",
        ),
        (
            [fail_rank(0, "timeout: no loss", 1.0, own=False, place="x.py:3")],
            "timeout: no loss; rank 0 was at x.py:3",
        ),
        (
            [
                fail_rank(0, "timeout: no loss", 1.0, own=False),
                fail_rank(1, "timeout: no loss", 2.0, own=False, place="x.py:3"),
            ],
            "timeout: no loss; rank 0 was at an unknown place, rank 1 was at x.py:3",
        ),
        (
            [fail_rank(0, "Broken pipe", 1.0, echo=True)],
            "rank 0: Broken pipe",
        ),  # The worker has one rank, so no peer caused it.
        (
            [Step(0, 1.0, gathers=True, place="x.py:3"), Step(1, 1.0)],
            "not all ranks offered a function, which all of them have to call: rank 0 did at x.py:3, rank 1 did not",
        ),
        (
            [Step(0, 0.5, saves=True, place="x.py:3"), Step(1, 0.5, place="x.py:5")],
            "not all ranks saved a function, or sharded tensors, which all of them have to gather: "
            "rank 0 did at x.py:3, rank 1 did not at x.py:5",
        ),
    ],
)
def test_judge_steps_with_failure_names_its_cause(steps: list[Step], reason: str) -> None:
    verdict = judge_steps(steps)
    assert (verdict.state, verdict.failure) == ("failed", reason)


@pytest.mark.parametrize(
    ("steps", "traceback"),
    [
        ([Step(0, 1.0), Step(1, 1.1)], ""),
        (
            [fail_rank(0, "Connection closed by peer", 1.0, echo=True), fail_rank(1, "cause", 2.0)],
            "of rank 1",
        ),
        (
            [fail_rank(0, "waited", 1.0, timeout=True), fail_rank(1, "closed", 2.0, own=False), Step(2)],
            "Rank 1:\nof rank 1\n\nRank 0:\nof rank 0",
        ),
        ([fail_rank(0, "timeout: no loss", 1.0, own=False), Step(1)], "Rank 0:\nof rank 0"),
    ],
)
def test_judge_steps_with_failure_has_its_tracebacks(steps: list[Step], traceback: str) -> None:
    assert judge_steps(steps).traceback == traceback


@pytest.mark.parametrize(
    "steps",
    [
        [
            fail_rank(0, "Connection closed by peer", 1.0, echo=True),
            fail_rank(1, "Broken pipe", 2.0, echo=True),
        ],
        [fail_rank(0, "Connection closed by peer", 1.0, echo=True), Step(1, 0.5)],
        [fail_rank(0, "Broken pipe", 1.0, echo=True), fail_rank(1, "a peer failed", 2.0, own=False)],
        [fail_rank(0, "the trainer was ended by SIGKILL", 1.0, orphaned=True)],
        [
            fail_rank(0, "the trainer was ended by SIGKILL", 1.0, orphaned=True),
            fail_rank(1, "cause", 2.0),
        ],
    ],
)
def test_judge_steps_without_cause_in_objective_repeats(steps: list[Step]) -> None:
    assert judge_steps(steps).state == "again"


def test_judge_steps_after_suspension_repeats() -> None:
    waited = fail_rank(0, "waited", 1.0, timeout=True, suspended=True)
    assert judge_steps([waited, fail_rank(1, "a peer waited", 2.0, own=False)]).state == "suspended"
    assert judge_steps([waited, fail_rank(1, "cause", 0.5)]).failure == "rank 1: cause"


def test_judge_steps_is_last_if_all_ranks_ended() -> None:
    ended = [Step(rank, 0.5, ended=True) for rank in range(2)]
    assert judge_steps(ended) == Verdict("going", 0.5, is_last=True)
    assert not judge_steps([ended[0], Step(1, 0.5)]).is_last


def test_judge_steps_is_inherited_if_one_rank_inherited() -> None:
    assert judge_steps([Step(0, 0.5), Step(1, 0.5, inherited=True)]).inherited
    assert judge_steps([Step(0, 0.5), fail_rank(1, "cause", 1.0, inherited=True)]).inherited


def test_judge_steps_with_loss_not_finite_is_diverged() -> None:
    verdict = judge_steps([fail_rank(0, "ValueError: the validation loss is nan", 1.0, diverged=True), Step(1, 0.5)])
    assert (verdict.state, verdict.diverged) == ("failed", True)


def test_judge_steps_while_run_stops_is_stopped() -> None:
    stops = fail_rank(1, "the run stops", 2.0, own=False, stopped=True)
    assert judge_steps([fail_rank(0, "echo", 1.0), stops]).state == "stopped"
    assert judge_steps([fail_rank(0, "SIGKILL", 1.0, orphaned=True), stops]).state == "stopped"
