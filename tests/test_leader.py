"""What a leader decides on each loss, and what the record has by then; no MPI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.pruners import ThresholdPruner

from hpo.errors import ExitStatus, StopRequest
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.checkpointer import Checkpointer
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.step_verdict import Step, Verdict
from hpo.process.channel import Message
from hpo.store.checkpoints import CheckpointInfo, CheckpointStore, read_checkpoint_info
from hpo.store.pruning import Pruner, StoppingPruner
from hpo.store.record import Record
from hpo.store.weights import read_weights
from hpo.trainer.checkpoint_file import Checkpoint
from hpo.trainer.snapshot_buffer import SnapshotBuffer
from tests.support.in_process_template import send_through_json
from tests.support.runs import make_run
from tests.support.writer_stubs import LeaderStub, make_writer

PARAMS = {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}


class Holder:
    """The leader's trainer and its slot, in this process: it keeps what an evaluation offers and saves."""

    is_ready = True

    def __init__(self) -> None:
        self.keeper = SnapshotBuffer({}, True, None, None)

    @property
    def trainer(self) -> Holder:
        """The trainer is this object."""
        return self

    def begin(self, params: dict[str, Any], restored: Checkpoint | None) -> None:
        """Begin an evaluation."""
        self.keeper = SnapshotBuffer(params, True, restored, None)

    def write_checkpoint(self, path: str) -> dict[str, Any]:
        """Write the last state."""
        return dict(send_through_json(self.keeper.write_checkpoint(path)))

    def write_weights(self, path: str, about: dict[str, str]) -> str:
        """Write the weights of the lowest loss."""
        return str(self.keeper.write_weights(path, send_through_json(about))["error"])


class Led:
    """A leader whose record nobody else writes to, and the evaluations that it leads."""

    def __init__(
        self, folder: Path, limits: Limits, pruner: Pruner | None = None, saver: Checkpointer | None = None
    ) -> None:
        self.record: Record = make_run(folder / "run")
        self.stops: list[StopRequest] = []
        self.own = LeaderStub(make_writer(self.record, folder / "run", pruner=pruner))
        self.holder = Holder()
        limits = replace(limits, has_pruner=pruner is not None)
        slot: Any = self.holder
        self.leader = Leader(self.own.recorder, slot, limits, self.stops.append, self.own.keeper, saver)
        self.begun = 0

    def begin(self, restored: CheckpointInfo | None = None, weights: dict[str, torch.Tensor] | None = None) -> Attempt:
        self.begun += 1
        assignment = self.own.begin({**PARAMS, "lr": self.begun / 10})
        known = None if restored is None else replace(restored, params=assignment.params)
        self.holder.begin(assignment.params, None if known is None else Checkpoint(known, {}, weights))
        return Attempt(assignment, known)

    def step(self, attempt: Attempt, loss: float | None, saved: Any = None, **said: Any) -> Verdict:
        """Let the ranks agree on a loss, the leader decide, and its trainer keep what it wants."""
        keeper, since = self.holder.keeper, attempt.began_at
        keeper.offer_weights({"w": torch.full((1,), loss or 0.0)})
        if saved is not None:
            keeper.save_checkpoint(saved)
        attempt.record_step(Step(0, loss, **keeper.make_flags()))
        verdict = self.leader.decide(attempt, Verdict("going", loss, **said), "rank 0 | hello\n")
        is_best = loss is not None and loss < attempt.loss
        attempt.record_verdict(verdict)
        saves = verdict.save and verdict.state in ("going", "paused", "regrouped")
        told = {
            "has_loss": loss is not None,
            "is_best": is_best,
            "keep": verdict.keep,
            "save": saves,
            "about": self.leader.describe_checkpoint(attempt) if saves else None,
            "draft": self.leader.make_draft_path(attempt) if saves else "",
        }
        kept = keeper.copy_requested(Message("verdict", send_through_json(told)))
        if kept is not None:
            self.leader.record_copies(attempt, verdict, send_through_json(kept), since)
        keeper.clear_offers()
        return verdict

    def go_on(self, attempt: Attempt) -> Any:
        """Let the objective ask for what it continues from."""
        state, _ = self.holder.keeper.load_checkpoint(attempt.has_loss)
        attempt.record_step(Step(0, **self.holder.keeper.make_flags()))
        return state

    def curve(self, attempt: Attempt) -> dict[int, float]:
        return dict(self.record.read_evaluations()[attempt.assignment.number].curve)


