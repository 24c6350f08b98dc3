"""Test the supervision of an evaluation on one rank, with a trainer that answers as given."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.function_supervision import FunctionSupervision
from hpo.evaluation.report import Report
from hpo.evaluation.verdict import State, Verdict
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.user_frames import UserFrames
from hpo.store.evaluations import Assignment


def ignore(*_: Any, **__: Any) -> str:
    return ""


def test_supervision_excludes_decision_from_copy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader copies checkpoints only while copying takes at most 1% of the time. A pruner's time must not count."""
    now, since = [100.0], []
    monkeypatch.setattr(clock, "now", lambda: now[0])
    messages = iter(
        [
            Message("report", vars(Report(1.0, has_saved=True))),
            Message("kept", {"kinds": [], "errors": {}}),
            Message("end", {}),
            Message("idle", {"is_clean": True}),
        ]
    )

    def decide(_: Attempt, report: Report, __: str) -> Verdict:
        now[0] += 50.0
        return Verdict(State.RUNNING, report.loss, save=True)

    trainer = SimpleNamespace(wait=lambda *_: next(messages), send=ignore, read_output=ignore, has_started=True)
    trainer.read_thread_state = lambda: (True, 0)
    comm = SimpleNamespace(bcast=lambda verdict: verdict)
    comm.begin_gather = lambda end: SimpleNamespace(is_done=lambda: True, unpack_objects=lambda: [end])
    slot = SimpleNamespace(output=SimpleNamespace(take_printed=ignore))
    group: Any = SimpleNamespace(trainer=trainer, patience=600.0, store_listeners=[], serve_store=ignore, rank=0)
    group.comm, group.slot = comm, slot
    leader: Any = SimpleNamespace(
        decide=decide,
        decide_on_retry=lambda _, verdict: verdict,
        keep_drafts=lambda *given: since.append(given[-1]),
        log_output=ignore,
        warn_about_copies=ignore,
    )
    watched: Any = SimpleNamespace(cause=None, clear_event=ignore, take_reports=list)
    attempt, watch = Attempt(Assignment(0, 0, {}, 0)), Any
    frames = UserFrames(Path("search.py"))
    FunctionSupervision(group, watch, watched, attempt, leader, frames, math.inf, is_watched=False).supervise()  # type: ignore[arg-type]
    assert (since, attempt.losses, attempt.verdict.state) == ([150.0], [1.0], State.COMPLETE)
