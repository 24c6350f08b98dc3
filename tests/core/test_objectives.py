"""Test several objectives: declaration, study, Pareto front, selection and weights."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from hpo import Categorical, Float, Int, SearchSpace, maximize
from hpo.breeding.population import Individual, select_emigrants, select_replaced
from hpo.dominance import compute_hypervolume
from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives, parse_objectives
from hpo.results.hypervolume import compute_shares_over_time, make_box, summarize_hypervolume
from hpo.results.recommendation import find_winner
from hpo.run.initial_evaluations import read_warm_start
from hpo.run.request import check_objectives
from hpo.store.evaluations import Assignment, Evaluation
from hpo.store.pareto_front import MAX_FRONT_WEIGHTS, find_front, select_spread, select_top
from hpo.store.pruning import StoppingPruner, make_pruner
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.weights import make_weights_path, read_weights
from hpo.trainer.search_file import load_search_file
from tests.support.evaluations import make_evaluation
from tests.support.runs import claim_evaluation, make_manifest
from tests.support.simulation import SimulatedIslands, simulate
from tests.support.writer_stubs import LeaderStub, make_writer

TWO = Objectives(("loss", "parameters"))
THREE = Objectives(("loss", "parameters", "speed"), ("speed",))
SPACE = SearchSpace(x=Float(0.0, 1.0))


# Declaration


def test_parse_objectives_returns_names_and_directions() -> None:
    assert parse_objectives(["loss"]) == (ONLY_LOSS, "")
    assert parse_objectives(("loss", "parameters", maximize("speed"))) == (THREE, "")
    assert parse_objectives([maximize("accuracy")]) == (ONLY_LOSS, "accuracy")
    assert THREE.compute_costs((1.0, 2.0, 3.0)) == (1.0, 2.0, -3.0)
    assert (
        THREE.compute_costs((1.0, 2.0))
        == THREE.compute_costs((1.0, math.nan, 3.0))
        == (math.inf,) * 3
    )
    assert THREE.select_metric_values({"speed": 3, "parameters": 2, "accuracy": 1}) == (2.0, 3.0)
    assert (THREE.find_missing({"speed": 3}), THREE.select_metric_values({"speed": 3})) == (
        ["parameters"],
        (),
    )


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        (
            "loss",
            r'objectives must be a tuple of names, such as objectives = \("loss", "parameters"\), '
            r"got 'loss'",
        ),
        ((), r"must be a tuple of names, such as .*, got \(\)"),
        ({"loss": 1}, "must be a tuple of names"),
        (("loss", 3), "must be names of metrics, .*, got 3"),
        (("loss", ""), "must be names of metrics, .*, got ''"),
        (("loss", maximize("")), "must be names of metrics"),
        (("parameters", "loss"), "the first objective must be 'loss', got 'parameters'"),
        (
            (maximize("loss"), "parameters"),
            r"the first objective must be 'loss', got MaximizedMetric\(name='loss'\)",
        ),
        (
            ("loss", "size", maximize("size")),
            "objectives must differ from each other, got 'size' twice",
        ),
        (("loss", "loss"), "objectives must differ from each other, got 'loss' twice"),
    ],
)
def test_search_file_with_invalid_objectives_raises(
    tmp_path: Path, objectives: Any, message: str
) -> None:
    text = repr(objectives).replace("MaximizedMetric(name=", "hpo.maximize(")
    file = tmp_path / "search.py"
    file.write_text(
        "import hpo\nspace = hpo.SearchSpace(x=hpo.Int(1, 9))\n"
        f"objectives = {text}\ndef objective(params, worker): ...\n"
    )
    with pytest.raises(UsageError, match=f"{file}: .*{message}"):
        load_search_file(file)


def test_check_objectives_with_single_loss_propagator_raises() -> None:
    check_objectives(("ga", "tpe", "random"), TWO)
    check_objectives(("pso", "propulate"), ONLY_LOSS)
    expected = (
        "--propagators must be among ga, tpe, random for several objectives, got propulate for "
        "loss, parameters, speed (maximised)"
    )
    with pytest.raises(UsageError) as raised:
        check_objectives(("ga", "propulate"), THREE)
    assert str(raised.value) == expected


def test_manifest_with_invalid_objectives_raises() -> None:
    assert make_manifest().objectives == ONLY_LOSS, "An old manifest has no objectives."
    objectives = {"names": ["loss", "speed"], "maximized": ["speed"]}
    assert make_manifest(objectives=objectives).objectives == Objectives(
        ("loss", "speed"), ("speed",)
    )
    assert (
        json.loads(json.dumps(make_manifest(objectives=objectives).to_json()))["objectives"]
        == objectives
    )
    for wrong in (
        {"names": ["speed", "loss"], "maximized": []},
        {"names": ["loss", "loss"], "maximized": []},
        {"names": ["loss"], "maximized": ["loss"]},
        {"names": ["loss"]},
        ["loss"],
    ):
        with pytest.raises(
            UsageError, match=r"'objectives' must be an object with 'names', .*, got "
        ):
            make_manifest(objectives=wrong)


# Study


def make_record(folder: Path, objectives: Objectives, *rows: tuple[float, ...]) -> Record:
    """Return the record of a study with one complete evaluation for each row of values."""
    record = Record.create(folder / "study.log", "run", SPACE.describe(), objectives=objectives)
    for values in rows:
        complete(record, values)
    return record


def complete(record: Record, values: tuple[float, ...]) -> Assignment:
    assignment = claim_evaluation(
        record, {"x": random.Random(f"{values}").random()}, SPACE.make_distributions(), 999
    )
    metrics = dict(zip(record.objectives.metric_names, values[1:], strict=True))
    record.complete(assignment, values[0], 1.0, {**metrics, "accuracy": 0.5})
    return assignment


def test_record_with_objectives_is_an_optuna_study(tmp_path: Path) -> None:
    record = make_record(
        tmp_path, THREE, (1.0, 9.0, 5.0), (2.0, 5.0, 5.0), (3.0, 9.0, 4.0), (3.0, 9.0, 6.0)
    )
    assert Record(tmp_path / "study.log", "run").objectives == THREE
    study = record.study
    assert study.metric_names == ["loss", "parameters", "speed"]
    assert [direction.name for direction in study.directions] == [
        "MINIMIZE",
        "MINIMIZE",
        "MAXIMIZE",
    ]
    assert study.trials[0].values == [1.0, 9.0, 5.0]
    assert (
        [
            evaluation.trial
            for evaluation in find_front(record.read_evaluations(), record.objectives)
        ]
        == sorted(trial.number for trial in study.best_trials)
        == [0, 1, 3]
    )
    assert record.read_evaluations()[3].values == (3.0, 9.0, 6.0)


def test_median_pruner_with_objectives_prunes_by_loss(tmp_path: Path) -> None:
    record = make_record(tmp_path, TWO)
    for index in range(6):
        assignment = claim_evaluation(record, {"x": index / 10}, SPACE.make_distributions(), 99)
        record.report(assignment, 1, index / 10)
        record.complete(assignment, index / 10, 1.0, {"parameters": 10.0 - index})
    pruner = make_pruner("median", 9)
    assert isinstance(pruner, StoppingPruner)
    for loss, state in ((0.1, "running"), (0.4, "pruned")):
        assignment = claim_evaluation(record, {"x": loss + 0.05}, SPACE.make_distributions(), 99)
        record.report(assignment, 1, loss)
        assert pruner.decide_pruning(record, assignment, 1).state == state
    record.prune(assignment, 0.4, 1.0, {"parameters": 1.0})
    assert record.read_evaluations()[-1].values == (0.4, 1.0)
    assert len(find_front(record.read_evaluations(), record.objectives)) == 6, (
        "A pruned evaluation must not be on the front."
    )


def test_create_record_with_other_objectives_raises(tmp_path: Path) -> None:
    make_record(tmp_path, TWO)
    with pytest.raises(ValueError, match="already holds a study named 'run'"):
        Record.create(tmp_path / "study.log", "run", SPACE.describe())


# Pareto front


def make_individual(trial: int, *values: float, **others: Any) -> Evaluation:
    return make_evaluation(trial, loss=values[0], other_values=values[1:], **others)


def test_front_has_all_ties_and_no_failed_evaluations() -> None:
    evaluations = [
        make_individual(0, 0.5, 7.0),
        make_individual(1, 0.5, 5.0),
        make_individual(2, 0.5, 5.0),
        make_individual(3, 0.4, 9.0),
        make_individual(4, 0.1, 1.0, state="pruned"),
        make_evaluation(5, "failed"),
        make_individual(6, 0.6, 4.0),
        make_individual(7, 0.7, 4.0),
    ]
    assert [found.trial for found in find_front(evaluations, TWO)] == [3, 1, 2, 6]
    assert [found.trial for found in select_top(evaluations, 9, TWO)] == [3, 1, 2, 6, 0, 7]
    losses = [replace(evaluation, other_values=()) for evaluation in evaluations]
    assert [found.trial for found in find_front(losses, ONLY_LOSS)] == [3]
    assert [found.trial for found in select_top(losses, 2, ONLY_LOSS)] == [3, 0]
    maximised = Objectives(("loss", "speed"), ("speed",))
    assert [found.trial for found in find_front(evaluations, maximised)] == [3]


def test_select_spread_keeps_distant_individuals() -> None:
    line = [
        make_individual(index, index / 100, float(100 - index))
        for index in (0, 1, 2, 30, 31, 60, 99, 100)
    ]
    assert [found.trial for found in select_spread(line, TWO, 5)] == [0, 31, 60, 99, 100]


@pytest.mark.parametrize("objectives", [2, 4, 6, 9])
def test_select_spread_keeps_the_best_of_each_objective(objectives: int) -> None:
    names = Objectives(("loss", *map(str, range(1, objectives))))
    draws = random.Random(objectives)
    many = [
        make_individual(trial, *(draws.random() for _ in range(objectives))) for trial in range(60)
    ]
    kept = select_spread(find_front(many, names), names)
    assert len(kept) <= MAX_FRONT_WEIGHTS
    for index in range(objectives):
        assert min(many, key=lambda found: found.values[index]) in kept


def test_summarize_hypervolume_ignores_outliers() -> None:
    good = [
        make_individual(0, 0.0, 10.0),
        make_individual(1, 5.0, 5.0),
        make_individual(2, 10.0, 0.0),
    ]
    whole = summarize_hypervolume(good, TWO)
    # The box is 11 by 11. The ends dominate strips of 1 by 11, and the middle dominates a square of
    # 6 by 6.
    share = pytest.approx((11 + 11 - 1 + 25) / 121)
    assert whole is not None
    assert whole.share == share
    assert whole.ideal == [0.0, 0.0]
    assert whole.reference == pytest.approx([11, 11])
    diverged = [make_individual(3, 1e30, 7.0), make_individual(4, 1e300, 3.0)]
    assert summarize_hypervolume([*good, *diverged], TWO) == whole
    assert [grown for grown, _ in compute_shares_over_time([*good, *diverged], TWO)] == [1, 2, 3]
    assert compute_shares_over_time([*good, *diverged], TWO)[-1][1] == share
    smallest = make_individual(5, 1e300, -1.0)
    found = summarize_hypervolume([*good, smallest], TWO)
    assert found is not None
    assert found.reference == [pytest.approx(11), pytest.approx(11.1)], (
        "It is on the front because of its small second value."
    )
    assert make_box(good[:1], TWO) is None, "One individual has no trade-off."
    assert summarize_hypervolume(good, ONLY_LOSS) is None
    ends = [
        make_individual(0, -1.7e308, 1.7e308),
        make_individual(1, 1.7e308, -1.7e308),
        make_individual(2, 0.0, 0.0),
    ]
    huge = summarize_hypervolume(ends, TWO)
    assert huge is not None
    assert 0.2 < huge.share < 0.3


# Selection


def make_bred_individual(*costs: float) -> Individual:
    space = SearchSpace(x=Float(0.0, 1.0))
    individual = Individual(space, space.encode({"x": min(costs[0], 99.0) / 100}))
    individual.loss, individual.costs = costs[0], costs
    return individual


def test_emigrants_are_of_the_front_and_replace_the_worst() -> None:
    population = [
        make_bred_individual(1.0, 9.0),
        make_bred_individual(5.0, 5.0),
        make_bred_individual(9.0, 1.0),
        make_bred_individual(9.0, 9.0),
        make_bred_individual(math.inf, math.inf),
    ]
    rng = random.Random(0)
    sent = {select_emigrants(1, rng, population)[0].loss for _ in range(50)}
    assert sent == {1.0, 5.0, 9.0}
    assert all(select_emigrants(1, rng, population)[0].costs != (9.0, 9.0) for _ in range(50))
    assert len({id(sent) for sent in select_emigrants(5, random.Random(0), population)}) == 5, (
        "All must emigrate."
    )
    assert [gone.costs for gone in select_replaced(2, population)] == [
        (9.0, 9.0),
        (math.inf, math.inf),
    ]


WIDE = SearchSpace(
    width=Int(1, 300, log=True), lr=Float(1e-4, 1.0, log=True), act=Categorical("relu", "tanh")
)


def trade(params: dict[str, Any]) -> tuple[tuple[float, float], float]:
    """Return costs and seconds of an evaluation: wide networks have low losses, many parameters.

    One learning rate is the best for all widths.
    """
    loss = (
        params["width"] ** -0.5
        + (math.log10(params["lr"]) + 2) ** 2 / 8
        + (params["act"] == "tanh") / 10
    )
    return (loss, params["width"] / 300), 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("ga", 0.6), ("tpe", 0.9)])
def test_propagators_find_a_better_front_than_random(name: str, share: float) -> None:
    best = np.array(
        [trade({"width": width, "lr": 0.01, "act": "relu"})[0] for width in range(1, 301)]
    )

    def compute_missing_volume(propagator: str) -> float:
        volumes = []
        for seed in range(3):
            islands = SimulatedIslands(WIDE, [propagator], 2, seed, objectives=TWO)
            volumes.append(compute_hypervolume(simulate(islands, trade, 60), [1.0, 1.0]))
        return compute_hypervolume(best, [1.0, 1.0]) - float(np.mean(volumes))

    assert compute_missing_volume(name) < share * compute_missing_volume("random")


# Weights of the front


def test_weights_are_kept_for_the_front_only(tmp_path: Path) -> None:
    record = make_record(tmp_path, TWO)
    leader = LeaderStub(make_writer(record, tmp_path, space=SPACE))

    def complete_evaluation(loss: float, parameters: float) -> bool:
        assignment = leader.begin({"x": random.Random(f"{loss}").random()})
        return leader.complete(
            assignment, loss, {"w": torch.tensor([loss])}, {"parameters": parameters}
        )

    def list_kept() -> set[int]:
        return {int(path.stem) for path in (tmp_path / "front").iterdir()}

    assert [
        complete_evaluation(0.5, 50.0),
        complete_evaluation(0.4, 60.0),
        complete_evaluation(0.6, 55.0),
        complete_evaluation(0.9, 10.0),
    ] == [True, True, False, True]
    assert list_kept() == {0, 1, 3}
    assert complete_evaluation(0.3, 45.0), "It dominates two others."
    assert list_kept() == {3, 4}
    weights = read_weights(make_weights_path(tmp_path / "front", 4))
    assert weights is not None
    assert weights.trial == 4
    assert weights.state["w"].item() == pytest.approx(0.3)
    best = read_weights(tmp_path / "best.safetensors")
    assert best is not None
    assert best.trial == 4
    for index in range(3 * MAX_FRONT_WEIGHTS):
        complete_evaluation(0.25 - index / 1000, 46.0 + index)
    assert len(list_kept()) == MAX_FRONT_WEIGHTS
    assert (
        {3, find_front(record.read_evaluations(), record.objectives)[0].trial}
        <= list_kept()
        <= {found.trial for found in find_front(record.read_evaluations(), record.objectives)}
    ), "The ends of the front must be kept."
    assert not list(tmp_path.glob("**/.*")), "There must be no drafts."


def test_weights_of_equal_individuals_are_kept_once(tmp_path: Path) -> None:
    record = make_record(tmp_path, TWO)
    leader = LeaderStub(make_writer(record, tmp_path, space=SPACE))
    begun = [leader.begin({"x": index / 10}) for index in range(4)]
    for assignment, loss, parameters in (
        (begun[1], 0.5, 5.0),
        (begun[2], 0.4, 9.0),
        (begun[0], 0.5, 5.0),
    ):
        assert leader.complete(
            assignment, loss, {"w": torch.tensor([loss])}, {"parameters": parameters}
        )
    assert not leader.is_wanted(begun[3], 0.5, {"parameters": 5.0})
    assert {evaluation.trial for evaluation in find_front(record.read_evaluations(), TWO)} == {
        0,
        1,
        2,
    }
    assert {path.name for path in (tmp_path / "front").iterdir()} == {
        "0.safetensors",
        "2.safetensors",
    }
    draft = tmp_path / "front" / ".7.safetensors.7"
    draft.touch()
    RunDir(tmp_path).remove_stale_files()
    assert not draft.exists(), "A killed job may leave a draft."


def test_find_winner_ignores_confirmed_but_dominated() -> None:
    search = [
        make_individual(0, 0.5, 7.0),
        make_individual(1, 0.4, 9.0),
        make_individual(2, 0.6, 8.0),
    ]
    means = {0: 0.7, 1: 0.8, 2: 0.6}
    confirmations = [
        make_evaluation(trial, loss=loss, confirms=trial, seed=1) for trial, loss in means.items()
    ]
    assert find_winner(search, confirmations, TWO) == search[0]
    assert find_winner(search, [], TWO) == search[1]


# Warm start


def test_read_warm_start_needs_all_objectives(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    objectives = Objectives(("loss", "speed"), ("speed",))
    down, up = optuna.study.StudyDirection.MINIMIZE, optuna.study.StudyDirection.MAXIMIZE
    for name, directions, names in (
        ("same", [down, up], None),
        ("turned", [down, down], None),
        ("named", [down, down, up], ["error", "size", "speed"]),
        ("behind", [down, down, up], ["size", "loss", "speed"]),
    ):
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        if names:
            with pytest.warns(optuna.exceptions.ExperimentalWarning):
                study.set_metric_names(names)
        values = [0.25, 2.0, 7.0] if names else [0.25, 7.0]
        study.add_trial(
            optuna.create_trial(
                params={"x": 0.5}, distributions=SPACE.make_distributions(), values=values
            )
        )
    (same,) = read_warm_start(f"{storage}#same", SPACE, objectives).evaluations
    assert (same.values, same.metrics) == ((0.25, 7.0), {"speed": 7.0})
    (named,) = read_warm_start(f"{storage}#named", SPACE, objectives).evaluations
    assert (named.values, named.metrics) == ((0.25, 7.0), {"size": 2.0, "speed": 7.0})
    with pytest.raises(
        UsageError,
        match="no finished evaluation is valid in this search space: trial 0: its 'speed'",
    ):
        read_warm_start(f"{storage}#turned", SPACE, objectives)
    with pytest.raises(UsageError, match="its first objective must be 'loss', got 'size'"):
        read_warm_start(f"{storage}#behind", SPACE, objectives)
    (alone,) = read_warm_start(f"{storage}#turned", SPACE, ONLY_LOSS).evaluations
    assert (alone.values, alone.metrics) == ((0.25,), {})
