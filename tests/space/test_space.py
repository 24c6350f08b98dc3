"""Test search spaces: encoding, validation of parameters, and messages about mistakes."""

from __future__ import annotations

import json
import math
import pickle
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo import Categorical, Float, Int, Ordinal, SearchSpace
from hpo.breeding.encoding import GeneEncoding
from hpo.breeding.population import Individual
from hpo.breeding.propulate_compat import PropulateIndividual
from hpo.problem import dump_space, load_space
from hpo.space import Parameter, make_key

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not __import__("keyword").iskeyword(name)
)
finite = st.floats(-1e300, 1e300)
choices = st.one_of(st.booleans(), st.integers(-(2**70), 2**70), finite, st.text(max_size=5))


@st.composite
def ints(draw: st.DrawFn) -> Int:
    if draw(st.booleans()):
        low = draw(st.integers(1, 10**6))
        return Int(low, draw(st.integers(low + 1, 10**7)), log=True)
    low = draw(st.integers(-(2**53), 2**53 - 1))
    high = draw(st.integers(low + 1, min(2**53, low + 2**53)))
    step = draw(st.integers(1, high - low))
    return Int(low, high - (high - low) % step, step=step)


@st.composite
def floats(draw: st.DrawFn) -> Float:
    log = draw(st.booleans())
    bounds = st.floats(1e-300, 1e300) if log else finite
    low, high = sorted(draw(st.tuples(bounds, bounds)))
    if draw(st.booleans()):
        low, step = (
            draw(st.sampled_from([-1.3, 0.0, 2.5, 1e5])),
            draw(st.sampled_from([0.05, 0.1, 1.7, 300])),
        )
        return Float(
            low,
            float(Decimal(repr(low)) + draw(st.integers(1, 50)) * Decimal(repr(step))),
            step=step,
        )
    parameter = Float(low, high, log=log)
    return parameter if parameter.find_problem() is None else Float(0.1, 1.0, log=log)


several = st.lists(choices, min_size=1, max_size=5, unique=True)
categoricals = several.map(lambda items: Categorical(*items))
ordinals = several.map(lambda items: Ordinal(*items))
parameters = st.one_of(ints(), floats(), categoricals, ordinals)
spaces = st.dictionaries(names, parameters, min_size=1, max_size=5).map(
    lambda items: SearchSpace(**items)
)


def draw_genes(parameter: Parameter) -> st.SearchStrategy[float]:
    low, high = parameter.limits
    return st.integers(int(low), int(high)) if isinstance(low, int) else st.floats(low, high)


@given(st.data())
def test_decode_of_encoded_params_returns_the_same_params(data: st.DataObject) -> None:
    space = data.draw(spaces)
    genes = {name: data.draw(draw_genes(parameter)) for name, parameter in space.parameters.items()}
    params = space.decode(genes)
    space.check(params)
    again = space.decode(space.encode(params))
    assert again == params
    assert [type(value) for value in again.values()] == [type(value) for value in params.values()]
    assert list(again) == list(space.parameters)


@given(st.data())
def test_decode_of_pickled_individual_returns_the_same_params(data: st.DataObject) -> None:
    space = data.draw(spaces)
    params = space.decode({name: data.draw(draw_genes(p)) for name, p in space.parameters.items()})
    individual = pickle.loads(pickle.dumps(Individual(space, space.encode(params))))
    assert individual.params == params
    assert GeneEncoding(space).decode_genes(individual.position) == params


@given(st.data())
def test_optuna_distributions_return_the_same_params(data: st.DataObject) -> None:
    space = data.draw(spaces)
    params = space.decode({name: data.draw(draw_genes(p)) for name, p in space.parameters.items()})
    for name, distribution in space.make_distributions().items():
        internal = distribution.to_internal_repr(params[name])
        assert distribution._contains(internal)
        back = distribution.to_external_repr(internal)
        assert (back, type(back)) == (params[name], type(params[name]))


