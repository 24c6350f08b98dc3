"""Test the record of a run: trials, claims, changes, storages and summaries."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from hpo import Categorical, Float, Int, SearchSpace
from hpo.errors import DuplicateError
from hpo.results.summary import (
    PropagatorResult,
    Summary,
    compute_busy_fraction,
    make_summary_content,
)
from hpo.store.evaluations import Assignment, rank_evaluations
from hpo.store.record import Record
from hpo.store.storage_url import mask_password
from hpo.store.study_client import StudyClient
from hpo.store.study_writer import Claims
from tests.support.evaluations import make_evaluation
from tests.support.runs import claim_evaluation, make_manifest
from tests.support.writer_stubs import make_client, make_writer, open_cached

SPACE = SearchSpace(
    layers=Int(1, 5), act=Categorical("relu", True, 3), lr=Float(1e-4, 1.0, log=True)
)
DISTRIBUTIONS = SPACE.make_distributions()
PARAMS: dict[str, Any] = {"layers": 2, "act": "relu", "lr": 0.01}


def make_record(folder: Path) -> Record:
    return Record.create(folder / "study.log", "run", SPACE.describe())


def reopen_record(folder: Path) -> Record:
    return Record(folder / "study.log", "run")


def start_trial(record: Record, budget: int = 10, **params: Any) -> Assignment | None:
    claims = Claims(record, DISTRIBUTIONS, budget)
    return claims.claim({**PARAMS, **params}, island=1, worker=2, generation=3)


def start_new_trial(record: Record, **params: Any) -> Assignment:
    assignment = start_trial(record, **params)
    assert assignment is not None
    return assignment


def test_record_reopened_returns_equal_evaluation(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    assignment = start_new_trial(record, act=True)
    record.report(assignment, 1, 0.9)
    record.report(assignment, 2, 0.4)
    record.complete(assignment, 0.4, 1.5, {"accuracy": 0.8})
    (evaluation,) = reopen_record(tmp_path).read_evaluations()
    assert (evaluation.trial, evaluation.state, evaluation.loss) == (0, "complete", 0.4)
    assert evaluation.params == {**PARAMS, "act": True}
    assert type(evaluation.params["act"]) is bool
    assert (evaluation.island, evaluation.worker, evaluation.generation) == (1, 2, 3)
    assert (evaluation.seconds, evaluation.metrics) == (1.5, {"accuracy": 0.8})
    assert evaluation.started <= evaluation.ended


def test_record_opened_by_plain_optuna_shows_trials(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    for number, lr in enumerate((0.001, 0.01, 0.1, 0.5)):
        assignment = start_new_trial(record, lr=lr, layers=number + 1)
        record.report(assignment, 1, lr)
        record.complete(assignment, lr, 1.0, {})
    record.fail(start_new_trial(record, lr=0.02), "rank 1: ValueError: no", "Traceback ...", 1.0)
    backend = JournalFileBackend(str(tmp_path / "study.log"))
    study = optuna.load_study(study_name="run", storage=optuna.storages.JournalStorage(backend))
    assert study.best_trial.params == {**PARAMS, "lr": 0.001, "layers": 1}
    assert study.best_trial.intermediate_values == {1: 0.001}
    assert study.trials[4].state == optuna.trial.TrialState.FAIL
    assert study.trials[4].user_attrs["failure"] == "rank 1: ValueError: no"
    assert set(optuna.importance.get_param_importances(study)) == set(PARAMS)


@pytest.mark.parametrize("seed", range(3))
def test_claims_by_several_leaders_stay_in_budget_and_unique(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    make_record(tmp_path)
    record, cached_storage = open_cached(tmp_path / "study.log")
    writer = make_writer(record, tmp_path, 30, space=SPACE, cached_storage=cached_storage)
    # All leaders try the same hyperparameters.
    leaders = {make_client(writer): iter(range(1, 100)) for _ in range(4)}
    running: list[tuple[StudyClient, Assignment]] = []
    with writer.batch_writes():
        while leaders or running:
            if running and (not leaders or chance.random() < 0.4):
                leader, ended = running.pop(chance.randrange(len(running)))
                leader.notify.complete(ended, 1.0, 0.0, {})
                continue
            leader = chance.choice(list(leaders))
            with suppress(DuplicateError):
                params = {**PARAMS, "lr": next(leaders[leader]) / 100}
                if assignment := leader.claim(params, island=1, worker=2, generation=3):
                    running.append((leader, assignment))
                else:
                    del leaders[leader]
    evaluations = reopen_record(tmp_path).read_evaluations()
    assert [evaluation.trial for evaluation in evaluations] == list(range(30))
    assert {evaluation.state for evaluation in evaluations} == {"complete"}
    assert {evaluation.params["lr"] for evaluation in evaluations} == {
        number / 100 for number in range(1, 31)
    }


def test_claim_with_known_params_raises_duplicate_error(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.complete(start_new_trial(record, layers=1), 0.5, 1.0, {})
    record.fail(start_new_trial(record, layers=2), "rank 0: ValueError: no", "", 1.0)
    start_new_trial(record, layers=3)
    for opened in (record, reopen_record(tmp_path)):
        for layers in (1, 2, 3):
            with pytest.raises(DuplicateError):
                start_trial(opened, layers=layers)
    resumed = reopen_record(tmp_path)
    resumed.requeue_interrupted()
    assert start_new_trial(resumed, layers=4).params["layers"] == 3, (
        "the interrupted trial must come first"
    )
    assert start_new_trial(resumed, layers=4).params["layers"] == 4
    with pytest.raises(DuplicateError):
        start_trial(resumed, layers=3)


def test_follower_reads_each_change_once(tmp_path: Path) -> None:
    record, follower = make_record(tmp_path), reopen_record(tmp_path).follow()
    first, second = start_new_trial(record, layers=1), start_new_trial(record, layers=2)
    record.complete(second, 0.5, 1.0, {})

    def read_new() -> list[tuple[int, str]]:
        return [(evaluation.trial, evaluation.state) for evaluation in follower.read()]

    assert read_new() == [(0, "running"), (1, "complete")]
    assert read_new() == []
    record.fail(first, "rank 0: ValueError: no", "", 1.0)
    start_new_trial(record, layers=3)
    assert read_new() == [(0, "failed"), (2, "running")]
    assert reopen_record(tmp_path).requeue_interrupted() == 1
    assert read_new() == [(2, "interrupted"), (3, "waiting")]
    start_new_trial(reopen_record(tmp_path), layers=4)
    assert read_new() == [(3, "running")]


def test_late_follower_reads_latest_states_first(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    early = record.follow()
    assignment = start_new_trial(record, layers=1)
    assert [evaluation.state for evaluation in early.read()] == ["running"]
    record.complete(assignment, 0.5, 1.0, {})
    late = record.follow()
    assert [evaluation.state for evaluation in late.read()] == ["complete"]
    assert [evaluation.state for evaluation in early.read()] == ["complete"]
    assert late.read() == early.read() == []


def test_follower_with_losses_reads_each_loss_once(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    states, losses = (
        reopen_record(tmp_path).follow(),
        reopen_record(tmp_path).follow(with_losses=True),
    )
    first, second = start_new_trial(record, layers=1), start_new_trial(record, layers=2)

    def read_curves() -> dict[int, dict[int, float]]:
        changes = losses.read()
        assert len({evaluation.trial for evaluation in changes}) == len(changes)
        return {evaluation.trial: dict(evaluation.curve) for evaluation in changes}

    assert read_curves() == {0: {}, 1: {}}
    record.report(first, 1, 0.5)
    assert read_curves() == {0: {1: 0.5}}
    assert read_curves() == {}
    record.report(second, 1, 0.4)
    record.report(first, 2, 0.3)
    record.complete(second, 0.4, 1.0, {})
    assert read_curves() == {0: {1: 0.5, 2: 0.3}, 1: {1: 0.4}}
    assert read_curves() == {}
    assert [(evaluation.trial, evaluation.state) for evaluation in states.read()] == [
        (0, "running"),
        (1, "complete"),
    ]
    record.report(first, 3, 0.2)
    assert states.read() == []


def test_interrupted_trial_is_retried_first_and_counts_once(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.complete(start_new_trial(record, layers=1), 0.5, 1.0, {})
    start_new_trial(record, layers=2)
    start_new_trial(record, layers=3)
    resumed = reopen_record(tmp_path)
    assert resumed.requeue_interrupted() == 2
    assert resumed.requeue_interrupted() == 0
    states = [evaluation.state for evaluation in resumed.read_evaluations()]
    assert states == ["complete", "interrupted", "interrupted", "waiting", "waiting"]
    second_reader = reopen_record(tmp_path)
    layers = []
    while assignment := start_trial(second_reader, budget=4, layers=5):
        layers.append(assignment.params["layers"])
        second_reader.complete(assignment, 0.1, 1.0, {})
    assert layers == [2, 3, 5]
    study = optuna.load_study(study_name="run", storage=second_reader._storage)
    assert [trial.user_attrs.get("retry_of") for trial in study.trials] == [
        None,
        None,
        None,
        1,
        2,
        None,
    ]
    assert Summary(second_reader.read_evaluations(), make_manifest(budget=4), 3).counts == {
        "complete": 4,
        "pruned": 0,
        "paused": 0,
        "failed": 0,
        "running": 0,
        "budget": 4,
    }


def test_claim_with_smaller_budget_leaves_trials_waiting(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.complete(start_new_trial(record), 0.5, 1.0, {})
    start_new_trial(record, layers=3)
    resumed = reopen_record(tmp_path)
    resumed.requeue_interrupted()
    assert start_trial(resumed, budget=1) is None


def test_journal_with_torn_last_line_keeps_other_lines(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.complete(start_new_trial(record), 0.5, 1.0, {})
    journal = tmp_path / "study.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 6, "tri')
    again = reopen_record(tmp_path)
    assert [evaluation.loss for evaluation in again.read_evaluations()] == [0.5]
    again.complete(start_new_trial(again, layers=3), 0.25, 1.0, {})
    assert journal.read_bytes().startswith(whole + b'{"op_code":')
    assert [evaluation.loss for evaluation in reopen_record(tmp_path).read_evaluations()] == [
        0.5,
        0.25,
    ]


def test_evaluation_without_its_parent_leaves_no_null(tmp_path: Path) -> None:
    """Optuna's browser app and extensions stop at a trial attribute that is null."""
    record = make_record(tmp_path)
    record.complete(start_new_trial(record), 0.5, 1.0, {})
    attributes = {"island": 1, "worker": 2, "generation": 3, "inherits": 0}
    child = record.start_trial({**PARAMS, "layers": 3}, DISTRIBUTIONS, attributes)
    assert reopen_record(tmp_path).read_evaluations()[1].inherits == 0
    record.clear_inheritance(child)
    record.complete(child, 0.25, 1.0, {"accuracy": 0.9})
    assert reopen_record(tmp_path).read_evaluations()[1].inherits is None
    lines = (tmp_path / "study.log").read_text("utf-8").splitlines()
    attributes_set = [line["user_attr"] for line in map(json.loads, lines) if line["op_code"] == 8]
    assert len(attributes_set) >= 4
    assert all(None not in attribute.values() for attribute in attributes_set)


