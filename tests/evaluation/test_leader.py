"""Test the decisions of a leader on losses, and the record after each; without MPI."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.pruners import ThresholdPruner

from hpo.errors import ExitStatus, StopRequest
from hpo.evaluation.attempt import Attempt, StartingPoint
from hpo.evaluation.draft_store import DraftStore
from hpo.evaluation.leader import Checkpointer, Leader, Limits
from hpo.evaluation.verdict import RankEnd, State, Verdict
from hpo.process.messages import Report
from hpo.store.checkpoints import CheckpointInfo, CheckpointStore, read_checkpoint_info
from hpo.store.pruning import Pruner, StoppingPruner
from hpo.store.record import Record
from hpo.store.weights import read_weights
from hpo.trainer.offers import Offers
from hpo.trainer.state_files import read_checkpoint_file
from tests.support.checkpoints import copy_offers, write_checkpoint
from tests.support.runs import make_run
from tests.support.writer_stubs import LeaderStub, make_writer

PARAMS = {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}


class LeaderHarness:
    """A leader with its own record, and the evaluations that it begins."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        pruner: Pruner | None = None,
        saver: Checkpointer | None = None,
    ) -> None:
        self.record: Record = make_run(folder / "run")
        self.stops: list[StopRequest] = []
        self.own = LeaderStub(make_writer(self.record, folder / "run", pruner=pruner))
        self.folder = folder
        self.offers = Offers(True, None, None)
        limits = replace(limits, has_pruner=pruner is not None)
        saver = saver or Checkpointer(CheckpointStore(folder / "unused"), math.inf)
        self.leader = Leader(self.own.recorder, limits, self.stops.append, saver, self.own.keeper)
        self.begun = 0

    def begin(
        self, restored: CheckpointInfo | None = None, weights: dict[str, torch.Tensor] | None = None
    ) -> Attempt:
        self.begun += 1
        assignment = self.own.begin({**PARAMS, "lr": self.begun / 10})
        path = self.folder / "restored.safetensors"
        if restored is not None:
            write_checkpoint(
                path, {"epoch": 3}, replace(restored, params=assignment.params), weights
            )
        checkpoint = None if restored is None else read_checkpoint_file(path)
        self.offers = Offers(True, checkpoint, None)
        attempt = Attempt(
            assignment,
            StartingPoint(path, info=checkpoint.metadata) if checkpoint else StartingPoint(),
        )
        attempt.drafts = DraftStore(self.folder / ".draft", assignment.params)
        return attempt

    def step(self, attempt: Attempt, loss: float, saved: Any = None, **fields: Any) -> Verdict:
        """Let the leader decide on a loss, and then its trainer copy weights and checkpoint."""
        offers, since = self.offers, attempt.began_at
        offers.offer_weights({"w": torch.full((1,), loss)})
        if saved is not None:
            offers.save_checkpoint(saved)
        flags: dict[str, Any] = {
            "offers_weights": offers.offers_weights,
            "has_saved": offers.has_saved,
        }
        report = Report(loss, **flags, **offers.reads, **fields)
        verdict = self.leader.decide(attempt, report, "rank 0 | hello\n")
        attempt.record_verdict(verdict)
        copies = copy_offers(offers, keeps_weights=verdict.keep, saves_checkpoint=verdict.save)
        self.leader.keep_drafts(
            attempt, verdict, copies.get("checkpoint"), copies.get("weights"), since
        )
        return verdict

    def resume(self, attempt: Attempt) -> Any:
        """Simulate that the objective reads its checkpoint."""
        state = self.offers.load_checkpoint()
        attempt.record_ends([RankEnd(0, **self.offers.reads)])
        return state

    def curve(self, attempt: Attempt) -> dict[int, float]:
        return dict(self.record.read_evaluations()[attempt.assignment.number].curve)


def test_leader_records_each_loss_at_once(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits())
    attempt = harness.begin()
    for epoch, loss in enumerate((0.5, 0.25, 0.75), start=1):
        assert harness.step(attempt, loss).state == State.RUNNING
        assert harness.curve(attempt)[epoch] == loss
    assert (len(attempt.losses), attempt.loss) == (3, 0.25)
    assert (tmp_path / "run" / "logs" / "0.txt").read_text() == "rank 0 | hello\n" * 3


