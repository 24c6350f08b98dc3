"""Parameters that exist only beside others, and rules between parameters."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import time
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation import SimulatedIslands, simulate
from hpo import Categorical, Float, Int, Ordinal, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.propagator_names import NUMERIC_PROPAGATORS, PROPAGATORS
from hpo.breeding.surrogate import Surrogate
from hpo.parameters import Parameter
from hpo.problem import RemoteConstraints, dump_space, load_space
from hpo.store.evaluations import Evaluation
from hpo.trainer.constraint_server import answer_constraint_request
from tests.searches.conditional import space as CONDITIONAL
from tests.support.in_process_template import send_through_json
from tests.support.launch import PROGRAM, SEARCHES, Mpi, run_hpo
from tests.support.run_output import find_complete_losses, load_trials

SPACE = SearchSpace(
    optimizer=Categorical("sgd", "adam"),
    momentum=Float(0.0, 0.99, when={"optimizer": "sgd"}),
    nesterov=Categorical(True, False, when={"optimizer": "sgd"}),
    warm=Int(1, 3, when={"nesterov": True}),
    layers=Int(1, 3),
    second=Int(1, 2, when={"layers": range(2, 4)}),
    both=Int(1, 2, when={"layers": [3], "optimizer": "adam"}),
)
TOSSES = itertools.cycle([True, False, False])
GENES = {"optimizer": 0, "momentum": 0.5, "nesterov": 0, "warm": 2, "layers": 1, "second": 2, "both": 1}


@pytest.mark.parametrize(
    ("changes", "exist"),
    [
        ({}, "optimizer momentum nesterov warm layers"),
        ({"nesterov": 1}, "optimizer momentum nesterov layers"),
        ({"optimizer": 1}, "optimizer layers"),
        ({"optimizer": 1, "layers": 2}, "optimizer layers second"),
        ({"optimizer": 1, "layers": 3}, "optimizer layers second both"),
        ({"layers": 3}, "optimizer momentum nesterov warm layers second"),
    ],
)
def test_hyperparameters_are_those_that_exist(changes: dict[str, int], exist: str) -> None:
    params = SPACE.decode({**GENES, **changes})
    assert list(params) == exist.split()
    genes = SPACE.encode(params)
    assert list(genes) == list(SPACE.parameters), "there is a gene of each parameter"
    assert SPACE.decode(genes) == params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"optimizer": "adam", "momentum": 0.5, "layers": 1}, "'momentum' exists only where 'optimizer' is 'sgd'"),
        ({"optimizer": "adam", "layers": 1, "second": 1}, "'second' exists only where 'layers' is 2 or 3"),
        ({"optimizer": "adam", "layers": 2}, "parameter 'second' is missing"),
        ({"optimizer": "sgd", "momentum": 0.5, "nesterov": False, "warm": 1, "layers": 1}, "'nesterov' is True"),
        ({"layers": 1}, "parameter 'optimizer' is missing"),
    ],
)
def test_what_does_not_exist_is_refused_and_what_exists_is_needed(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SPACE.check(params)


@pytest.mark.parametrize(
    ("before", "when", "message"),
    [
        ({}, {"a": 1}, "when asks for 'a', which must be one before it; it is the first"),
        ({"b": Int(1, 3)}, {"a": 1}, "when asks for 'a', which must be one before it; before it are b"),
        ({"b": Int(1, 3)}, {"b": 4}, "when asks for 'b' = 4, not in Int(1, 3)"),
        ({"b": Int(1, 3)}, {"b": [1, "2"]}, "when asks for 'b' = '2', not in Int(1, 3)"),
        ({"b": Int(1, 3)}, {"b": True}, "when asks for 'b' = True, not in Int(1, 3)"),
        ({"b": Int(1, 3)}, {"b": []}, "when asks for 'b' = [], not in Int(1, 3)"),
        ({"b": Int(1, 3)}, {}, "when must be a dict such as {'optimizer': 'sgd'}, not {}"),
        ({"b": Int(1, 3)}, "b", "when must be a dict such as {'optimizer': 'sgd'}, not 'b'"),
        ({"b": Int(1, 3)}, {"b": np.int64(4)}, "when asks for 'b' = 4, not in Int(1, 3)"),
        ({"b": Int(1, 10**9)}, {"b": range(1, 10**9)}, "when asks for 999999999 values of 'b', too many"),
        ({"b": Float(0, 3)}, {"b": 1.0}, "when asks for 'b', which has any value of Float(0.0, 3.0)"),
    ],
)
def test_a_condition_that_cannot_be_is_named(before: dict[str, Parameter], when: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"parameter 'lr': {message}")):
        SearchSpace(**before, lr=Float(0.1, 1.0, when=when), a=Int(1, 3))


def test_conditions_are_told_and_the_same_in_each_process() -> None:
    described = CONDITIONAL.describe()
    assert described["momentum"] == "Float(0.0, 0.95, step=0.05, when={'optimizer': 'sgd'})"
    assert described["dropout_3"] == "Float(0.0, 0.5, when={'layers': range(3, 5)})"
    names = {"".join(letters) for letters in itertools.permutations("abc")}
    space = SearchSpace(a=Categorical(*sorted(names)), b=Int(1, 2, when={"a": names}))
    assert space.describe()["b"] == f"Int(1, 2, when={{'a': {sorted(names)!r}}})", "a set has no order"
    numbers = {"a": np.int64(2), "b": np.array([1, 3]), "c": {0.5}.union([1.5])}
    parameter = Ordinal(1, 2, when=MappingProxyType(numbers))
    assert repr(parameter) == "Ordinal(1, 2, when={'a': 2, 'b': [1, 3], 'c': [0.5, 1.5]})"
    space = SearchSpace(a=Int(1, 3), b=Int(1, 3), c=Float(0.5, 2.5, step=1), d=parameter)
    assert len(space.all_individuals or []) == 3 * 3 * 3 + 1 * 2 * 2


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_genes_tell_what_exists(draws: list[float]) -> None:
    past = EvaluationHistory(SPACE, list)
    width = past.high - past.low
    genes = past.low + np.where(past.continuous, np.array(draws) * width, np.round(np.array(draws) * width))
    params = SPACE.decode(dict(zip(SPACE.parameters, genes.tolist(), strict=True)))
    told = [name for name, exists in zip(SPACE.parameters, past.find_active(genes[None])[0], strict=True) if exists]
    assert told == list(params)


def test_what_a_logarithmic_integer_decides_exists_too() -> None:
    space = SearchSpace(a=Int(1, 1000, log=True), b=Int(1, 2, when={"a": range(500, 600)}))
    past = EvaluationHistory(space, list)
    for a in (1, 499, 500, 599, 600, 1000):
        genes = past.round_genes(np.array([[math.log(a + 0.4), 1.0]]))
        assert past.find_active(genes).tolist() == [[True, 500 <= a < 600]]
        assert space.decode({"a": genes[0, 0], "b": 1})["a"] == a


def test_all_individuals_are_counted_and_listed_once() -> None:
    space = SearchSpace(
        a=Categorical("x", "y", "z"),
        b=Int(1, 5, when={"a": "x"}),
        c=Ordinal(1, 2, 4, when={"b": [1, 2]}),
        d=Int(10, 30, step=10, when={"a": ["x", "y"]}),
    )
    everything = space.all_individuals or []
    assert len(everything) == (2 * 3 + 3) * 3 + 3 + 1
    assert len({tuple(params.items()) for params in everything}) == len(everything)
    for params in everything:
        space.check(params)
    space = SearchSpace(**space.parameters)
    space.require(lambda p: p["b"] != p["c"], "b and c differ")
    assert len(space.all_individuals or []) == (2 * 3 + 3 - 2) * 3 + 3 + 1


@pytest.mark.parametrize(
    "parameters",
    [
        {"a": Int(1, 2), "b": Float(0, 1, when={"a": 1})},
        {"a": Int(0, 2**53), "b": Int(1, 2, when={"a": 2**53})},
        {"a": Int(1, 2), **{f"p{number}": Int(0, 1) for number in range(60)}},
        {"a": Int(1, 500), **{f"p{number}": Int(1, 500, when={"a": range(1, 500)}) for number in range(50)}},
    ],
)
def test_what_cannot_be_listed_is_known_to_be_much(parameters: dict[str, Parameter]) -> None:
    space = SearchSpace(**parameters)
    assert space.all_individuals is None
    space = SearchSpace(**parameters)
    space.require(lambda p: p["a"] % 2 == 0, "a is even")
    space.check_constraints()
    assert space.all_individuals is None
    assert EvaluationHistory(space, list).draw_new(random.Random(0)) is not None


def test_listing_ends_where_a_rule_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def obeys(params: dict[str, Any]) -> bool:
        time.sleep(0.01)
        return bool(params["a"] <= params["b"])

    space = SearchSpace(a=Int(1, 10), b=Int(1, 10))
    space.require(obeys, "a is at most b")
    monkeypatch.setattr("hpo.space._MOST_SECONDS", 0.1)
    assert space.all_individuals is None


def test_everything_is_drawn_and_nothing_else() -> None:
    space = SearchSpace(a=Categorical("x", "y"), b=Int(1, 3, when={"a": "x"}), c=Float(0.0, 0.2, step=0.1))
    space.require(lambda p: p["b"] > 1, "b is larger")
    rng = random.Random(0)
    drawn = {tuple(space.draw(rng).items()) for _ in range(500)}
    assert drawn == {tuple(params.items()) for params in space.all_individuals or ()}
    assert {params["b"] for params in (space.draw(rng, {"c": 0.1, "a": "x"}) for _ in range(50))} == {2, 3}
    for _ in range(20):
        assert space.draw(rng, {"b": 3})["a"] == "x", "where that is given which needs it"
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"a": "y", "b": 2}, "'b' exists only where 'a' is 'x'"),
        ({"b": 1}, "b is larger, but got {'a': 'x', 'b': 1, "),
        ({"d": 1}, "unknown parameter 'd'"),
        ({"c": 0.15}, "0.15 is not in Float(0.0, 0.2, step=0.1)"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=re.escape(message)):
            space.draw(rng, wrong)


class Elsewhere:
    """Answers for the rules of a space as a trainer does, through JSON; `batches` are the sizes of its answers."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self.batches: list[int] = []
        self.checks = 0

    def __call__(self, **content: Any) -> dict[str, Any]:
        """Answer a request."""
        file: Any = SimpleNamespace(space=self._space)
        answered = dict(send_through_json(answer_constraint_request(file, send_through_json(content))))
        if "violated" in answered:
            self.batches.append(len(answered["violated"]))
        self.checks += "problem" in answered
        return answered


