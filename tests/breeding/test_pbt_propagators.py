"""Test propagators with population based training: they learn the change of the loss."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpo import Categorical, Float, Int, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory, ParentPool
from hpo.breeding.population import Individual
from hpo.breeding.propagators import make_propagator
from hpo.breeding.tpe import TPEPropagator
from hpo.errors import UsageError
from hpo.evaluation.leader import Checkpointer
from hpo.results.models import compute_expected_losses
from hpo.results.reader import RunReader
from hpo.run.session import Session
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import InheritancePolicy
from hpo.trainer.search_file import load_search_file
from hpo.views.summary_tables import print_tables
from tests.support.evaluations import make_evaluation
from tests.support.launch import SEARCHES
from tests.support.runs import claim_evaluation, start_session

RATES = SearchSpace(lr=Float(0.01, 1.0, log=True, mutable=True))
NETWORKS = SearchSpace(layers=Int(1, 9), lr=Float(0.01, 1.0, log=True, mutable=True))


def make_ended(trial: int, loss: float, inherits: int | None = None, **values: Any) -> Evaluation:
    params = values.pop("params", {"lr": 0.1})
    return make_evaluation(
        trial, loss=loss, params=params, inherits=inherits, **{"checkpoint_step": 1, **values}
    )


def make_history(
    evaluations: Sequence[Evaluation], space: SearchSpace = RATES, inherits: bool = True
) -> EvaluationHistory:
    history = EvaluationHistory(space, parent_pool=ParentPool(space, uses_pbt=inherits))
    history.add_evaluations(evaluations)
    return history


def test_heir_sample_has_changes_from_the_parent() -> None:
    evaluations = [
        make_ended(0, 8.0),
        make_ended(1, 4.0, 0),
        make_ended(2, 5.0, 1),
        make_ended(3, math.inf, 1, state="failed"),
    ]
    history = make_history(
        [*evaluations, make_evaluation(4, state="running", params={"lr": 0.5}, inherits=1)]
    )
    assert history.make_founder_sample().costs.tolist() == [[8.0]]
    sample = history.make_heir_sample(evaluations[1])
    assert sample.costs.tolist() == [[-0.5], [0.25], [math.inf]]
    assert sample.contexts.tolist() == [[1.0, 0.5], [0.0, 1.0], [0.0, 1.0]], (
        "contexts are the rank of the parent's loss and the age"
    )
    assert sample.running_contexts.tolist() == [[0.0, 1.0]]
    assert sample.context.tolist() == [0.0, 1.0]
    assert history.ended_count == 4


def test_heir_cost_of_a_negative_loss_keeps_its_sign() -> None:
    history = make_history(
        [make_ended(0, -0.5), make_ended(1, -0.6, 0), make_ended(2, 0.0, 0), make_ended(3, 0.5, 2)]
    )
    assert history.make_heir_sample(make_ended(0, -0.5)).costs[:, 0] == pytest.approx(
        [-0.2, 1.0, 0.5]
    )


def test_parent_pool_has_the_best_with_checkpoints() -> None:
    pool = ParentPool(RATES, island=1, islands=2, uses_pbt=True)
    for trial in range(40):
        pool.add_evaluation(make_ended(trial, 1 - trial / 100, island=trial % 2))
    others: list[dict[str, Any]] = [
        {"checkpoint_step": 0},
        {"imported_from": "trial 1 of x"},
        {"state": "failed"},
    ]
    for trial, values in enumerate(others, start=40):
        pool.add_evaluation(make_ended(trial, 0.0, island=1, **values))
    assert [parent.trial for parent in pool.parents] == list(range(39, 19, -2))


def test_parent_pool_without_pbt_is_empty() -> None:
    history = make_history([make_ended(0, 8.0), make_ended(1, 4.0, 0)], inherits=False)
    assert history.parent_pool.parents == []
    assert history.make_founder_sample().costs.tolist() == [[8.0]]


def test_draw_parent_draws_fewer_founders_as_parents_age() -> None:
    young = [make_ended(trial, 1.0, params={"layers": 1 + trial, "lr": 0.1}) for trial in range(4)]
    old = [make_ended(4 + trial, 0.5, trial, params=young[trial].params) for trial in range(4)]
    rng = random.Random(0)
    first, later = (
        make_history(young, NETWORKS).parent_pool,
        make_history([*young, *old], NETWORKS).parent_pool,
    )
    share = sum(first.draw_parent(rng) is None for _ in range(1000)) / 1000
    assert share == pytest.approx(0.5, abs=0.05)
    assert sum(later.draw_parent(rng) is None for _ in range(1000)) / 1000 == pytest.approx(
        0.25, abs=0.05
    )
    assert {parent.trial for parent in map(later.draw_parent, [rng] * 100) if parent} == {
        4,
        5,
        6,
        7,
    }


@pytest.mark.parametrize("exploration_share", [0.0, 1.0])
def test_ga_prefers_large_changes_to_good_parents(
    exploration_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """High learning rates halve the losses of bad parents, and hardly change those of good ones.

    So the best choice is a high learning rate for a good parent, although no evaluation has tried
    this.
    """
    monkeypatch.setattr("hpo.breeding.surrogate._EXPLORATION_SHARE", exploration_share)
    draws, evaluations = random.Random(0), [make_ended(0, 1.0), make_ended(1, 0.001)]
    for trial in range(2, 26):
        is_high = trial % 2 == 0
        lr = round(draws.uniform(0.8, 1.0) if is_high else draws.uniform(0.02, 0.06), 6)
        parent = evaluations[0 if is_high else 1]
        evaluations.append(
            make_ended(trial, parent.loss * (1 - lr / 2), parent.trial, params={"lr": lr})
        )
    population = [Individual(RATES, RATES.encode(each.params)) for each in evaluations]
    for individual, evaluation in zip(population, evaluations, strict=True):
        individual.loss = evaluation.loss
    rates = []
    for seed in range(5):
        propagator = make_propagator("ga", RATES, seed, make_history(evaluations))
        propagator.population = population
        rates.append(propagator.ask().params["lr"])
    assert statistics.median(map(float, rates)) > 0.5, rates


def simulate(name: str, evaluations: int, seed: int) -> list[Evaluation]:
    """Search for the learning rate 1. Return the best evaluation and its ancestors."""
    history = make_history([])
    propagator = make_propagator(name, RATES, seed, history)
    for _ in range(evaluations):
        individual = propagator.ask()
        parent = history.parent_pool.find_parent(individual.params)
        before = 1.0 if parent is None else parent.loss
        propagator.tell(individual, before * (1 - float(individual.params["lr"]) / 2))
    known = [each for each in history.changes if each.state == "complete"]
    line = [min(known, key=lambda each: each.loss)]
    while (parent_trial := line[0].inherits) is not None:
        line.insert(0, known[parent_trial])
    return line


@pytest.mark.slow
def test_ga_with_pbt_does_not_activate_immutable_parameters() -> None:
    """A candidate in which a mutable parameter activates an immutable one has no parent."""
    space = SearchSpace(
        kind=Categorical("a", "b", mutable=True),
        lr=Float(0.01, 1.0, log=True, mutable=True),
        width=Float(0.0, 1.0, when={"kind": "b"}),
    )
    history = make_history([], space)
    propagator = make_propagator("ga", space, 0, history)
    heirs = 0
    for _ in range(60):
        individual = propagator.ask()
        parent = history.parent_pool.find_parent(individual.params)
        heirs += parent is not None
        before = parent.loss if parent else 1.0
        propagator.tell(individual, before * (1 - float(individual.params["lr"]) / 9))
    assert heirs > 45, "nearly all have a parent, as in a space without conditions"


@pytest.mark.slow
def test_ga_with_pbt_finds_the_best_learning_rate() -> None:
    line = simulate("ga", 40, 0)
    assert statistics.median(float(each.params["lr"]) for each in line) > 0.9
    assert line[-1].loss < 2.0**-20, "40 halvings are possible"


def test_tpe_with_pbt_learns_ranks_within_each_kind() -> None:
    history = make_history([])
    propagator = TPEPropagator(history, random.Random(0))
    history.add_evaluations(
        [
            make_ended(0, 8.0),
            make_ended(1, 4.0, 0),
            make_ended(2, 3.9, 1),
            make_ended(3, 9.0),
            make_ended(4, 1.0, 1),
        ]
    )
    propagator._learn()
    assert [trial.value for trial in propagator._study.trials] == [
        0.5,
        0.5,
        0.75,
        0.75,
        pytest.approx(1 / 6),
    ]


def test_tpe_without_inheritance_leaves_out_heirs() -> None:
    history = make_history([], inherits=False)
    propagator = TPEPropagator(history, random.Random(0))
    history.add_evaluations([make_ended(0, 8.0), make_ended(1, 4.0, 0)])
    propagator._learn()
    assert [trial.value for trial in propagator._study.trials] == [8.0, None]


def run_with_heirs(folder: Path, **options: Any) -> Session:
    """Return a run with two founders, whose losses are 2 and 3, and a child of the first one.

    The loss of the child is 1.
    """
    search = SEARCHES / "heirs.py"
    session = start_session(folder, search, pbt=True, evaluations=9, **options)
    record, distributions = (
        session.open_record(),
        load_search_file(search).space.make_distributions(),
    )
    for trial, (lr, loss) in enumerate([(0.1, 2.0), (0.2, 3.0), (0.3, 1.0)]):
        inherits: dict[str, Any] = {"inherits": 0} if trial == 2 else {}
        params = {"kind": 1, "lr": lr, "decays": False}
        assignment = claim_evaluation(
            record, params, distributions, 99, propagator="ga", **inherits
        )
        record.report(assignment, 1, loss)
        record.record_checkpoint(assignment, 1)
        record.complete(assignment, loss, 1.0, {})
    return session


def test_warm_start_leaves_out_evaluations_with_a_parent(tmp_path: Path) -> None:
    run_with_heirs(tmp_path / "before")
    session = start_session(
        tmp_path / "run", SEARCHES / "heirs.py", warm_start=str(tmp_path / "before")
    )
    assert f"with 2 evaluations of {tmp_path}/before, the best 2\n" in session.headline
    assert "without 1 evaluation with inherited weights" in session.headline
    assert [each.loss for each in session.open_record().read_evaluations()] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"confirm_seeds": 2},
            "trial 2, which inherits from trial 0, and --confirm-seeds 2 exclude each other: "
            ".*Give --confirm-seeds 0, or start "
            "another run",
        ),
        (
            {"pruner": "asha"},
            "trial 2, which inherits from trial 0, and --pruner asha exclude each other: .*Give "
            "--pruner none, or start another run",
        ),
    ],
)
def test_no_pbt_keeps_checks_of_a_run_with_heirs(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    run_with_heirs(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    resume = {"resume": True, "pbt": False}
    with pytest.raises(UsageError, match=said):
        start_session(tmp_path / "run", SEARCHES / "heirs.py", **resume, **options)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert (
        "resumed after 3 evaluations"
        in start_session(tmp_path / "run", SEARCHES / "heirs.py", **resume).headline
    )


def test_find_parent_skips_missing_checkpoints(tmp_path: Path) -> None:
    session = run_with_heirs(tmp_path / "run")
    states, space = (
        CheckpointStore(session.run_dir.checkpoints),
        load_search_file(SEARCHES / "heirs.py").space,
    )
    heirs = InheritancePolicy(session.open_record(), space, 2, states)
    params = {"kind": 1, "lr": 0.7, "decays": False}
    assert heirs.find_parent(params, 0) is None, "no parent has a checkpoint"
    states.get_path(0).parent.mkdir()
    for trial, expected in ((1, 1), (0, 0), (2, 2)):
        states.get_path(trial).touch()
        assert heirs.find_parent(params, 0) == expected
    with pytest.raises(ValueError, match="cannot be read"):
        Checkpointer(states, None).find_parent_checkpoint(2)
    assert heirs.find_parent(params, 0) == 0, "the damaged checkpoint must be removed"


def test_tables_mark_evaluations_with_a_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_with_heirs(tmp_path / "run")
    summary = RunReader(tmp_path / "run").make_summary(3)
    assert [evaluation.inherits for evaluation in summary.top] == [0, None, None]
    print_tables(summary, tmp_path / "run")
    assert "from 0" in capsys.readouterr().out


def test_expected_losses_leave_out_heirs() -> None:
    rng = np.random.default_rng(0)
    rates = np.exp(rng.uniform(math.log(0.01), 0, 60)).round(6).tolist()
    plain = [
        make_ended(trial, 1 + abs(math.log(lr)), params={"lr": lr})
        for trial, lr in enumerate(rates)
    ]
    heirs = [
        replace(each, trial=60 + each.trial, loss=each.loss / 100, inherits=each.trial)
        for each in plain
    ]
    alone = compute_expected_losses(plain, RATES)
    assert len(alone) == 60
    assert compute_expected_losses([*plain, *heirs], RATES) == alone