def test_leader_warns_of_weights_lost_with_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = LeaderHarness(tmp_path, Limits())
    attempt = harness.begin()
    harness.step(attempt, 0.5)
    assert attempt.has_weights
    verdict = Verdict(State.RUNNING, 0.25, keep=True, is_last=True)
    attempt.record_verdict(verdict)
    harness.leader.warn_about_lost_weights(attempt, verdict, "the trainer was ended by SIGKILL")
    assert not attempt.has_weights
    assert capsys.readouterr().err == (
        "warning: trial 0 keeps no weights of its best loss: the trainer was ended by SIGKILL\n"
    )
    attempt.record_verdict(Verdict(State.COMPLETE))
    harness.leader.finish_evaluation(attempt, 1.0)
    assert harness.record.read_evaluations()[0].state == "complete"
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_leader_stops_evaluation_and_run_at_target_loss(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(target_loss=0.3))
    attempt = harness.begin()
    assert harness.step(attempt, 0.4).state == State.RUNNING
    assert harness.step(attempt, 0.3).state == State.COMPLETE
    assert harness.stops == []
    harness.leader.finish_evaluation(attempt, 1.0)
    assert [(stop.reason, stop.status) for stop in harness.stops] == [
        ("the loss of --target-loss 0.3 is reached", ExitStatus.BUDGET_SPENT)
    ]
    ended = harness.record.read_evaluations()[0]
    assert (ended.loss, ended.cut_after) == (0.3, 2)


def test_leader_at_target_with_last_loss_records_no_cut(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(target_loss=0.3))
    attempt = harness.begin()
    harness.step(attempt, 0.4)
    attempt.record_verdict(Verdict(State.COMPLETE, 0.3, is_last=True))
    harness.leader.finish_evaluation(attempt, 1.0)
    assert len(harness.stops) == 1
    ended = harness.record.read_evaluations()[0]
    assert (ended.loss, ended.cut_after) == (0.3, 0)


def test_leader_after_timeout_fails_and_records_loss(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(evaluation_timeout=30.0))
    attempt = harness.begin()
    attempt.began_at -= 31.0
    verdict = harness.step(attempt, 0.5)
    assert (verdict.state, verdict.loss) == (State.FAILED, 0.5)
    assert verdict.failure == "timeout: not finished after 30 s (--evaluation-timeout)"
    assert harness.curve(attempt) == {1: 0.5}


def test_leader_excludes_recording_time_from_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = LeaderHarness(tmp_path, Limits(evaluation_timeout=30.0))
    attempt = harness.begin()
    now = [1000.0]
    monkeypatch.setattr("hpo.process.clock.now", lambda: now[0])
    attempt.began_at = 1000.0
    report = harness.record.report
    monkeypatch.setattr(
        harness.record, "report", lambda *given: (now.__setitem__(0, now[0] + 100), report(*given))
    )
    assert harness.step(attempt, 0.5).state == State.RUNNING
    assert harness.step(attempt, 0.4).state == State.RUNNING
    assert attempt.seconds == 0.0


def test_leader_asks_pruner_after_recording_loss(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(), StoppingPruner(ThresholdPruner(upper=1.0)))
    attempt = harness.begin()
    assert harness.step(attempt, 0.5).state == State.RUNNING
    assert harness.step(attempt, 2.0).state == State.PRUNED
    harness.leader.finish_evaluation(attempt, 1.0)
    (evaluation,) = harness.record.read_evaluations()
    assert (evaluation.state, evaluation.loss, dict(evaluation.curve)) == (
        "pruned",
        0.5,
        {1: 0.5, 2: 2.0},
    )


def test_leader_keeps_only_best_weights_of_run(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits())
    first = harness.begin()
    assert [harness.step(first, loss).keep for loss in (0.5, 0.6, 0.4)] == [True, False, True]
    first.record_verdict(Verdict(State.COMPLETE))
    harness.leader.finish_evaluation(first, 1.0)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["w"].item() == pytest.approx(0.4)
    assert (weights.trial, weights.params) == (0, first.assignment.params)
    second = harness.begin()
    assert [harness.step(second, loss).keep for loss in (0.45, 0.41, 0.3)] == [False, False, True]
    nothing = harness.begin()
    mistaken = harness.step(nothing, 0.1, mistake="the ranks yielded different losses")
    assert (mistaken.state, mistaken.keep, nothing.losses) == (State.FAILED, False, [])


def test_leader_stops_run_after_max_failures(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(max_failures=2))
    for _ in range(2):
        assert harness.stops == []
        attempt = harness.begin()
        attempt.record_verdict(Verdict(State.FAILED, failure="rank 0: ValueError: no"))
        harness.leader.finish_evaluation(attempt, 1.0)
    assert [stop.status for stop in harness.stops] == [ExitStatus.NOTHING_SUCCEEDED]


