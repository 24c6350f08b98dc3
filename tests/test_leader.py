"""What a leader decides on each loss, and what the record has by then; no MPI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from optuna.pruners import ThresholdPruner

from hpo.errors import Exit, Stop
from hpo.evaluation.attempt import Attempt
from hpo.evaluation.leader import Leader, Limits
from hpo.evaluation.verdict import Verdict
from hpo.ranks.watched import Details, Watched
from hpo.store.pruning import Pruner, Stopping
from hpo.store.record import Record
from hpo.store.states import About, State
from hpo.store.weights import read_weights
from tests.support.runs import make_run
from tests.support.writing import Leading, writer_of

PARAMS = {"layers": 1, "activation": "relu", "lr": 0.1, "gamma": 0.9}


class Led:
    """A leader whose record nobody else writes to, and the evaluations that it leads."""

    def __init__(self, folder: Path, limits: Limits, pruner: Pruner | None = None) -> None:
        self.record: Record = make_run(folder / "run")
        self.stops: list[Stop] = []
        self.own = Leading(writer_of(self.record, folder / "run", pruner=pruner))
        limits = replace(limits, prunes=pruner is not None)
        self.leader = Leader(self.own.recorder, limits, self.stops.append, self.own.keeper)
        self.begun = 0

    def begin(self) -> Attempt:
        self.begun += 1
        return Attempt(self.own.begin({**PARAMS, "lr": self.begun / 10}))

    def step(self, attempt: Attempt, loss: float | None, **said: Any) -> Verdict:
        """Let the ranks agree on a loss, and the leader decide."""
        watched = Watched(1, Details(lambda: None, 60.0, "a trial"), 60.0, lambda *_: None)
        attempt.offer({"w": torch.full((1,), loss or 0.0)})
        verdict = self.leader.decide(attempt, watched, Verdict("going", loss, **said), "rank 0 | hello\n")
        attempt.take(verdict)
        if verdict.keep:
            self.leader.copy_weights(attempt)
        return verdict

    def curve(self, attempt: Attempt) -> dict[int, float]:
        return dict(self.record.evaluations()[attempt.assignment.number].curve)


def test_a_loss_is_in_the_record_when_it_is_told(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin()
    for epoch, loss in enumerate((0.5, 0.25, 0.75), start=1):
        assert led.step(attempt, loss).state == "going"
        assert led.curve(attempt)[epoch] == loss
    assert (len(attempt.losses), attempt.loss) == (3, 0.25)
    assert (tmp_path / "run" / "printed" / "0.txt").read_text() == "rank 0 | hello\n" * 3


def test_the_target_ends_an_evaluation_and_then_the_run(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(target_loss=0.3))
    attempt = led.begin()
    assert led.step(attempt, 0.4).state == "going"
    assert led.step(attempt, 0.3).state == "complete"
    assert led.stops == []
    led.leader.finish(attempt, 1.0)
    assert [(stop.reason, stop.status) for stop in led.stops] == [
        ("the loss of --target-loss 0.3 is reached", Exit.BUDGET_SPENT)
    ]
    assert led.record.evaluations()[0].loss == 0.3


def test_an_evaluation_that_takes_too_long_fails_though_its_loss_is_recorded(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=30.0))
    attempt = led.begin()
    attempt.began -= 31.0
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
    attempt.began = 1000.0
    report = led.record.report
    monkeypatch.setattr(led.record, "report", lambda *given: (now.__setitem__(0, now[0] + 100), report(*given)))
    assert led.step(attempt, 0.5).state == "going"
    assert led.step(attempt, 0.4).state == "going"
    assert attempt.seconds == 0.0


def test_a_pruner_is_asked_when_the_loss_is_in_the_record(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(), Stopping(ThresholdPruner(upper=1.0)))
    attempt = led.begin()
    assert led.step(attempt, 0.5).state == "going"
    assert led.step(attempt, 2.0).state == "pruned"
    led.leader.finish(attempt, 1.0)
    (evaluation,) = led.record.evaluations()
    assert (evaluation.state, evaluation.loss, dict(evaluation.curve)) == ("pruned", 0.5, {1: 0.5, 2: 2.0})


def test_only_weights_that_are_the_best_of_the_run_are_to_be_kept(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    first = led.begin()
    assert [led.step(first, loss).keep for loss in (0.5, 0.6, 0.4)] == [True, False, True]
    assert first.weights is not None
    assert first.weights["w"].item() == pytest.approx(0.4)
    first.take(Verdict("complete"))
    led.leader.finish(first, 1.0)
    second = led.begin()
    assert [led.step(second, loss).keep for loss in (0.45, 0.41, 0.3)] == [False, False, True]
    nothing = led.begin()
    assert led.step(nothing, None).keep is False


def test_failures_alone_stop_the_run(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(max_failures=2))
    for _ in range(2):
        assert led.stops == []
        attempt = led.begin()
        attempt.take(Verdict("failed", failure="rank 0: ValueError: no"))
        led.leader.finish(attempt, 1.0)
    assert [stop.status for stop in led.stops] == [Exit.NOTHING_SUCCEEDED]


def test_an_evaluation_that_goes_on_has_its_losses_and_its_seconds(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=100.0))
    attempt = led.begin()
    about = About(attempt.assignment.params, [0.5, 0.25, 0.75], {"accuracy": 0.5}, 99.0, {"dict": [["epoch", 3]]})
    attempt.restored = State(about, {}, {"w": torch.full((1,), 0.25)})
    assert attempt.go_on() == {"epoch": 3}
    assert not led.curve(attempt), "it has said so once it has a loss of its own"
    assert led.step(attempt, 0.5).state == "going"
    assert led.curve(attempt) == {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.5}
    with pytest.raises(RuntimeError, match="before the first loss"):
        attempt.go_on()
    attempt.verdict = Verdict("complete")
    led.leader.finish(attempt, 101.0)
    (evaluation,) = led.record.evaluations()
    assert (evaluation.loss, evaluation.metrics) == (0.25, {"accuracy": 0.5})
    assert (evaluation.went_on_after, evaluation.seconds_before, evaluation.seconds) == (3, 99.0, 101.0)
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert weights.state["w"].item() == 0.25


def test_the_seconds_before_an_interruption_count_for_the_timeout(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits(evaluation_timeout=100.0))
    attempt = led.begin()
    attempt.restored = State(About(attempt.assignment.params, [0.5], {}, 100.0, None), {})
    attempt.go_on()
    verdict = led.step(attempt, 0.25)
    assert verdict.failure == "timeout: still going on after 100 s (--evaluation-timeout)"


def test_an_evaluation_that_has_nothing_left_to_do_ends_with_what_it_had(tmp_path: Path) -> None:
    led = Led(tmp_path, Limits())
    attempt = led.begin()
    attempt.restored = State(About(attempt.assignment.params, [0.5, 0.25], {}, 9.0, None), {})
    attempt.go_on()
    attempt.verdict = Verdict("complete")
    led.leader.finish(attempt, 9.5)
    (evaluation,) = led.record.evaluations()
    assert (evaluation.state, evaluation.loss, evaluation.curve) == ("complete", 0.25, {1: 0.5, 2: 0.25})