@given(spaces, st.booleans())
def test_load_space_of_dumped_space_returns_the_same_space(
    space: SearchSpace, mutable: bool
) -> None:
    space = SearchSpace(**space.parameters, last=Float(0, 1, mutable=mutable))
    data = dump_space(space)
    again = load_space(json.loads(json.dumps(data)))
    assert dump_space(again) == data
    assert again.parameters == space.parameters
    assert again.describe() == space.describe()
    assert again.list_gene_limits() == space.list_gene_limits()
    assert again.immutable_names == space.immutable_names
    assert again.draw(random.Random(0)) == space.draw(random.Random(0))


def test_load_space_with_a_class_of_the_user_returns_its_kind() -> None:
    class LearningRate(Float):
        """A user's own class, which the process of the search does not know."""

    loaded = load_space(dump_space(SearchSpace(lr=LearningRate(1e-4, 0.1, log=True))))
    assert loaded.parameters == {"lr": Float(1e-4, 0.1, log=True)}


@given(spaces, st.floats(-1e308, 1e308))
def test_decode_gene_outside_limits_returns_valid_value(space: SearchSpace, gene: float) -> None:
    space.check(space.decode(dict.fromkeys(space.parameters, gene)))


def test_individual_categorical_after_other_traits_can_be_set() -> None:
    # Propulate's own encoding of strings fails here: with five traits before it, "tanh" stays
    # "relu".
    space = SearchSpace(
        **{f"x{i}": Float(0.0, 1.0) for i in range(5)},
        activation=Categorical("relu", "sigmoid", "tanh"),
        last=Int(1, 3),
    )
    before: dict[str, Any] = {**{f"x{i}": 0.5 for i in range(5)}, "activation": "relu", "last": 2}
    individual = PropulateIndividual(dict(space.encode(before)), space.list_gene_limits())
    for activation in ("tanh", "sigmoid", "relu"):
        individual["activation"] = space.encode({**before, "activation": activation})["activation"]
        assert space.decode(individual) == {**before, "activation": activation}


def test_log_float_middle_gene_is_the_geometric_mean() -> None:
    lr = Float(1e-4, 1e-2, log=True)
    low, high = lr.limits
    assert lr.decode((low + high) / 2) == pytest.approx(1e-3, rel=1e-9)
    assert (lr.decode(low), lr.decode(high)) == (1e-4, 1e-2)


def test_log_int_is_drawn_log_uniformly_up_to_its_bounds() -> None:
    space = SearchSpace(width=Int(1, 1024, log=True))
    rng = random.Random(0)
    drawn = [int(space.draw(rng)["width"]) for _ in range(2000)]
    assert min(drawn) == 1
    assert max(drawn) > 1000
    assert drawn.count(1) / 2000 == pytest.approx(math.log(3) / math.log(2049), abs=0.03), (
        "1 is from 0.5 to 1.5"
    )
    assert np.mean(np.array(drawn) > 32) == pytest.approx(
        math.log(1024.5 / 32.5) / math.log(2049), abs=0.03
    )


def test_parameters_with_step_have_exact_values() -> None:
    space = SearchSpace(dropout=Float(0, 0.5, step=0.05), width=Int(8, 64, step=8))
    everything = space.all_individuals or []
    assert len(everything) == 11 * 8
    found = {(params["dropout"], params["width"]) for params in everything}
    assert found == {(float(f"{0.05 * i:.2g}"), 8 * j) for i in range(11) for j in range(1, 9)}
    assert not space.parameters["dropout"].accepts(0.07)
    assert not space.parameters["width"].accepts(12)


def test_decode_categorical_keeps_types_of_choices() -> None:
    space = SearchSpace(
        batch=Categorical(16, 32), momentum=Categorical(0.0, 0.9), nesterov=Categorical(True, False)
    )
    params = space.decode({"batch": 1, "momentum": 1, "nesterov": 0})
    assert params == {"batch": 32, "momentum": 0.9, "nesterov": True}
    assert type(params["nesterov"]) is bool


def test_float_bounds_with_many_digits_are_rounded_inwards() -> None:
    third = Float(1 / 3, 2 / 3)
    assert 1 / 3 <= third.low <= 1 / 3 + 1e-11
    assert 2 / 3 - 1e-11 <= third.high <= 2 / 3