def test_resumed_attempt_keeps_its_losses_and_seconds(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(evaluation_timeout=100.0))
    info = CheckpointInfo(
        {}, [0.5, 0.25, 0.75], {"accuracy": 0.5}, 99.0, {"dict": [["epoch", 3]]}, has_weights=True
    )
    attempt = harness.begin(info, {"w": torch.full((1,), 0.25)})
    assert harness.resume(attempt) == {"epoch": 3}
    assert not harness.curve(attempt), "the resumption is recorded with the next loss"
    assert harness.step(attempt, 0.5).state == State.RUNNING
    assert harness.curve(attempt) == {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.5}
    with pytest.raises(
        RuntimeError, match=r"worker\.checkpoint must be read before the first loss"
    ):
        harness.resume(attempt)
    attempt.verdict = Verdict(State.COMPLETE)
    harness.leader.finish_evaluation(attempt, 101.0)
    (evaluation,) = harness.record.read_evaluations()
    assert (evaluation.loss, evaluation.metrics) == (0.25, {"accuracy": 0.5})
    assert (evaluation.resumed_from_step, evaluation.seconds_before, evaluation.seconds) == (
        3,
        99.0,
        101.0,
    )
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["w"].item() == 0.25


def test_timeout_counts_seconds_before_interruption(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits(evaluation_timeout=100.0))
    attempt = harness.begin(CheckpointInfo({}, [0.5], {}, 100.0))
    harness.resume(attempt)
    verdict = harness.step(attempt, 0.25)
    assert verdict.failure == "timeout: not finished after 100 s (--evaluation-timeout)"


def test_resumed_attempt_without_more_losses_is_complete(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits())
    attempt = harness.begin(CheckpointInfo({}, [0.5, 0.25], {}, 9.0))
    harness.resume(attempt)
    attempt.verdict = Verdict(State.COMPLETE)
    harness.leader.finish_evaluation(attempt, 9.5)
    (evaluation,) = harness.record.read_evaluations()
    assert (evaluation.state, evaluation.loss, evaluation.curve) == (
        "complete",
        0.25,
        {1: 0.5, 2: 0.25},
    )


def test_attempt_that_ignores_its_checkpoint_restarts(tmp_path: Path) -> None:
    harness = LeaderHarness(tmp_path, Limits())
    attempt = harness.begin(CheckpointInfo({}, [0.5, 0.25], {}, 9.0))
    assert harness.step(attempt, 0.75).state == State.RUNNING
    assert (attempt.losses, attempt.restored_count, attempt.restored_seconds) == ([0.75], 0, 0.0)
    assert harness.curve(attempt) == {1: 0.75}


def test_leader_at_stop_writes_last_checkpoint(tmp_path: Path) -> None:
    """The first checkpoint is due, and written at once. The second one is written at the stop."""
    states = CheckpointStore(tmp_path / "run" / "checkpoints")
    saver = Checkpointer(states, every=0.0)
    harness = LeaderHarness(tmp_path, Limits(), saver=saver)
    attempt = harness.begin()
    assert harness.step(attempt, 0.5, saved={"epoch": 1}).save
    path = states.get_path(attempt.assignment.root)
    assert read_checkpoint_info(path, attempt.assignment.params).losses == [0.5]
    saver.every, saver._seconds_to_copy = 1e9, 0.0
    harness.step(attempt, 0.25, saved={"epoch": 2})
    assert read_checkpoint_info(path).losses == [0.5]
    attempt.record_verdict(Verdict(State.STOPPED))
    harness.leader.finish_evaluation(attempt, 1.0)
    info = read_checkpoint_info(path)
    assert (info.losses, info.tree, info.has_weights) == (
        [0.5, 0.25],
        {"dict": [["epoch", 2]]},
        True,
    )
    assert harness.own.recorder.call.read_checkpoint_step(attempt.assignment.number) == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_leader_removes_checkpoint_of_ended_evaluation(tmp_path: Path) -> None:
    states = CheckpointStore(tmp_path / "run" / "checkpoints")
    harness = LeaderHarness(tmp_path, Limits(), saver=Checkpointer(states, every=0.0))
    attempt = harness.begin()
    harness.step(attempt, 0.5, saved={"epoch": 1})
    assert states.get_path(attempt.assignment.root).exists()
    attempt.record_verdict(Verdict(State.COMPLETE))
    harness.leader.finish_evaluation(attempt, 1.0)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_leader_warns_once_if_checkpoints_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    harness = LeaderHarness(
        tmp_path, Limits(), saver=Checkpointer(CheckpointStore(folder), every=0.0)
    )
    folder.write_text("in the way")
    attempt = harness.begin()
    for loss in (0.5, 0.25):
        assert harness.step(attempt, loss, saved={"epoch": 1}).state == State.RUNNING
    warning = capsys.readouterr().err
    assert warning.startswith("warning: trial 0: its checkpoint cannot be saved: ")
    assert warning.count("\n") == 1
    confirmation = replace(attempt.assignment, confirms=5)
    harness.leader.warn_once(confirmation, "it is slow")
    assert capsys.readouterr().err == "warning: trial confirm-0: it is slow\n"
