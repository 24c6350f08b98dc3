"""Test conditional parameters, and constraints between parameters."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo import Categorical, Float, Int, Ordinal, SearchSpace
from hpo.breeding.encoding import GeneEncoding
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.surrogate import Surrogate
from hpo.options import NUMERIC_PROPAGATORS, PROPAGATORS
from hpo.problem import RemoteConstraints, dump_space, load_space
from hpo.space import Parameter, search_space
from hpo.store.evaluations import Evaluation
from hpo.trainer.search_file import answer_constraint_request
from tests.searches.conditional import space as CONDITIONAL
from tests.support.in_process_template import send_through_json
from tests.support.limits import scale
from tests.support.simulation import SimulatedIslands, simulate

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
GENES = {
    "optimizer": 0,
    "momentum": 0.5,
    "nesterov": 0,
    "warm": 2,
    "layers": 1,
    "second": 2,
    "both": 1,
}


@pytest.mark.parametrize(
    ("changes", "active"),
    [
        ({}, "optimizer momentum nesterov warm layers"),
        ({"nesterov": 1}, "optimizer momentum nesterov layers"),
        ({"optimizer": 1}, "optimizer layers"),
        ({"optimizer": 1, "layers": 2}, "optimizer layers second"),
        ({"optimizer": 1, "layers": 3}, "optimizer layers second both"),
        ({"layers": 3}, "optimizer momentum nesterov warm layers second"),
    ],
)
def test_decode_returns_active_parameters(changes: dict[str, int], active: str) -> None:
    params = SPACE.decode({**GENES, **changes})
    assert list(params) == active.split()
    genes = SPACE.encode(params)
    assert list(genes) == list(SPACE.parameters), "each parameter has a gene"
    assert SPACE.decode(genes) == params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"optimizer": "adam", "momentum": 0.5, "layers": 1},
            "'momentum' is active only if 'optimizer' is 'sgd'",
        ),
        (
            {"optimizer": "adam", "layers": 1, "second": 1},
            "'second' is active only if 'layers' is 2 or 3",
        ),
        ({"optimizer": "adam", "layers": 2}, "parameter 'second' is missing"),
        (
            {"optimizer": "sgd", "momentum": 0.5, "nesterov": False, "warm": 1, "layers": 1},
            "'nesterov' is True",
        ),
        ({"layers": 1}, "parameter 'optimizer' is missing"),
    ],
)
def test_check_inactive_or_missing_parameter_raises(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SPACE.check(params)


@pytest.mark.parametrize(
    ("before", "when", "message"),
    [
        ({}, {"a": 1}, "when must name parameters before it in the space (none), got 'a'"),
        (
            {"b": Int(1, 3)},
            {"a": 1},
            "when must name parameters before it in the space (b), got 'a'",
        ),
        ({"b": Int(1, 3)}, {"b": 4}, "when must list values of 'b' in Int(1, 3), got 4"),
        ({"b": Int(1, 3)}, {"b": [1, "2"]}, "when must list values of 'b' in Int(1, 3), got '2'"),
        ({"b": Int(1, 3)}, {"b": True}, "when must list values of 'b' in Int(1, 3), got True"),
        ({"b": Int(1, 3)}, {"b": []}, "when must list values of 'b' in Int(1, 3), got []"),
        ({"b": Int(1, 3)}, {}, "when must be a dict such as {'optimizer': 'sgd'}, got {}"),
        ({"b": Int(1, 3)}, "b", "when must be a dict such as {'optimizer': 'sgd'}, got 'b'"),
        ({"b": Int(1, 3)}, {"b": np.int64(4)}, "when must list values of 'b' in Int(1, 3), got 4"),
        (
            {"b": Int(1, 10**9)},
            {"b": range(1, 10**9)},
            "when must list at most 10000 values of 'b', got 999999999",
        ),
        (
            {"b": Float(0, 3)},
            {"b": 1.0},
            "when must name parameters with discrete values, got 'b', which is Float(0.0, 3.0)",
        ),
    ],
)
def test_space_with_invalid_condition_raises(
    before: dict[str, Parameter], when: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"parameter 'lr': {message}")):
        SearchSpace(**before, lr=Float(0.1, 1.0, when=when), a=Int(1, 3))


def test_describe_formats_conditions_in_a_fixed_order() -> None:
    described = CONDITIONAL.describe()
    assert described["momentum"] == "Float(0.0, 0.95, step=0.05, when={'optimizer': 'sgd'})"
    assert described["dropout_3"] == "Float(0.0, 0.5, when={'layers': range(3, 5)})"
    names = {"".join(letters) for letters in itertools.permutations("abc")}
    space = SearchSpace(a=Categorical(*sorted(names)), b=Int(1, 2, when={"a": names}))
    assert space.describe()["b"] == f"Int(1, 2, when={{'a': {sorted(names)!r}}})", (
        "a set has no order"
    )
    numbers = {"a": np.int64(2), "b": np.array([1, 3]), "c": {0.5}.union([1.5])}
    parameter = Ordinal(1, 2, when=MappingProxyType(numbers))
    assert repr(parameter) == "Ordinal(1, 2, when={'a': 2, 'b': [1, 3], 'c': [0.5, 1.5]})"
    space = SearchSpace(a=Int(1, 3), b=Int(1, 3), c=Float(0.5, 2.5, step=1), d=parameter)
    assert len(space.all_individuals or []) == 3 * 3 * 3 + 1 * 2 * 2


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_find_active_agrees_with_decode(draws: list[float]) -> None:
    encoding = GeneEncoding(SPACE)
    distances = np.array(draws) * (encoding.high - encoding.low)
    genes = encoding.low + np.where(encoding.continuous, distances, np.round(distances))
    params = SPACE.decode(dict(zip(SPACE.parameters, genes.tolist(), strict=True)))
    is_active = encoding.find_active(genes[None])[0]
    active = [name for name, flag in zip(SPACE.parameters, is_active, strict=True) if flag]
    assert active == list(params)


def test_find_active_with_log_int_parent_agrees_with_decode() -> None:
    space = SearchSpace(a=Int(1, 1000, log=True), b=Int(1, 2, when={"a": range(500, 600)}))
    encoding = GeneEncoding(space)
    for a in (1, 499, 500, 599, 600, 1000):
        genes = encoding.round_genes(np.array([[math.log(a + 0.4), 1.0]]))
        assert encoding.find_active(genes).tolist() == [[True, 500 <= a < 600]]
        assert space.decode({"a": genes[0, 0], "b": 1})["a"] == a


def test_all_individuals_lists_each_individual_once() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"a": Int(1, 2), "b": Float(0, 1, when={"a": 1})},
        {"a": Int(0, 2**53), "b": Int(1, 2, when={"a": 2**53})},
        {"a": Int(1, 2), **{f"p{number}": Int(0, 1) for number in range(60)}},
        {
            "a": Int(1, 500),
            **{f"p{number}": Int(1, 500, when={"a": range(1, 500)}) for number in range(50)},
        },
    ],
)
def test_all_individuals_of_large_space_is_none(parameters: dict[str, Parameter]) -> None:
    space = SearchSpace(**parameters)
    assert space.all_individuals is None
    space = SearchSpace(**parameters)
    space.require(lambda p: p["a"] % 2 == 0, "a is even")
    space.check_constraints()
    assert space.all_individuals is None
    assert EvaluationHistory(space).draw_new(random.Random(0)) is not None


def test_all_individuals_with_slow_constraint_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_allowed(params: dict[str, Any]) -> bool:
        time.sleep(0.01)
        return bool(params["a"] <= params["b"])

    space = SearchSpace(a=Int(1, 10), b=Int(1, 10))
    space.require(is_allowed, "a is at most b")
    monkeypatch.setattr("hpo.space.search_space._MOST_SECONDS", 0.1)
    assert space.all_individuals is None


def test_draw_returns_all_allowed_individuals_and_no_others() -> None:
    space = SearchSpace(
        a=Categorical("x", "y"), b=Int(1, 3, when={"a": "x"}), c=Float(0.0, 0.2, step=0.1)
    )
    space.require(lambda p: p["b"] > 1, "b is larger")
    rng = random.Random(0)
    drawn = {tuple(space.draw(rng).items()) for _ in range(500)}
    assert drawn == {tuple(params.items()) for params in space.all_individuals or ()}
    assert {
        params["b"] for params in (space.draw(rng, {"c": 0.1, "a": "x"}) for _ in range(50))
    } == {2, 3}
    for _ in range(20):
        assert space.draw(rng, {"b": 3})["a"] == "x", "the condition of b holds"
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"a": "y", "b": 2}, "'b' is active only if 'a' is 'x'"),
        ({"b": 1}, "b is larger, got {'a': 'x', 'b': 1, "),
        ({"d": 1}, "unknown parameter 'd'"),
        ({"c": 0.15}, "'c' must be in Float(0.0, 0.2, step=0.1), got 0.15"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=re.escape(message)):
            space.draw(rng, wrong)


class ConstraintServerStub:
    """Checks constraints as a trainer does for its rank, through JSON.

    `batches` lists the number of individuals in each request that it answered.
    """

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self.batches: list[int] = []
        self.checks = 0

    def __call__(self, **content: Any) -> dict[str, Any]:
        """Answer a request of a rank."""
        answered = dict(
            send_through_json(answer_constraint_request(self._space, send_through_json(content)))
        )
        if "violated" in answered:
            self.batches.append(len(answered["violated"]))
        self.checks += "problem" in answered
        return answered


def delegate(space: SearchSpace) -> tuple[SearchSpace, ConstraintServerStub]:
    """Return the space as a rank has it, and the stub that checks its constraints."""
    server = ConstraintServerStub(space)
    return load_space(send_through_json(dump_space(space)), RemoteConstraints(server)), server


@pytest.mark.parametrize("space", [SPACE, CONDITIONAL])
def test_delegated_space_behaves_like_the_local_space(space: SearchSpace) -> None:
    remote, _ = delegate(space)
    assert (remote.describe(), remote.conditions, remote.constraint_texts) == (
        space.describe(),
        space.conditions,
        space.constraint_texts,
    )
    drawn = [space.draw(rng) for rng in map(random.Random, range(200))]
    assert [remote.draw(rng) for rng in map(random.Random, range(200))] == drawn
    wrong = [{**params, "width": 16, "heads": 3, "nesterov_from": 7} for params in drawn]
    assert remote.find_mistakes([*drawn, *wrong]) == space.find_mistakes([*drawn, *wrong])
    assert (
        remote.are_allowed(wrong)
        == space.are_allowed(wrong)
        == [remote.allows(params) for params in wrong]
    )
    remote.check_constraints()
    with pytest.raises(ValueError, match="unknown parameter 'e'"):
        remote.draw(random.Random(0), {"e": 3})


def test_delegated_constraints_are_checked_in_few_batches() -> None:
    space, asked = delegate(CONDITIONAL)
    space.check_constraints()
    assert (asked.checks, asked.batches) == (1, [])
    space.draw(random.Random(0), {"width": 240, "heads": 15})
    assert asked.batches == [1]
    drawn = [
        params
        for _, params in zip(range(2500), space.iterate_draws(random.Random(0)), strict=False)
    ]
    asked.batches.clear()
    assert set(space.find_mistakes(drawn)) == {""}
    assert asked.batches == [1000, 1000, 500]
    asked.batches.clear()
    assert space.are_allowed([]) == []
    assert space.find_mistakes([{}]) == ["parameter 'optimizer' is missing"]
    assert asked.batches == []
    rare, asked = delegate(make_constrained_space(lambda p: p["a"] > 5))
    with pytest.raises(ValueError, match=r"the constraint, got \{'a': 3, "):
        rare.draw(random.Random(0), {"a": 3})
    assert max(asked.batches) == 64
    assert 100_000 <= sum(asked.batches) < 100_064


def test_space_without_constraints_sends_no_requests() -> None:
    def never(**_: Any) -> dict[str, Any]:
        raise AssertionError

    space = load_space(send_through_json(dump_space(SPACE)), RemoteConstraints(never))
    space.check_constraints()
    assert space.all_individuals is None
    past = EvaluationHistory(space)
    rng, other = random.Random(0), random.Random(0)
    assert past.draw_new(rng) == SPACE._draw_unconstrained(other)
    assert space.draw(rng, {"layers": 2}) == SPACE._draw_unconstrained(other, {"layers": 2})
    assert rng.getstate() == other.getstate(), "The generator is used once per draw."
    genes = np.array([list(SPACE.encode(SPACE.draw(rng)).values()) for _ in range(9)])
    assert list(past.encoding.iterate_allowed(genes, range(9))) == list(range(9))


def test_delegated_space_lists_all_individuals() -> None:
    space = SearchSpace(a=Int(1, 60), b=Int(1, 60), c=Int(1, 3, when={"a": [1, 2]}))
    space.require(lambda p: p["a"] <= p["b"], "a is at most b")
    remote, asked = delegate(space)
    assert remote.all_individuals == space.all_individuals
    assert len(remote.all_individuals or []) == 60 * 61 // 2 + 2 * (60 + 59)
    assert asked.batches == [*(2**n for n in range(10)), 1000, 1000, 58 * 60 + 2 * 60 * 3 - 3023]


def test_space_without_constraint_server_raises() -> None:
    space = load_space(dump_space(CONDITIONAL))
    assert space.decode(space.encode(CONDITIONAL.draw(random.Random(0))))
    for ask in (
        space.check_constraints,
        lambda: space.draw(random.Random(0)),
        lambda: space.all_individuals or space.allows({}),
    ):
        with pytest.raises(RuntimeError, match="no process checks the constraints"):
            ask()


@pytest.mark.parametrize("name", ["ga", "tpe", "random"])
def test_propagators_with_delegated_constraints_breed_the_same(name: str) -> None:
    def breed(space: SearchSpace) -> list[dict[str, Any]]:
        started = []

        def evaluate(params: dict[str, Any]) -> tuple[float, float]:
            started.append(params)
            return abs(params["width"] - 96) + params["layers"], 1.0

        simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 40)
        return started

    space, asked = delegate(CONDITIONAL)
    assert breed(space) == breed(CONDITIONAL)
    assert max(asked.batches) <= 64
    assert len(asked.batches) < 40 * 30


def make_constrained_space(constraint: Any, text: Any = "the constraint") -> SearchSpace:
    space = SearchSpace(
        a=Int(1, 5),
        b=Int(1, 5),
        o=Categorical("x", "y"),
        c=Int(1, 3, when={"o": "x"}),
        d=Int(1, 3, when={"o": "y"}),
    )
    space.require(constraint, text)
    return space


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (lambda p: p["a"] % p["b"], r"must return True or False, got \d for {'a': "),
        (lambda p: p["a"] < p["e"], "failed for {'a': .*: there is no parameter 'e'"),
        (
            lambda p: p["c"] < p["d"],
            "never applies: it reads parameters that were not active together in any of 10000",
        ),
        (lambda p: p.a < 3, "AttributeError"),
        (lambda p: 1 / (p["a"] - 1) > 0, "failed for {'a': 1, .*ZeroDivisionError"),
        (lambda: True, "TypeError"),
        (lambda p: np.array([p["a"], p["b"]]) > 1, "must return True or False, got array"),
        (
            lambda p: p["a"] < 0 or next(TOSSES),
            "must always return the same for the same hyperparameters, got two answers",
        ),
        (
            lambda p: p["a"] > 5,
            r"leave nothing: of 10000 individuals drawn at random 0 satisfy all of them \('the "
            r"constraint' 0\)",
        ),
        (lambda p: (p["a"], p["b"], p.get("c")) == (1, 1, 4), "leave nothing"),
    ],
)
def test_check_constraints_with_unsound_constraint_raises(constraint: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_constrained_space(constraint).check_constraints()
    with pytest.raises(ValueError, match=message):
        delegate(make_constrained_space(constraint))[0].check_constraints()


def test_check_constraints_that_allow_few_counts_for_each() -> None:
    space = SearchSpace(**{name: Int(1, 100) for name in "abc"})
    space.require(lambda p: p["a"] == p["b"], "a is b")
    space.require(lambda p: p["b"] == p["c"], "b is c")
    with pytest.raises(
        ValueError,
        match=r"leave next to nothing: .* [1-9] satisfy .*\('a is b' \d+, 'b is c' \d+\)",
    ):
        space.check_constraints()


def test_constraint_of_inactive_parameter_is_skipped() -> None:
    for constraint in (
        lambda p: p["a"] < p["c"],
        lambda p: np.bool_(p["a"] < 3),
        lambda p: p.pop("a") < 4 and p.pop("b") < 4,
    ):
        make_constrained_space(constraint).check_constraints()
    space = make_constrained_space(lambda p: p["c"] > 2, "c is large")
    space.check({"a": 1, "b": 1, "o": "y", "d": 1})
    with pytest.raises(ValueError, match="c is large, got"):
        space.check({"a": 1, "b": 1, "o": "x", "c": 1})
    for function, text in (("a < b", "x"), (bool, None)):
        with pytest.raises(TypeError, match="a constraint must be a function"):
            make_constrained_space(function, text)


@pytest.mark.parametrize("name", PROPAGATORS)
def test_propagators_satisfy_constraints_without_duplicates(name: str) -> None:
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
        return float(sum(value for value in params.values() if type(value) is float)) + params[
            "width"
        ] / 100, 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 60)
    assert len({tuple(sorted(params.items())) for params in started}) == 60
    assert len({params["layers"] for params in started}) >= 2


@pytest.mark.parametrize("name", PROPAGATORS)
def test_propagators_with_single_value_parameter_search_on(name: str) -> None:
    space = SearchSpace(batch_size=Ordinal(64), lr=Float(1e-3, 1.0, log=True), heads=Ordinal(2, 4))
    started: list[float] = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        started.append(float(params["lr"]))
        return abs(math.log(params["lr"] / 0.03)), 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 50)
    assert len(set(started)) > 25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ga", "tpe", "random"])
def test_propagators_find_all_of_few_allowed_individuals(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_space, "_MOST_SECONDS", scale(5))  # They are listed in this time.
    space = SearchSpace(
        a=Int(1, 250), b=Int(1, 150), kind=Categorical("x", "y", when={"a": [7, 8]})
    )
    space.require(lambda p: p["a"] == p["b"] and p["a"] < 50, "a is b, and small")
    space.check_constraints()
    started = []

    def evaluate(params: dict[str, Any]) -> tuple[float, float]:
        started.append(tuple(params.values()))
        return abs(params["a"] - 7.0), 1.0

    simulate(SimulatedIslands(space, [name], 2, 0), evaluate, 51)
    assert len(set(started)) == 51 == len(space.all_individuals or [])


def test_surrogate_ignores_genes_of_inactive_parameters() -> None:
    space = SearchSpace(
        kind=Categorical("a", "b"),
        x=Float(0.0, 1.0),
        y=Float(0.0, 1.0, when={"kind": "a"}),
        z=Ordinal(1, 2, 3),
    )
    rng = random.Random(0)
    news = []
    for trial in range(40):
        params = space.draw(rng)
        loss = float(params["x"]) + (10 * abs(float(params["y"]) - 0.2) if "y" in params else 1.0)
        news.append(Evaluation(trial, "complete", loss, params, 0, 0, trial))
    past = EvaluationHistory(space)
    past.add_evaluations(news)
    merits_of = Surrogate(past, np.random.default_rng(0)).learn(past.make_founder_sample())
    off = merits_of(np.array([[1, 0.31, y, 1] for y in (0.0, 0.2, 0.7)]))
    on = merits_of(np.array([[0, 0.31, y, 1] for y in (0.0, 0.2, 0.7)]))
    assert off == pytest.approx(off[0])
    assert np.ptp(on) > 1