def test_a_loss_is_in_the_record_when_it_is_told(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin()
    for epoch, loss in enumerate((0.5, 0.25, 0.75), start=1):
        assert led.step(attempt, loss).state == "going"
        assert led.curve(attempt)[epoch] == loss
    assert (len(attempt.losses), attempt.loss) == (3, 0.25)
    assert (tmp_path / "run" / "logs" / "0.txt").read_text() == "rank 0 | hello\n" * 3


def test_weights_that_die_with_their_trainer_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin()
    led.step(attempt, 0.5)
    assert attempt.has_weights
    for is_last in (False, True):
        verdict = Verdict("going", 0.25, keep=True, is_last=is_last)
        led.leader.record_lost_copies(attempt, verdict, "the trainer was ended by SIGKILL")
    assert not attempt.has_weights
    assert capsys.readouterr().err == (
        "warning: trial 0 keeps no weights of its best loss: the trainer was ended by SIGKILL\n"
    )
    attempt.record_verdict(Verdict("complete"))
    led.leader.finish_evaluation(attempt, 1.0)
    assert led.record.read_evaluations()[0].state == "complete"
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_the_target_ends_an_evaluation_and_then_the_run(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(target_loss=0.3))
    attempt = led.begin()
    assert led.step(attempt, 0.4).state == "going"
    assert led.step(attempt, 0.3).state == "complete"
    assert led.stops == []
    led.leader.finish_evaluation(attempt, 1.0)
    assert [(stop.reason, stop.status) for stop in led.stops] == [
        ("the loss of --target-loss 0.3 is reached", ExitStatus.BUDGET_SPENT)
    ]
    ended = led.record.read_evaluations()[0]
    assert (ended.loss, ended.cut_after) == (0.3, 2)


def test_target_at_the_last_loss_cuts_nothing(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(target_loss=0.3))
    attempt = led.begin()
    led.step(attempt, 0.4)
    attempt.record_verdict(Verdict("complete", 0.3, is_last=True))
    led.leader.finish_evaluation(attempt, 1.0)
    assert len(led.stops) == 1
    ended = led.record.read_evaluations()[0]
    assert (ended.loss, ended.cut_after) == (0.3, 0)


def test_an_evaluation_that_takes_too_long_fails_though_its_loss_is_recorded(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=30.0))
    attempt = led.begin()
    attempt.began_at -= 31.0
    verdict = led.step(attempt, 0.5)
    assert (verdict.state, verdict.loss) == ("failed", 0.5)
    assert verdict.failure == "timeout: still going on after 30 s (--evaluation-timeout)"
    assert led.curve(attempt) == {1: 0.5}


def test_the_time_in_which_a_loss_is_written_down_is_not_the_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=30.0))
    attempt = led.begin()
    now = [1000.0]
    monkeypatch.setattr("hpo.process.clock.now", lambda: now[0])
    attempt.began_at = 1000.0
    report = led.record.report
    monkeypatch.setattr(led.record, "report", lambda *given: (now.__setitem__(0, now[0] + 100), report(*given)))
    assert led.step(attempt, 0.5).state == "going"
    assert led.step(attempt, 0.4).state == "going"
    assert attempt.seconds == 0.0


def test_a_pruner_is_asked_when_the_loss_is_in_the_record(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(), StoppingPruner(ThresholdPruner(upper=1.0)))
    attempt = led.begin()
    assert led.step(attempt, 0.5).state == "going"
    assert led.step(attempt, 2.0).state == "pruned"
    led.leader.finish_evaluation(attempt, 1.0)
    (evaluation,) = led.record.read_evaluations()
    assert (evaluation.state, evaluation.loss, dict(evaluation.curve)) == ("pruned", 0.5, {1: 0.5, 2: 2.0})