@pytest.mark.parametrize(
    ("parameter", "reason", "shown"),
    [
        (Int(10, 2), "low must be less than high", "Int(10, 2)"),
        (Int(3, 3), "low must be less than high", "Int(3, 3)"),
        (Int(1.5, 3), "integers", "Int(1.5, 3)"),  # type: ignore[arg-type]
        (Int(True, 3), "integers", "Int(True, 3)"),
        (
            Int(0, 9, step=4),
            "high must be low plus a multiple of step, such as 8",
            "Int(0, 9, step=4)",
        ),
        (Int(0, 9, step=10), "such as 10", "Int(0, 9, step=10)"),
        (Int(0, 9, step=0), "a positive integer", "Int(0, 9, step=0)"),
        (
            Int(1, 9, log=True, step=2),
            "step must not be given with log=True (an Ordinal can have any values)",
            "Int(1, 9, log=True, step=2)",
        ),
        (Int(0, 9, log=True), "low must be greater than 0", "Int(0, 9, log=True)"),
        (
            Float(0.0, 1.0, step=0.3),
            "must be low plus a multiple of step, such as 0.9",
            "Float(0.0, 1.0, step=0.3)",
        ),
        (Float(0.0, 1.0, step=-0.1), "a positive number, got -0.1", "Float(0.0, 1.0, step=-0.1)"),
        (Float(0.0, 1.0, step=1e-20), "at least a ten-millionth", "Float(0.0, 1.0, step=1e-20)"),
        (
            Float(0.0, 1e300, step=1e-10),
            "at least a ten-millionth",
            "Float(0.0, 1e+300, step=1e-10)",
        ),
        (
            Float(1000.0, 1001.0, step=1e-9),
            "at least a ten-millionth",
            "Float(1000.0, 1001.0, step=1e-09)",
        ),
        (
            Float(1e6, 1e6 + 10, step=1e-3),
            "at least a ten-millionth",
            "Float(1000000.0, 1000010.0, step=0.001)",
        ),
        (
            Float(1.0, 2.0, log=True, step=0.5),
            "step must not be given",
            "Float(1.0, 2.0, log=True, step=0.5)",
        ),
        (Ordinal("a", "b", "a"), "differ", "Ordinal('a', 'b', 'a')"),
        (Int(0, 2**60), "2**53", "Int(0, 1152921504606846976)"),
        (Int(-(2**53), 3), "at most 2**53 (9007199254740992) apart", "Int(-9007199254740992, 3)"),
        (Float(0.01, 0.0001), "low must be less than high", "Float(0.01, 0.0001)"),
        (Float(1.0, 1.0), "low must be less than high", "Float(1.0, 1.0)"),
        (Float(0.0, 1.0, log=True), "low must be greater than 0", "Float(0.0, 1.0, log=True)"),
        (Float(-1.0, 1.0, log=True), "low must be greater than 0", "Float(-1.0, 1.0, log=True)"),
        (Float(math.nan, 1.0), "finite", "Float(nan, 1.0)"),
        (Float(0.0, math.inf), "finite", "Float(0.0, inf)"),
        (Float("0", 1.0), "numbers", "Float('0', 1.0)"),  # type: ignore[arg-type]
        (Float(0.1, 1.0, log="yes"), "True or False", "log='yes'"),  # type: ignore[arg-type]
        (Categorical(), "at least one", "Categorical()"),
        (Categorical("relu", "tanh", "relu"), "differ", "Categorical('relu', 'tanh', 'relu')"),
        (Categorical(1, True), "differ", "Categorical(1, True)"),
        (Categorical(0.5, math.nan), "finite", "Categorical(0.5, nan)"),
        (Categorical("a", None), "string, a number or a boolean", "Categorical('a', None)"),  # type: ignore[arg-type]
    ],
)
def test_space_with_invalid_range_raises_with_reason(
    parameter: Parameter, reason: str, shown: str
) -> None:
    with pytest.raises(ValueError, match="parameter 'width'") as raised:
        SearchSpace(depth=Int(1, 2), width=parameter)
    assert reason in str(raised.value)
    assert shown in str(raised.value)


