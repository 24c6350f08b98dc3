"""With inheritance, propagators learn how a loss changed from the parent's."""

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

from hpo import Float, Int, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.parent_pool import ParentPool
from hpo.breeding.propagators import Deduplicate, make_propagator
from hpo.breeding.propulate_compat import Individual
from hpo.breeding.tpe import TPEPropagator
from hpo.errors import UsageError
from hpo.evaluation.checkpointer import Checkpointer
from hpo.results.expected_loss import compute_expected_losses
from hpo.results.reader import RunReader
from hpo.run.session import Session
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import Evaluation
from hpo.store.heirs import InheritancePolicy
from hpo.trainer.search_file import load_search_file
from hpo.views.summary_tables import print_tables
from tests.support.evaluations import make_evaluation
from tests.support.launch import SEARCHES
from tests.support.runs import claim_evaluation, start_session

RATES = SearchSpace(lr=Float(0.01, 1.0, log=True, mutable=True))
NETWORKS = SearchSpace(layers=Int(1, 9), lr=Float(0.01, 1.0, log=True, mutable=True))


def ended(trial: int, loss: float, inherits: int | None = None, **values: Any) -> Evaluation:
    params = values.pop("params", {"lr": 0.1})
    return make_evaluation(trial, loss=loss, params=params, inherits=inherits, **{"checkpoint_step": 1, **values})


def past_of(evaluations: Sequence[Evaluation], space: SearchSpace = RATES, inherits: bool = True) -> EvaluationHistory:
    past = EvaluationHistory(space, list, parent_pool=ParentPool(space, uses_pbt=inherits))
    past.add_evaluations(evaluations)
    return past


def test_heirs_sample_has_changes_from_the_parent() -> None:
    evaluations = [ended(0, 8.0), ended(1, 4.0, 0), ended(2, 5.0, 1), ended(3, math.inf, 1, state="failed")]
    past = past_of([*evaluations, make_evaluation(4, state="running", params={"lr": 0.5}, inherits=1)])
    assert past.make_founder_sample().costs.tolist() == [[8.0]]
    sample = past.make_heir_sample(evaluations[1])
    assert sample.costs.tolist() == [[-0.5], [0.25], [math.inf]]
    assert sample.contexts.tolist() == [[1.0, 0.5], [0.0, 1.0], [0.0, 1.0]], "order of parents' losses, and age"
    assert sample.running_contexts.tolist() == [[0.0, 1.0]]
    assert sample.context.tolist() == [0.0, 1.0]
    assert past.ended_count == 4


def test_change_of_a_negative_loss_has_its_sign() -> None:
    past = past_of([ended(0, -0.5), ended(1, -0.6, 0), ended(2, 0.0, 0), ended(3, 0.5, 2)])
    assert past.make_heir_sample(ended(0, -0.5)).costs[:, 0] == pytest.approx([-0.2, 1.0, 0.5])


def test_parents_are_the_best_of_the_island_that_saved() -> None:
    lines = ParentPool(RATES, island=1, islands=2, uses_pbt=True)
    for trial in range(40):
        lines.add_evaluation(ended(trial, 1 - trial / 100, island=trial % 2))
    others: list[dict[str, Any]] = [{"checkpoint_step": 0}, {"imported_from": "trial 1 of x"}, {"state": "failed"}]
    for trial, values in enumerate(others, start=40):
        lines.add_evaluation(ended(trial, 0.0, island=1, **values))
    assert [parent.trial for parent in lines.parents] == list(range(39, 19, -2))


def test_lines_without_inheritance_have_no_parents() -> None:
    past = past_of([ended(0, 8.0), ended(1, 4.0, 0)], inherits=False)
    assert past.parent_pool.parents == []
    assert past.make_founder_sample().costs.tolist() == [[8.0]]