def test_only_weights_that_are_the_best_of_the_run_are_to_be_kept(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    first = led.begin()
    assert [led.step(first, loss).keep for loss in (0.5, 0.6, 0.4)] == [True, False, True]
    first.record_verdict(Verdict("complete"))
    led.leader.finish_evaluation(first, 1.0)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["w"].item() == pytest.approx(0.4)
    assert (weights.trial, weights.params) == (0, first.assignment.params)
    second = led.begin()
    assert [led.step(second, loss).keep for loss in (0.45, 0.41, 0.3)] == [False, False, True]
    nothing = led.begin()
    assert led.step(nothing, None).keep is False


def test_failures_alone_stop_the_run(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(max_failures=2))
    for _ in range(2):
        assert led.stops == []
        attempt = led.begin()
        attempt.record_verdict(Verdict("failed", failure="rank 0: ValueError: no"))
        led.leader.finish_evaluation(attempt, 1.0)
    assert [stop.status for stop in led.stops] == [ExitStatus.NOTHING_SUCCEEDED]


def test_an_evaluation_that_goes_on_has_its_losses_and_its_seconds(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=100.0))
    about = CheckpointInfo({}, [0.5, 0.25, 0.75], {"accuracy": 0.5}, 99.0, {"dict": [["epoch", 3]]}, has_weights=True)
    attempt = led.begin(about, {"w": torch.full((1,), 0.25)})
    assert led.go_on(attempt) == {"epoch": 3}
    assert not led.curve(attempt), "it has said so once it has a loss of its own"
    assert led.step(attempt, 0.5).state == "going"
    assert led.curve(attempt) == {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.5}
    assert led.go_on(attempt) is None
    attempt.verdict = Verdict("complete")
    led.leader.finish_evaluation(attempt, 101.0)
    (evaluation,) = led.record.read_evaluations()
    assert (evaluation.loss, evaluation.metrics) == (0.25, {"accuracy": 0.5})
    assert (evaluation.resumed_from_step, evaluation.seconds_before, evaluation.seconds) == (3, 99.0, 101.0)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["w"].item() == 0.25


def test_the_seconds_before_an_interruption_count_for_the_timeout(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=100.0))
    attempt = led.begin(CheckpointInfo({}, [0.5], {}, 100.0))
    led.go_on(attempt)
    verdict = led.step(attempt, 0.25)
    assert verdict.failure == "timeout: still going on after 100 s (--evaluation-timeout)"


def test_an_evaluation_that_has_nothing_left_to_do_ends_with_what_it_had(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin(CheckpointInfo({}, [0.5, 0.25], {}, 9.0))
    led.go_on(attempt)
    attempt.verdict = Verdict("complete")
    led.leader.finish_evaluation(attempt, 9.5)
    (evaluation,) = led.record.read_evaluations()
    assert (evaluation.state, evaluation.loss, evaluation.curve) == ("complete", 0.25, {1: 0.5, 2: 0.25})


def test_attempt_that_does_not_ask_for_its_state_begins_again(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin(CheckpointInfo({}, [0.5, 0.25], {}, 9.0))
    assert led.step(attempt, 0.75).state == "going"
    assert (attempt.losses, attempt.restored_count, attempt.restored_seconds) == ([0.75], 0, 0.0)
    assert led.curve(attempt) == {1: 0.75}


def test_leader_that_stops_records_the_state_that_is_written(tmp_path: Path) -> None:
    """The first state is written since it is due, the next one when the run stops."""
    states = CheckpointStore(tmp_path / "run" / "checkpoints")
    saver = Checkpointer(states, every=0.0)
    led = Led(tmp_path, Limits(), saver=saver)
    attempt = led.begin()
    assert led.step(attempt, 0.5, saved={"epoch": 1}).save
    path = states.get_path(attempt.assignment.root)
    assert read_checkpoint_info(path, attempt.assignment.params).losses == [0.5]
    saver._interval, saver._seconds_to_copy = 1e9, 0.0
    led.step(attempt, 0.25, saved={"epoch": 2})
    assert read_checkpoint_info(path).losses == [0.5]
    attempt.record_verdict(Verdict("stopped"))
    led.leader.finish_evaluation(attempt, 1.0)
    about = read_checkpoint_info(path)
    assert (about.losses, about.tree, about.has_weights) == ([0.5, 0.25], {"dict": [["epoch", 2]]}, True)
    assert led.own.recorder.read_checkpoint_step(attempt.assignment.number) == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_leader_at_the_end_of_an_evaluation_removes_its_state(tmp_path: Path) -> None:
    states = CheckpointStore(tmp_path / "run" / "checkpoints")
    led = Led(tmp_path, Limits(), saver=Checkpointer(states, every=0.0))
    attempt = led.begin()
    led.step(attempt, 0.5, saved={"epoch": 1})
    assert states.has_checkpoint(attempt.assignment)
    attempt.record_verdict(Verdict("complete"))
    led.leader.finish_evaluation(attempt, 1.0)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_leader_warns_once_if_states_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run" / "checkpoints"
    led = Led(tmp_path, Limits(), saver=Checkpointer(CheckpointStore(folder), every=0.0))
    folder.write_text("in the way")
    attempt = led.begin()
    for loss in (0.5, 0.25):
        assert led.step(attempt, loss, saved={"epoch": 1}).state == "going"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: the state of trial 0 cannot be saved: ")
    assert warning.count("\n") == 1
