"""Test the supervision of an evaluation on one rank, with a trainer that answers as given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.evaluation.attempt import Attempt, EvaluationContext
from hpo.evaluation.leader import Limits
from hpo.evaluation.supervision import Cancellation, Supervision
from hpo.evaluation.verdict import State, Verdict
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.messages import Report
from hpo.process.user_frames import UserFrames
from hpo.store.evaluations import Assignment
from hpo.store.run_dir import RunDir

IDLE = Message("idle", {"is_clean": True})
KEPT = Message("kept", {"kinds": [], "errors": {}})
REPORT = Message("report", vars(Report(1.0, has_saved=True, is_last=True)))


def ignore(*_: Any, **__: Any) -> str:
    return ""


def supervise(messages: Iterable[Message], decide: Any) -> tuple[Attempt, list[float]]:
    """Supervise an evaluation on a worker of one rank, whose trainer sends these messages.

    Return the attempt, and the times at which copies began.
    """
    answers, since = iter([Message("joined", {}), *messages]), []
    trainer = SimpleNamespace(
        wait=lambda *_: next(answers), send=ignore, read_output=ignore, has_started=True
    )
    trainer.read_thread_state = lambda: (True, 0)
    comm = SimpleNamespace(bcast=lambda verdict: verdict)
    comm.begin_gather = lambda end: SimpleNamespace(
        is_done=lambda: True, unpack_objects=lambda: [end]
    )
    slot = SimpleNamespace(
        output=SimpleNamespace(take_printed=ignore),
        discard_trainer=ignore,
        finish_evaluation=ignore,
    )
    group: Any = SimpleNamespace(
        trainer=trainer, patience=600.0, store_listeners=[], serve_store=ignore, rank=0
    )
    group.comm, group.slot, group.has_own_gpu = comm, slot, False
    leader: Any = SimpleNamespace(
        limits=Limits(),
        decide=decide,
        decide_on_repetition=lambda _, verdict: verdict,
        keep_drafts=lambda *given: since.append(given[-1]),
        log_output=ignore,
        warn_about_copies=ignore,
        warn_about_lost_weights=ignore,
    )
    watched: Any = SimpleNamespace(
        cause=None,
        cancelled_at=math.inf,
        clear_event=ignore,
        take_news=list,
        cancel_on_all=ignore,
    )
    attempt = Attempt(Assignment(0, 0, {}, 0))
    context = EvaluationContext(UserFrames(Path("search.py")), 0, RunDir(Path("run")))
    Supervision(context, group, watched, attempt, leader).supervise()
    return attempt, since


def test_supervision_excludes_decision_from_copy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying may take at most 1% of the time. The time of a pruner must not count."""
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])

    def decide(_: Attempt, report: Report, __: str) -> Verdict:
        now[0] += 50.0
        return Verdict(State.RUNNING, report.loss, save=True)

    attempt, since = supervise([REPORT, KEPT, Message("end", {}), IDLE], decide)
    assert (since, attempt.losses, attempt.verdict.state) == ([150.0], [1.0], State.COMPLETE)


def test_supervision_saves_no_checkpoint_of_completed_evaluation() -> None:
    verdict = Verdict(State.RUNNING, 1.0, save=True, is_last=True)
    attempt, _ = supervise([REPORT, KEPT, Message("end", {}), IDLE], lambda *_: verdict)
    assert attempt.verdict == Verdict(State.COMPLETE, is_last=True)


@pytest.mark.parametrize("state", [State.RUNNING, State.COMPLETE, State.PAUSED])
def test_supervision_with_failed_offer_fails(state: State) -> None:
    verdict = Verdict(state, 1.0, keep=True, is_last=state == State.RUNNING)
    end = Message("end", {"failure": "ValueError: no", "is_offer": True, "place": "search.py:3"})
    attempt, _ = supervise([REPORT, end, IDLE], lambda *_: verdict)
    assert (attempt.verdict.state, attempt.verdict.failure) == (
        State.FAILED,
        "rank 0, search.py:3: ValueError: no",
    )


def test_supervision_with_crash_after_last_loss_is_complete() -> None:
    verdict = Verdict(State.RUNNING, 1.0, keep=True, is_last=True)
    end = Message("end", {"failure": "RuntimeError: in a finally block", "place": "search.py:3"})
    attempt, _ = supervise([REPORT, end, IDLE], lambda *_: verdict)
    assert attempt.verdict.state == State.COMPLETE


class CancelledTrainer:
    """A trainer that records the signals that it gets."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.is_killed = False

    def interrupt(self) -> None:
        self.signals.append("interrupt")

    def kill(self) -> None:
        self.signals.append("kill")
        self.is_killed = True

    def find_stack(self) -> list[FrameSummary]:
        return [FrameSummary("search.py", 3, "objective")]


def cancel(
    monkeypatch: pytest.MonkeyPatch, times: Iterable[float], acknowledged_at: float = math.inf
) -> tuple[Cancellation, list[str]]:
    """Cancel an objective at 100 s, which has a second to react, and check it at `times`."""
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    trainer: Any = CancelledTrainer()
    cancellation = Cancellation(trainer, seconds_to_react=1.0)
    for now[0] in times:
        if now[0] >= acknowledged_at:
            cancellation.acknowledge([FrameSummary("search.py", 7, "objective")])
        cancellation.advance()
    return cancellation, trainer.signals


def test_cancellation_is_repeated_and_then_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    cancellation, signals = cancel(monkeypatch, [100.0, 100.1, 100.6, 101.1, 101.2])
    assert signals == ["interrupt", "interrupt", "kill", "kill"]
    assert [frame.lineno for frame in cancellation.frames] == [3]


def test_acknowledged_cancellation_lets_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cancellation, signals = cancel(monkeypatch, [100.0, 100.6, 104.9, 105.1], acknowledged_at=100.5)
    assert signals == ["interrupt", "kill"]
    assert [frame.lineno for frame in cancellation.frames] == [7]


def test_cancellation_without_time_to_react_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that has not joined the process group runs no objective."""
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    trainer: Any = CancelledTrainer()
    cancellation = Cancellation(trainer, seconds_to_react=0.0)
    now[0] += 0.001
    cancellation.advance()
    assert trainer.signals == ["kill"]