def test_new_lines_become_rare_as_parents_are_older() -> None:
    young = [ended(trial, 1.0, params={"layers": 1 + trial, "lr": 0.1}) for trial in range(4)]
    old = [ended(4 + trial, 0.5, trial, params=young[trial].params) for trial in range(4)]
    rng = random.Random(0)
    first, later = past_of(young, NETWORKS).parent_pool, past_of([*young, *old], NETWORKS).parent_pool
    share = sum(first.draw_parent(rng) is None for _ in range(1000)) / 1000
    assert share == pytest.approx(0.5, abs=0.05)
    assert sum(later.draw_parent(rng) is None for _ in range(1000)) / 1000 == pytest.approx(0.25, abs=0.05)
    assert {parent.trial for parent in map(later.draw_parent, [rng] * 100) if parent} == {4, 5, 6, 7}


@pytest.mark.parametrize("daring", [0.0, 1.0])
def test_ga_prefers_what_gains_to_what_a_good_parent_had(daring: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A high learning rate halves the loss of poor parents, a low one hardly changes that of good ones."""
    monkeypatch.setattr("hpo.breeding.surrogate._EXPLORATION_SHARE", daring)
    draws, evaluations = random.Random(0), [ended(0, 1.0), ended(1, 0.001)]
    for trial in range(2, 26):
        is_high = trial % 2 == 0
        lr = round(draws.uniform(0.8, 1.0) if is_high else draws.uniform(0.02, 0.06), 6)
        parent = evaluations[0 if is_high else 1]
        evaluations.append(ended(trial, parent.loss * (1 - lr / 2), parent.trial, params={"lr": lr}))
    population = [Individual(dict(RATES.encode(each.params)), RATES.list_gene_limits()) for each in evaluations]
    for individual, evaluation in zip(population, evaluations, strict=True):
        individual.loss = evaluation.loss
    rates = []
    for seed in range(5):
        past, rng = past_of(evaluations), random.Random(seed)
        rates.append(RATES.decode(Deduplicate(make_propagator("ga", past, rng, 1, 0), past, rng)(population))["lr"])
    assert statistics.median(map(float, rates)) > 0.5, rates


def simulate(name: str, evaluations: int, seed: int) -> list[Evaluation]:
    """Search the learning rate with one worker, where 1 is always best, and return the line of the best."""
    known: list[Evaluation] = []
    past, rng = (
        EvaluationHistory(RATES, lambda: known[-1:], parent_pool=ParentPool(RATES, uses_pbt=True)),
        random.Random(seed),
    )
    breed = Deduplicate(make_propagator(name, past, rng, 1, 0), past, rng)
    population: list[Individual] = []
    for trial in range(evaluations):
        individual = breed(population)
        params = RATES.decode(individual)
        parent = past.parent_pool.find_parent(params)
        before, inherits = (1.0, None) if parent is None else (parent.loss, parent.trial)
        individual.loss = before * (1 - float(params["lr"]) / 2)
        known.append(ended(trial, individual.loss, inherits, params=params))
        population.append(individual)
    line = [min(known, key=lambda each: each.loss)]
    while (parent_trial := line[0].inherits) is not None:
        line.insert(0, known[parent_trial])
    return line


@pytest.mark.slow
def test_ga_with_inheritance_finds_what_is_always_best() -> None:
    line = simulate("ga", 40, 0)
    assert statistics.median(float(each.params["lr"]) for each in line) > 0.9
    assert line[-1].loss < 2.0**-20, "40 halvings are possible"


def test_tpe_learns_the_place_among_evaluations_of_the_same_kind() -> None:
    past = EvaluationHistory(RATES, list, parent_pool=ParentPool(RATES, uses_pbt=True))
    parzen = TPEPropagator(past, random.Random(0))
    past.add_evaluations([ended(0, 8.0), ended(1, 4.0, 0), ended(2, 3.9, 1), ended(3, 9.0), ended(4, 1.0, 1)])
    assert [trial.value for trial in parzen._study.trials] == [0.5, 0.5, 0.75, 0.75, pytest.approx(1 / 6)]


def test_tpe_without_inheritance_leaves_out_heirs() -> None:
    past = EvaluationHistory(RATES, list)
    parzen = TPEPropagator(past, random.Random(0))
    past.add_evaluations([ended(0, 8.0), ended(1, 4.0, 0)])
    assert [trial.value for trial in parzen._study.trials] == [8.0, None]


def run_with_heirs(folder: Path, **options: Any) -> Session:
    """Leave a run of two evaluations without a parent, at 2 and 3, and of one that inherits, at 1."""
    search = SEARCHES / "heirs.py"
    session = start_session(folder, search, pbt=True, evaluations=9, **options)
    record, distributions = session.open_record(), load_search_file(search).space.make_distributions()
    for trial, (lr, loss) in enumerate([(0.1, 2.0), (0.2, 3.0), (0.3, 1.0)]):
        inherits: dict[str, Any] = {"inherits": 0} if trial == 2 else {}
        params = {"kind": 1, "lr": lr, "decays": False}
        assignment = claim_evaluation(record, params, distributions, 99, propagator="ga", **inherits)
        record.report(assignment, 1, loss)
        record.record_checkpoint(assignment, 1)
        record.complete(assignment, loss, 1.0, {})
    return session


def test_start_from_leaves_out_evaluations_that_inherit(tmp_path: Path) -> None:
    run_with_heirs(tmp_path / "before")
    session = start_session(tmp_path / "run", SEARCHES / "heirs.py", warm_start=str(tmp_path / "before"))
    assert f"with 2 evaluations of {tmp_path}/before, the best 2\n" in session.headline
    assert "without 1 evaluation with inherited weights" in session.headline
    assert [each.loss for each in session.open_record().read_evaluations()] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"confirm_seeds": 2},
            "trial 2, which inherits from trial 0, and --confirm-seeds 2 exclude each other: .*Give --confirm-seeds 0, "
            "or start another run",
        ),
        (
            {"pruner": "asha"},
            "trial 2, which inherits from trial 0, and --pruner asha exclude each other: .*Give --pruner none, or start "
            "another run",
        ),
    ],
)
def test_no_inherit_keeps_guards_of_a_run_with_heirs(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    run_with_heirs(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    resume = {"resume": True, "pbt": False}
    with pytest.raises(UsageError, match=said):
        start_session(tmp_path / "run", SEARCHES / "heirs.py", **resume, **options)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert "resumed after 3 evaluations" in start_session(tmp_path / "run", SEARCHES / "heirs.py", **resume).headline


def test_parent_without_its_state_is_skipped(tmp_path: Path) -> None:
    session = run_with_heirs(tmp_path / "run")
    states, space = CheckpointStore(session.run_dir.checkpoints), load_search_file(SEARCHES / "heirs.py").space
    heirs = InheritancePolicy(session.open_record(), space, 2, states)
    params = {"kind": 1, "lr": 0.7, "decays": False}
    assert heirs.find_parent(params, 0) is None, "all states are gone"
    states.get_path(0).parent.mkdir()
    for trial, expected in ((1, 1), (0, 0), (2, 2)):
        states.get_path(trial).touch()
        assert heirs.find_parent(params, 0) == expected
    with pytest.raises(ValueError, match="cannot be read"):
        Checkpointer(states, None).find_parent_checkpoint(2)
    assert heirs.find_parent(params, 0) == 0, "a damaged state is removed"


def test_tables_mark_evaluations_that_inherit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with_heirs(tmp_path / "run")
    summary = RunReader(tmp_path / "run").make_summary(3)
    assert [entry["inherits"] for entry in summary["top"]] == [0, None, None]
    print_tables(summary, tmp_path / "run")
    assert "from 0" in capsys.readouterr().out


def test_expected_losses_leave_out_heirs() -> None:
    draws = np.random.default_rng(0)
    rates = np.exp(draws.uniform(math.log(0.01), 0, 60)).round(6).tolist()
    plain = [ended(trial, 1 + abs(math.log(lr)), params={"lr": lr}) for trial, lr in enumerate(rates)]
    heirs = [replace(each, trial=60 + each.trial, loss=each.loss / 100, inherits=each.trial) for each in plain]
    alone = compute_expected_losses(plain, RATES)
    assert len(alone) == 60
    assert compute_expected_losses([*plain, *heirs], RATES) == alone
