"""Test the supervision of an evaluation on one rank, with a trainer that answers as given."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.evaluation.attempt import Attempt
from hpo.evaluation.step_verdict import Step, Verdict
from hpo.evaluation.supervision import Supervision
from hpo.process import clock
from hpo.process.channel import Message
from hpo.process.user_frames import UserFrames
from hpo.store.evaluations import Assignment


def test_supervision_excludes_peers_from_copy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader copies checkpoints only while copying takes at most 1% of the time. Waiting for peers must not count."""
    now, since, saved = [100.0], [], Step(0).__dict__ | {"loss": 1.0, "has_saved": True}
    monkeypatch.setattr(clock, "now", lambda: now[0])
    messages = iter([Message("step", saved), Message("kept", {"has_state": True})])

    def agree(_: Step) -> Verdict:
        now[0] += 50.0
        return Verdict("going", 1.0, save=True)

    def ignore(*_: Any, **__: Any) -> Any:
        return ""

    trainer = SimpleNamespace(wait=lambda *_: next(messages), send=ignore, read_output=ignore, has_started=True)
    trainer.read_thread_state = lambda: (True, 0)
    group: Any = SimpleNamespace(trainer=trainer, patience=600.0, store_listeners=[], serve_store=ignore, rank=0)
    leader: Any = SimpleNamespace(
        describe_checkpoint=ignore, make_draft_path=ignore, record_copies=lambda *given: since.append(given[-1])
    )
    step_sync: Any = SimpleNamespace(agree_on_verdict=agree)
    watched: Any = SimpleNamespace(cause=None)
    attempt = Attempt(Assignment(0, 0, {}, 0))
    Supervision(group, watched, step_sync, attempt, leader, UserFrames(Path("search.py")), math.inf).step()
    assert (since, attempt.losses) == ([150.0], [1.0])