def delegated(space: SearchSpace) -> tuple[SearchSpace, Elsewhere]:
    """Return a space as a rank has it, and what answers for its rules."""
    elsewhere = Elsewhere(space)
    return load_space(send_through_json(dump_space(space)), RemoteConstraints(elsewhere)), elsewhere


@pytest.mark.parametrize("space", [SPACE, CONDITIONAL])
def test_delegated_space_is_as_its_own(space: SearchSpace) -> None:
    there, _ = delegated(space)
    assert (there.describe(), there.conditions, there.constraint_texts) == (
        space.describe(),
        space.conditions,
        space.constraint_texts,
    )
    drawn = [space.draw(rng) for rng in map(random.Random, range(200))]
    assert [there.draw(rng) for rng in map(random.Random, range(200))] == drawn
    wrong = [{**params, "width": 16, "heads": 3, "nesterov_from": 7} for params in drawn]
    assert there.find_mistakes([*drawn, *wrong]) == space.find_mistakes([*drawn, *wrong])
    assert there.are_allowed(wrong) == space.are_allowed(wrong) == [there.allows(params) for params in wrong]
    there.check_constraints()
    with pytest.raises(ValueError, match="unknown parameter 'e'"):
        there.draw(random.Random(0), {"e": 3})


def test_delegated_rules_are_asked_in_few_batches() -> None:
    space, asked = delegated(CONDITIONAL)
    space.check_constraints()
    assert (asked.checks, asked.batches) == (1, [])
    space.draw(random.Random(0), {"width": 240, "heads": 15})
    assert asked.batches == [1]
    drawn = [params for _, params in zip(range(2500), space.iterate_draws(random.Random(0)), strict=False)]
    asked.batches.clear()
    assert set(space.find_mistakes(drawn)) == {""}
    assert asked.batches == [1000, 1000, 500]
    asked.batches.clear()
    assert space.are_allowed([]) == []
    assert space.find_mistakes([{}]) == ["parameter 'optimizer' is missing"]
    assert asked.batches == []
    rare, asked = delegated(ruled(lambda p: p["a"] > 5))
    with pytest.raises(ValueError, match=r"the rule, but got \{'a': 3, "):
        rare.draw(random.Random(0), {"a": 3})
    assert max(asked.batches) == 64
    assert 100_000 <= sum(asked.batches) < 100_064