@pytest.mark.parametrize(
    ("written", "problem", "instead"),
    [
        ("Categorical(['a', 'b'])", "one by one", "Categorical('a', 'b')"),
        ("Categorical(('a', 0.5))", "one by one", "Categorical('a', 0.5)"),
        ("Categorical({'b', 'a', 'c'})", "one by one", "Categorical('a', 'b', 'c')"),
        ("Categorical({32, 8, 16})", "one by one", "Categorical(8, 16, 32)"),
        ("Categorical({'b': 1, 'a': 2}.keys())", "one by one", "Categorical('b', 'a')"),
        ("Categorical(range(2, 5))", "one by one", "Categorical(2, 3, 4)"),
        ("Categorical(np.array([0.5, 1.0]))", "one by one", "Categorical(0.5, 1.0)"),
        ("Categorical('a', ['b'])", "one by one", "Categorical('a', 'b')"),
        ("Categorical(*np.array([16, 32]))", "got 16 (numpy.int64)", "Categorical(16, 32)"),
        ("Categorical(['a', 'none', None])", "one by one", None),
        ("Float(-1e308, 1e308)", "at most 1.8e+308 apart", None),
        ("Float(1, 10**400)", "must be finite", None),
        ("Float(math.nan, 1)", "must be finite", None),
        ("Categorical(['a', 'a'])", "one by one", None),
        ("Categorical([])", "one by one", None),
        ("Categorical(range(10**9))", "one by one", None),
        ("Int(2.0, 8)", "must be integers", "Int(2, 8)"),
        ("Int('2', '8')", "got '2' (str)", "Int(2, 8)"),
        ("Int(1, np.int64(8))", "got 8 (numpy.int64)", "Int(1, 8)"),
        ("Int(1.5, 8)", "(a Float's need not be), got 1.5 (float)", None),
        ("Int(8, 2.0)", "must be integers", None),
        ("Int(1, None)", "got None", None),
        ("Float('1e-3', 1)", "got '1e-3' (str)", "Float(0.001, 1.0)"),
        ("Float('1e-3', 1, log=True)", "must be numbers", "Float(0.001, 1.0, log=True)"),
        ("Float(np.float64(0.25), 1.0)", "got 0.25 (numpy.float64)", "Float(0.25, 1.0)"),
        ("Float('low', 1.0)", "got 'low' (str)", None),
        ("Float(0, 1, step='0.1')", "got '0.1' (str)", "Float(0.0, 1.0, step=0.1)"),
        (
            "Float(0, 1.5, step=np.float64(0.5))",
            "got 0.5 (numpy.float64)",
            "Float(0.0, 1.5, step=0.5)",
        ),
        (
            "Float(0, 3, step=0.1 + 0.2)",
            "at most 12 significant digits",
            "Float(0.0, 3.0, step=0.3)",
        ),
        ("Float(0, 1, step=1 / 3)", "at most 12 significant digits", None),
        ("Float(0, 1, step='fine')", "got 'fine' (str)", None),
        ("Int(0, 8, step=np.int64(2))", "got 2 (numpy.int64)", "Int(0, 8, step=2)"),
    ],
)
def test_space_with_invalid_arguments_suggests_valid_ones(
    written: str, problem: str, instead: str | None
) -> None:
    with pytest.raises(ValueError, match="parameter 'width'") as raised:
        SearchSpace(width=eval(written, {**globals(), "np": np}))
    assert problem in str(raised.value)
    assert str(raised.value).partition(". Write ")[2] == (instead or "")
    if instead:
        space = SearchSpace(width=eval(instead))
        assert repr(space.parameters["width"]) == instead