def test_create_with_taken_name_raises_value_error(tmp_path: Path) -> None:
    make_record(tmp_path)
    with pytest.raises(ValueError, match="'run'"):
        make_record(tmp_path)


def test_record_in_other_storages_behaves_alike(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    record = Record.create(url, "run", SPACE.describe())
    record.complete(start_new_trial(record), 0.5, 1.0, {"accuracy": 1.0})
    assert start_trial(record, budget=1) is None
    (evaluation,) = Record(url, "run").read_evaluations()
    assert (evaluation.params, evaluation.loss, evaluation.metrics) == (
        PARAMS,
        0.5,
        {"accuracy": 1.0},
    )


def test_mask_password_hides_passwords() -> None:
    assert mask_password("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert (
        mask_password("postgresql://me:secret@host/db#study") == "postgresql://me:***@host/db#study"
    )
    assert mask_password("postgresql://me:sec#ret@host/db") == "postgresql://..."
    assert mask_password("not a url://secret") == "not a url://..."
    assert mask_password("/path/to/study.log") == "/path/to/study.log"


def test_rank_evaluations_returns_only_complete_ones(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    for layers, loss in ((4, 0.5), (2, 0.2), (1, 0.4), (3, 0.3)):
        record.complete(start_new_trial(record, layers=layers), loss, 1.0, {})
    record.fail(start_new_trial(record, lr=0.02), "rank 0: ValueError: no", "", 1.0)
    start_new_trial(record, lr=0.03)
    evaluations = record.read_evaluations()
    assert [(e.params["layers"], e.loss) for e in rank_evaluations(evaluations, 5)] == [
        (2, 0.2),
        (3, 0.3),
        (1, 0.4),
        (4, 0.5),
    ]
    assert [e.trial for e in rank_evaluations(evaluations, 1)] == [1]
    summary = make_summary_content(Summary(evaluations, make_manifest(budget=10), 2))
    assert summary["evaluations"] == {
        "complete": 4,
        "pruned": 0,
        "paused": 0,
        "failed": 1,
        "running": 1,
        "budget": 10,
    }
    assert summary["best"]["loss"] == 0.2
    assert [entry["loss"] for entry in summary["islands"][0]["top"]] == [0.2, 0.3]
    assert json.loads(json.dumps(summary)) == summary


def test_summary_counts_improvements_by_propagator(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    assignments = [
        claim_evaluation(
            record,
            {**PARAMS, "layers": layers},
            DISTRIBUTIONS,
            10,
            island=0,
            worker=0,
            generation=0,
            propagator=name,
        )
        for layers, name in ((1, "ga"), (2, "tpe"), (3, "ga"), (4, "tpe"))
    ]
    for index, loss in ((1, 0.5), (0, 0.6), (3, 0.4), (2, None)):
        assignment = assignments[index]
        assert assignment is not None
        if loss is None:
            record.fail(assignment, "rank 0: ValueError: no", "", 1.0)
        else:
            record.complete(assignment, loss, 1.0, {})
    assert {
        entry.propagator: entry
        for entry in Summary(record.read_evaluations(), make_manifest(budget=10), 2).propagators
    } == {
        "tpe": PropagatorResult("tpe", evaluations=2, improved=2, best=0.4),
        "ga": PropagatorResult("ga", evaluations=2, improved=0, best=0.6),
    }


def test_summary_of_run_without_success_has_no_best(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.fail(start_new_trial(record), "rank 0: ValueError: no", "", 1.0)
    (evaluation,) = record.read_evaluations()
    assert evaluation.loss == math.inf
    summary = Summary([evaluation], make_manifest(budget=1), 3)
    assert (summary.best, summary.islands) == (None, {1: []})


def test_busy_fraction_counts_interrupted_evaluations() -> None:
    evaluations = [
        make_evaluation(0, started=100.0, ended=110.0, seconds=10.0),
        make_evaluation(1, "interrupted", started=110.0, ended=150.0, seconds=40.0),
        make_evaluation(2, "interrupted", started=100.0, ended=900.0, seconds=math.nan),
    ]
    assert compute_busy_fraction(evaluations, workers=2, since=90.0) == pytest.approx(50 / 100)
    assert compute_busy_fraction(evaluations[1:], workers=2, since=90.0) == pytest.approx(0.5)


def test_busy_fraction_ignores_earlier_sessions() -> None:
    evaluations = [
        make_evaluation(0, started=0.0, ended=50.0, seconds=50.0),  # Ran in an earlier session.
        make_evaluation(1, started=100.0, ended=110.0, seconds=10.0),
        make_evaluation(2, started=102.0, ended=108.0, seconds=6.0),
    ]
    assert compute_busy_fraction(evaluations, workers=2, since=90.0) == pytest.approx(16 / 20)
    assert compute_busy_fraction(evaluations, workers=2, since=200.0) is None
    went_on = replace(evaluations[-1], seconds_before=evaluations[-1].seconds / 2)
    fraction = compute_busy_fraction([*evaluations[:-1], went_on], workers=2, since=90.0)
    assert fraction == pytest.approx((16 - went_on.seconds_before) / 20)