def test_space_without_rules_asks_nothing_and_draws_one_by_one() -> None:
    def never(**_: Any) -> dict[str, Any]:
        raise AssertionError

    space = load_space(send_through_json(dump_space(SPACE)), RemoteConstraints(never))
    space.check_constraints()
    assert space.all_individuals is None
    past, rng, other = EvaluationHistory(space, list), random.Random(0), random.Random(0)
    assert past.draw_new(rng) == SPACE._draw_unconstrained(other)
    assert space.draw(rng, {"layers": 2}) == SPACE._draw_unconstrained(other, {"layers": 2})
    assert rng.getstate() == other.getstate(), "no more is drawn than today"
    genes = np.array([list(SPACE.encode(SPACE.draw(rng)).values()) for _ in range(9)])
    assert list(past.iterate_allowed(genes, range(9))) == list(range(9))


def test_delegated_space_lists_everything() -> None:
    space = SearchSpace(a=Int(1, 60), b=Int(1, 60), c=Int(1, 3, when={"a": [1, 2]}))
    space.require(lambda p: p["a"] <= p["b"], "a is at most b")
    there, asked = delegated(space)
    assert there.all_individuals == space.all_individuals
    assert len(there.all_individuals or []) == 60 * 61 // 2 + 2 * (60 + 59)
    assert asked.batches == [*(2**n for n in range(10)), 1000, 1000, 58 * 60 + 2 * 60 * 3 - 3023]