@pytest.mark.parametrize(
    ("given", "instead", "lookup"),
    [
        (
            "Categorical((128, 64), (32,))",
            "Categorical('128-64', '32')",
            "{'128-64': (128, 64), '32': (32,)}",
        ),
        (
            "Categorical([(1, 2), (3, 4)])",
            "Categorical('1-2', '3-4')",
            "{'1-2': (1, 2), '3-4': (3, 4)}",
        ),
        ("Ordinal('x', (1, 2))", "Ordinal('x', '1-2')", "{'1-2': (1, 2)}"),
        ("Categorical('x', None)", "Categorical('x', 'none')", "{'none': None}"),
        ("Categorical([0.5, None])", "Categorical(0.5, 'none')", "{'none': None}"),
    ],
)
def test_categorical_of_collections_suggests_names_and_lookup(
    given: str, instead: str, lookup: str
) -> None:
    with pytest.raises(ValueError, match="parameter 'width'") as raised:
        SearchSpace(width=eval(given))
    hint = str(raised.value).partition(". Write ")[2]
    assert hint == f"{instead}, and in the objective {lookup}.get(params['width'], params['width'])"
    params = SearchSpace(width=eval(instead)).draw(random.Random(0))
    flat = [
        value
        for choice in eval(given).choices
        for value in (choice if isinstance(choice, list) else [choice])
    ]
    assert eval(lookup).get(params["width"], params["width"]) in flat


@pytest.mark.parametrize(
    ("given", "instead"), [("'yes'", "True"), ("1", "True"), ("'off'", "False")]
)
def test_suggestion_for_invalid_mutable_keeps_its_meaning(given: str, instead: str) -> None:
    with pytest.raises(ValueError, match="mutable must be True or False") as raised:
        SearchSpace(width=eval(f"Float(0.0, 1.0, mutable={given})"))
    assert f"in Float(0.0, 1.0, mutable={given}). Write Float(0.0, 1.0" in str(raised.value)
    assert ("mutable=True" in str(raised.value).partition(". Write ")[2]) == (instead == "True")


@pytest.mark.parametrize("name", ["learning rate", "2lr", "class", "_hidden", ""])
def test_space_with_invalid_name_raises(name: str) -> None:
    with pytest.raises(ValueError, match="identifier") as raised:
        SearchSpace(**{name: Int(1, 2)})
    assert repr(name) in str(raised.value)


def test_space_without_valid_parameters_raises() -> None:
    with pytest.raises(ValueError, match="at least one parameter"):
        SearchSpace()
    with pytest.raises(TypeError, match=r"'lr'.*\(0.1, 1.0\)"):
        SearchSpace(lr=(0.1, 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lr": 0.5}, "'act' is missing"),
        (
            {"lr": 0.5, "act": "relu", "depth": 3},
            "unknown parameter 'depth'; this space has lr, act",
        ),
        (
            {"lr": 2.0, "act": "relu"},
            "parameter 'lr' must be in Float(0.1, 1.0, log=True), got 2.0",
        ),
        ({"lr": 1, "act": "relu"}, "parameter 'lr' must be in Float(0.1, 1.0, log=True), got 1"),
        (
            {"lr": 0.5, "act": "gelu"},
            "parameter 'act' must be in Categorical('relu', 'tanh'), got 'gelu'",
        ),
    ],
)
def test_encode_invalid_params_raises(params: dict[str, Any], message: str) -> None:
    space = SearchSpace(lr=Float(0.1, 1.0, log=True), act=Categorical("relu", "tanh"))
    with pytest.raises(ValueError, match="parameter") as raised:
        space.encode(params)
    assert message in str(raised.value)


def test_find_mistakes_returns_a_message_for_each_item() -> None:
    space = SearchSpace(lr=Float(0.1, 1.0, log=True), act=Categorical("relu", "tanh"))
    space.require(lambda p: p["lr"] < 0.5 or p["act"] == "relu", "tanh is slow")
    batch: list[dict[str, object]] = [
        {"lr": 0.9, "act": "tanh"},
        {"lr": 0.2, "act": "tanh"},
        {"lr": 0.9},
        {"lr": 0.9, "act": "relu"},
    ]
    assert space.find_mistakes(batch) == [
        "tanh is slow, got {'lr': 0.9, 'act': 'tanh'}",
        "",
        "parameter 'act' is missing",
        "",
    ]


def test_key_compares_individuals_by_the_parameters_of_the_space() -> None:
    key = make_key({"b": 2, "a": 1}, ["a", "b", "c"])
    assert key == make_key({"a": 1, "b": 2, "of another space": 3}, ["a", "b", "c"])
    assert key != make_key({"a": 1, "b": 2, "c": 3}, ["a", "b", "c"])
    assert key != make_key({"a": 2, "b": 1}, ["a", "b", "c"])