def test_space_without_constraints_cannot_be_asked() -> None:
    space = load_space(dump_space(CONDITIONAL))
    assert space.decode(space.encode(CONDITIONAL.draw(random.Random(0))))
    for ask in (
        space.check_constraints,
        lambda: space.draw(random.Random(0)),
        lambda: space.all_individuals or space.allows({}),
    ):
        with pytest.raises(RuntimeError, match="no process answers for the rules"):
            ask()


@pytest.mark.parametrize("name", ["ga", "tpe", "random"])
def test_propagators_breed_the_same_if_rules_are_asked_elsewhere(name: str) -> None:
    def breed(space: SearchSpace) -> list[dict[str, Any]]:
        started = []

        def evaluate(params: dict[str, Any]) -> tuple[float, float]:
            started.append(params)
            return abs(params["width"] - 96) + params["layers"], 1.0

        simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 40)
        return started

    space, asked = delegated(CONDITIONAL)
    assert breed(space) == breed(CONDITIONAL)
    assert max(asked.batches) <= 64
    assert len(asked.batches) < 40 * 30


def ruled(rule: Any, text: Any = "the rule") -> SearchSpace:
    space = SearchSpace(
        a=Int(1, 5), b=Int(1, 5), o=Categorical("x", "y"), c=Int(1, 3, when={"o": "x"}), d=Int(1, 3, when={"o": "y"})
    )
    space.require(rule, text)
    return space


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda p: p["a"] % p["b"], r"must return True or False, not \d for {'a': "),
        (lambda p: p["a"] < p["e"], "cannot be asked about {'a': .*: there is no parameter 'e'"),
        (
            lambda p: p["c"] < p["d"],
            "never applies: it looks up parameters that did not exist together in any of 10000",
        ),
        (lambda p: p.a < 3, "AttributeError"),
        (lambda p: 1 / (p["a"] - 1) > 0, "cannot be asked about {'a': 1, .*ZeroDivisionError"),
        (lambda: True, "TypeError"),
        (lambda p: np.array([p["a"], p["b"]]) > 1, "must return True or False, not array"),
        (lambda p: p["a"] < 0 or next(TOSSES), "does not always answer the same"),
        (
            lambda p: p["a"] > 5,
            r"leave nothing: of 10000 individuals drawn at random 0 obey all of them \('the rule' 0\)",
        ),
        (lambda p: (p["a"], p["b"], p.get("c")) == (1, 1, 4), "leave nothing"),
    ],
)
def test_a_rule_that_cannot_be_is_named(rule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ruled(rule).check_constraints()
    with pytest.raises(ValueError, match=message):
        delegated(ruled(rule))[0].check_constraints()


def test_rules_that_leave_next_to_nothing_are_named_with_what_each_leaves() -> None:
    space = SearchSpace(**{name: Int(1, 100) for name in "abc"})
    space.require(lambda p: p["a"] == p["b"], "a is b")
    space.require(lambda p: p["b"] == p["c"], "b is c")
    with pytest.raises(ValueError, match=r"leave next to nothing: .* [1-9] obey .*\('a is b' \d+, 'b is c' \d+\)"):
        space.check_constraints()


def test_rules_demand_nothing_of_what_does_not_exist_and_may_do_what_they_like() -> None:
    for rule in (
        lambda p: p["a"] < p["c"],
        lambda p: np.bool_(p["a"] < 3),
        lambda p: p.pop("a") < 4 and p.pop("b") < 4,
    ):
        ruled(rule).check_constraints()
    space = ruled(lambda p: p["c"] > 2, "c is large")
    space.check({"a": 1, "b": 1, "o": "y", "d": 1})
    with pytest.raises(ValueError, match="c is large, but got"):
        space.check({"a": 1, "b": 1, "o": "x", "c": 1})
    for function, text in (("a < b", "x"), (bool, None)):
        with pytest.raises(TypeError, match="a rule is a function"):
            ruled(function, text)


@pytest.mark.parametrize("name", PROPAGATORS)
def test_propagators_obey_rules_and_breed_nothing_twice(name: str) -> None:
    space = CONDITIONAL
    if name in NUMERIC_PROPAGATORS:
        space = SearchSpace(
            layers=Int(1, 3),
            width=Int(8, 64, step=8),
            heads=Int(1, 8, log=True),
            rate=Ordinal(0.1, 0.2, 0.4),
            dropout=Float(0.0, 0.5, when={"layers": [2, 3]}),
        )
        space.require(lambda p: p["width"] % p["heads"] == 0, "heads must divide width")
    started = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        space.check(params)
        started.append(params)
        return float(sum(value for value in params.values() if type(value) is float)) + params["width"] / 100, 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 60)
    assert len({tuple(sorted(params.items())) for params in started}) == 60
    assert len({params["layers"] for params in started}) >= 2


@pytest.mark.parametrize("name", PROPAGATORS)
def test_what_has_one_value_is_no_obstacle(name: str) -> None:
    space = SearchSpace(batch_size=Ordinal(64), lr=Float(1e-3, 1.0, log=True), heads=Ordinal(2, 4))
    started: list[float] = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        started.append(float(params["lr"]))
        return abs(math.log(params["lr"] / 0.03)), 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 50)
    assert len(set(started)) > 25


@pytest.mark.parametrize("name", ["ga", "tpe", "random"])
def test_few_individuals_that_rules_leave_among_many_are_all_found(name: str) -> None:
    space = SearchSpace(a=Int(1, 250), b=Int(1, 150), kind=Categorical("x", "y", when={"a": [7, 8]}))
    space.require(lambda p: p["a"] == p["b"] and p["a"] < 50, "a is b, and small")
    space.check_constraints()
    started = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        started.append(tuple(params.values()))
        return abs(params["a"] - 7.0), 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 51)
    assert len(set(started)) == 51 == len(space.all_individuals or [])


def test_the_surrogate_sees_no_genes_of_what_does_not_exist() -> None:
    space = SearchSpace(
        kind=Categorical("a", "b"), x=Float(0.0, 1.0), y=Float(0.0, 1.0, when={"kind": "a"}), z=Ordinal(1, 2, 3)
    )
    rng = random.Random(0)
    news = []
    for trial in range(40):
        params = space.draw(rng)
        loss = float(params["x"]) + (10 * abs(float(params["y"]) - 0.2) if "y" in params else 1.0)
        news.append(Evaluation(trial, "complete", loss, params, 0, 0, trial))
    past = EvaluationHistory(space, lambda: news)
    past.update()
    merits_of = Surrogate(past, np.random.default_rng(0)).learn(past.make_founder_sample())
    off = merits_of(np.array([[1, 0.31, y, 1] for y in (0.0, 0.2, 0.7)]))
    on = merits_of(np.array([[0, 0.31, y, 1] for y in (0.0, 0.2, 0.7)]))
    assert off == pytest.approx(off[0])
    assert np.ptp(on) > 1


def test_a_conditional_space_is_searched_resumed_and_told_of(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [PROGRAM, SEARCHES / "conditional.py", "--run-dir", "run", "--ranks-per-worker", 1, "--seed", 3]
    given: list[dict[str, Any]] = [
        {"momentum": 0.8, "layers": 3},
        {"batch_size": 64.0, "beta": 0.95},
        {"nesterov_from": 7},
    ]
    (tmp_path / "given.json").write_text(json.dumps(given))
    first = mpi.run(3, *arguments, "--evaluations", 25, "--enqueue", "given.json", cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    again = mpi.run(2, *arguments, "--evaluations", 60, "--resume", cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert len(trials) == 60
    for trial in trials:
        CONDITIONAL.check(trial.params)
        assert trial.distributions.keys() == trial.params.keys()
    for number, entry in enumerate(given):
        assert entry.items() <= trials[number].params.items()
    assert len({tuple(sorted(trial.params.items())) for trial in trials}) == 60
    lowest = min(trials, key=lambda trial: trial.value or 0)
    assert lowest.number > 25, "it learns"

    told = run_hpo("best", tmp_path / "run")
    assert json.loads(told.stdout) == lowest.params
    rows = list(csv.DictReader(run_hpo("export", tmp_path / "run", "--to", "csv").stdout.splitlines()))
    for row, trial in zip(rows, trials, strict=True):
        empty = {name for name in CONDITIONAL.parameters if row[f"param_{name}"] == ""}
        assert empty == CONDITIONAL.parameters.keys() - trial.params.keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "A line has a gap if a hyperparameter is inactive." in page
    assert all(f'<th scope="row">{name}</th>' in page for name in CONDITIONAL.parameters), "importances"

    text = (SEARCHES / "conditional.py").read_text()
    (tmp_path / "stricter.py").write_text(text + '\nspace.require(lambda p: p["optimizer"] == "sgd", "only sgd")\n')
    stricter = [PROGRAM, "stricter.py", "--ranks-per-worker", 1, "--evaluations", 61]
    refused = mpi.run(2, *stricter, "--run-dir", "run", "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert re.search(
        r": only sgd, but got .*; if this rule is new, start another run with --warm-start run$", refused.stderr
    )
    new = mpi.run(2, *stricter, "--run-dir", "new", "--evaluations", 2, "--warm-start", "run", cwd=tmp_path)
    assert (new.returncode, new.stderr) == (0, "")
    taken = [trial for trial in load_trials(tmp_path / "new") if "imported_from" in trial.user_attrs]
    assert len(taken) == sum(trial.params["optimizer"] == "sgd" for trial in trials)


def test_rules_that_leave_nothing_are_found_before_anything_starts(mpi: Mpi, tmp_path: Path) -> None:
    text = (SEARCHES / "conditional.py").read_text()
    (tmp_path / "nothing.py").write_text(text + '\nspace.require(lambda p: p["width"] < 16, "width is small")\n')
    job = mpi.run(2, PROGRAM, "nothing.py", "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 2
    assert job.stderr.startswith("error: the rules of this space leave nothing: of 10000 individuals")
    assert "'width is small' 0" in job.stderr
    assert not (tmp_path / "run").exists()


CRASHING = """
import os
from pathlib import Path
from hpo import Int, SearchSpace

space = SearchSpace(a=Int(1, 9), b=Int(1, 9))
begun = Path("begun")


def differ(params):
    count = len(begun.read_text()) if begun.exists() else 0
    if count >= 4 or (count == 2 and not Path("crashed").exists()):
        Path("crashed").touch()
        os.kill(os.getpid(), 11)
    return params["a"] != params["b"]


def objective(params, worker):
    with begun.open("a") as file:
        file.write("x")
    return params["a"]


space.require(differ, "a differs from b")
"""


def test_rule_that_crashes_at_the_start_is_a_mistake(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "begun").write_text("xxxx")
    (tmp_path / "my_search.py").write_text(CRASHING)
    job = mpi.run(2, PROGRAM, "my_search.py", "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr.startswith(
        "error: the constraints of the search space cannot be evaluated: the trainer was ended by SIGSEGV"
    )
    assert job.stderr.count("error:") == 1
    assert not (tmp_path / "run").exists()


def test_rule_that_crashes_again_ends_the_run(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my_search.py").write_text(CRASHING)
    options = ["--ranks-per-worker", 1, "--run-dir", "run", "--evaluations", 9]
    job = mpi.run(1, PROGRAM, "my_search.py", *options, cwd=tmp_path)
    assert job.returncode == 1
    assert re.findall("^error: .*", job.stderr, re.MULTILINE) == [
        "error: the constraints of the search space cannot be evaluated: the trainer was ended by SIGSEGV"
    ]
    assert len(find_complete_losses(load_trials(tmp_path / "run"))) == 4, "it was asked again after its first crash"
