"""Test priors: values of hyperparameters that the user expects to be good."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp

from hpo import Categorical, Float, Int, Ordinal, SearchSpace
from hpo.breeding.evaluation_history import EvaluationHistory
from hpo.breeding.prior_model import PriorModel
from hpo.objectives import ONLY_LOSS
from hpo.problem import dump_space, load_space
from hpo.results.models import compare_priors
from hpo.space.parameters import describe_priors, format_parameter, parse_parameter
from tests.support.evaluations import make_evaluation
from tests.support.simulation import SimulatedIslands, simulate

SPACE = SearchSpace(
    lr=Float(1e-5, 1e-1, log=True, prior=1e-4),
    width=Int(8, 512, prior=64, confidence="high"),
    optimizer=Categorical("sgd", "adam", "lion", prior="adam", confidence="low"),
    momentum=Float(0.0, 0.99, prior=0.9, when={"optimizer": "sgd"}),
    batch=Ordinal(16, 32, 64),
)
PRIORS = describe_priors(SPACE.parameters)


@pytest.mark.parametrize(
    ("parameter", "prior"),
    [
        (Float(1, 10, prior=3), 3.0),
        (Float(0.0, 1.0, step=0.1, prior=0.1 + 0.2), 0.3),
        (Float(1e-5, 1e-1, log=True, prior=np.float32(3e-4)), 0.000300000014249),
        (Int(1, 9, prior=np.int64(4)), 4),
        (Int(1, 9, log=True, prior=4.0), 4),
        (Ordinal(16, 32, prior=32.0), 32),
        (Categorical(True, False, prior=True), True),
    ],
)
def test_prior_is_converted_to_a_value_of_its_parameter(parameter: Any, prior: object) -> None:
    space = SearchSpace(x=parameter)
    assert (space.priors, type(space.priors["x"])) == ({"x": prior}, type(prior))
    assert load_space(json.loads(json.dumps(dump_space(space)))).priors == {"x": prior}
    assert parse_parameter(format_parameter(parameter)) == parameter


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (
            Float(1e-4, 1e-1, log=True, prior=1.0),
            r"the prior must be a number from 0\.0001 to 0\.1, got 1\.0 \(float\), in",
        ),
        (
            Float(0.0, 1.0, prior="0.5"),
            r"the prior must be a number from 0\.0 to 1\.0, got '0\.5' \(str\)",
        ),
        (Float(0.0, 1.0, prior=math.nan), r"the prior must be a number from 0\.0 to 1\.0, got nan"),
        (
            Int(1, 9, step=2, prior=4),
            r"the prior must be a number from 1 to 9, in steps of 2 from 1, got 4 \(int\), in "
            r"Int\(1, 9, step=2",
        ),
        (Categorical("a", "b", prior="c"), r"the prior must be one of 'a', 'b', got 'c'"),
        (
            Categorical([1, 2], [3, 4], prior=[1, 2]),  # type: ignore[arg-type]
            r".*Write Categorical\('1-2', '3-4', prior='1-2'\), and in the objective",
        ),
        (Float("0", "1", prior="0.5"), r".*Write Float\(0\.0, 1\.0, prior=0\.5\)$"),  # type: ignore[arg-type]
        (
            Int(1, 9, prior=4, confidence=np.array(["high", "low"])),  # type: ignore[arg-type]
            r"confidence must be 'low', 'medium', 'high', got",
        ),
        (
            Int(1, 9, prior=4, confidence="sure"),
            r"confidence must be 'low', 'medium', 'high', got 'sure'",
        ),
        (
            Int(1, 9, confidence="high"),
            r"confidence needs a prior, in Int\(1, 9, confidence='high'\)",
        ),
    ],
)
def test_wrong_prior_is_named(parameter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^parameter 'x': {message}"):
        SearchSpace(x=parameter)


def test_description_of_space_has_no_priors() -> None:
    """A resumed run must have the same description, but may have other priors."""
    assert SPACE.describe()["lr"] == "Float(1e-05, 0.1, log=True)"
    assert PRIORS["width"] == "Int(8, 512, prior=64, confidence='high')"
    assert "batch" not in PRIORS


def test_individual_of_priors_has_all_active_priors() -> None:
    drawn = [SPACE.draw_priors(random.Random(seed)) for seed in range(50)]
    assert all(
        params.items() >= {"lr": 1e-4, "width": 64, "optimizer": "adam"}.items() for params in drawn
    )
    assert all("momentum" not in params for params in drawn)
    assert {params["batch"] for params in drawn} == {16, 32, 64}


def test_individual_of_priors_satisfies_constraints() -> None:
    space = SearchSpace(**SPACE.parameters)
    space.require(
        lambda params: params["batch"] * params["width"] <= 2048,
        "batch * width must be at most 2048",
    )
    assert {space.draw_priors(random.Random(seed))["batch"] for seed in range(20)} == {16, 32}
    space = SearchSpace(**SPACE.parameters)
    space.require(lambda params: params["lr"] > 1e-3, "lr must be above 1e-3")
    with pytest.raises(ValueError, match=r"lr must be above 1e-3, got .*'lr': 0\.0001"):
        space.draw_priors(random.Random(0))


def test_draws_from_priors_have_their_distributions() -> None:
    drawn = SPACE.draw_from_priors(random.Random(0), 4000)
    assert len(drawn) == 4000
    assert all(SPACE.find_mistakes([params]) == [""] for params in drawn)
    optimizers = Counter(params["optimizer"] for params in drawn)
    assert optimizers["adam"] / 4000 == pytest.approx(2 / 4, abs=0.03)
    assert optimizers["sgd"] / 4000 == pytest.approx(1 / 4, abs=0.03)
    widths = np.array([params["width"] for params in drawn])
    # The standard deviation is an eighth of the range. 56 of it lie below the expected value, which
    # cuts off a third.
    near = (np.abs(widths - 64) < 56).mean()
    normal = math.erf(56 / (505 / 8) / math.sqrt(2))
    assert near == pytest.approx(normal / (0.5 + normal / 2), abs=0.03)
    assert Counter(params["batch"] for params in drawn)[16] / 4000 == pytest.approx(1 / 3, abs=0.03)


def test_genes_drawn_at_once_have_the_same_distributions() -> None:
    space = SearchSpace(**SPACE.parameters, depth=Ordinal(1, 2, 3, prior=3))
    drawn = [
        list(space.encode(params).values())
        for params in space.draw_from_priors(random.Random(0), 8000)
    ]
    genes = PriorModel(space).draw_genes(np.full((8000, 6), 0.5), np.random.default_rng(0))
    for name, one, other in zip(space.parameters, np.transpose(drawn), genes.T, strict=True):
        if name == "batch":
            assert (other == 0.5).all(), "a gene without a prior must stay"
        elif name != "momentum":  # Inactive in some of the first draws.
            assert ks_2samp(one, other).pvalue > 1e-3, name


def encode(*individuals: dict[str, Any]) -> tuple[Any, Any]:
    genes = np.array([list(SPACE.encode(params).values()) for params in individuals])
    return genes, np.array(
        [[name in params for name in SPACE.parameters] for params in individuals]
    )


def test_log_densities_are_those_of_the_priors() -> None:
    best = {"lr": 1e-4, "width": 64, "optimizer": "adam", "batch": 16}
    other = {"lr": 1e-3, "width": 127, "optimizer": "sgd", "momentum": 0.9, "batch": 64}
    found = PriorModel(SPACE).compute_log_densities(*encode(best, other))
    assert found[0] == pytest.approx([0, 0, 0, 0])
    # 1e-3 is a quarter of the range away, and 63 is an eighth of it.
    assert found[1] == pytest.approx([-0.5, -0.5, -math.log(2), 0], abs=0.01)


def test_width_of_prior_is_a_share_of_the_range() -> None:
    space = SearchSpace(
        a=Float(0.0, 0.1, prior=0.01), b=Ordinal(32, 64, prior=32), c=Categorical("x", prior="x")
    )
    genes = np.array([[0.01 + 0.025, 1, 0], [0.01, 0, 0]])
    found = PriorModel(space).compute_log_densities(genes, np.ones((2, 3), bool))
    assert found == pytest.approx(np.array([[-0.5, -2.0, 0], [0, 0, 0]]))
    drawn = space.draw_from_priors(random.Random(0), 1000)
    assert 50 < sum(params["b"] == 64 for params in drawn) < 350


def test_priors_of_inactive_parameters_are_not_judged() -> None:
    space = SearchSpace(
        kind=Categorical("a", "b"), x=Float(0.0, 1.0, prior=0.9, when={"kind": "b"})
    )
    assert {space.draw_priors(random.Random(seed))["kind"] for seed in range(10)} == {"b"}
    genes = np.array([[0, 0.5], *([1, x] for x in (0.1, 0.3, 0.5, 0.7, 0.9))])
    active = np.array([[True, False], *([[True, True]] * 5)])
    model = PriorModel(space)
    model.fit(genes, active, np.array([[9.0], [5.0], [4.0], [3.0], [2.0], [1.0]]))
    assert model.trust == 1


@pytest.mark.slow
def test_search_continues_if_constraints_exclude_prior_draws() -> None:
    space = SearchSpace(x=Float(0.0, 1.0, prior=0.0, confidence="high"))
    space.require(
        lambda params: params["x"] == 0 or params["x"] > 0.9, "x must be 0 or more than 0.9"
    )
    islands = SimulatedIslands(space, ("ga",), 1, 0, workers=2)
    losses = simulate(islands, lambda params: (params["x"], 1.0), 20, workers=2)
    assert len(losses) == 20


def test_prior_fades_with_evaluations_and_if_they_contradict() -> None:
    rng = random.Random(0)
    individuals: list[dict[str, Any]] = [SPACE.draw(rng) for _ in range(60)]
    model, (genes, active) = PriorModel(SPACE), encode(*individuals)
    far = encode({"lr": 1e-1, "width": 512, "optimizer": "adam", "batch": 16})
    before = model.compute_log_weight(*far)[0]
    # Losses agree with the prior of lr, and contradict that of width.
    costs = np.array(
        [[abs(math.log10(one["lr"]) + 4) - abs(one["width"] - 64) / 100] for one in individuals]
    )
    model.fit(genes, active, costs)
    lr, width, *_ = model.compute_log_densities(*far)[0]
    assert before == pytest.approx(lr + width)
    after = model.compute_log_weight(*far)[0]
    assert after == pytest.approx(lr * (10 / 60) ** 2, rel=0.1)
    assert model.trust == 1, "The individual of the priors was not evaluated."


@pytest.mark.parametrize(("rank", "trust"), [(0, 1.0), (5, 1.0), (8, 0.4), (10, 0.0)])
def test_trust_in_priors_falls_with_rank_of_their_individual(rank: int, trust: float) -> None:
    rng = random.Random(0)
    expected: dict[str, Any] = {"lr": 1e-4, "width": 64, "optimizer": "adam", "batch": 16}
    individuals: list[dict[str, Any]] = [
        expected,
        *({**SPACE.draw(rng), "lr": 0.1} for _ in range(10)),
    ]
    costs = np.array([rank - 0.5, *range(10)])[:, None]
    model = PriorModel(SPACE)
    model.fit(*encode(*individuals), costs)
    assert model.trust == pytest.approx(trust)
    assert (model.compute_log_weight(*encode(individuals[3]))[0] == 0) == (trust == 0)


def make_prior_history(failed: int, complete: int) -> EvaluationHistory:
    """Return the history of a run whose first evaluations, near the priors, fail."""
    rng = random.Random(0)
    near = [
        {"lr": 1e-4, "width": 64 + trial, "optimizer": "adam", "batch": 16}
        for trial in range(failed)
    ]
    far = [{**SPACE.draw(rng), "lr": 0.1} for _ in range(complete)]
    ended = [
        make_evaluation(trial, "failed" if trial < failed else "complete", params=params)
        for trial, params in enumerate([*near, *far])
    ]
    history = EvaluationHistory(SPACE)
    history.add_evaluations(ended)
    return history


def test_failures_contradict_priors() -> None:
    failing = make_prior_history(3, 12)
    assert failing.prior_share < 0.06, "the individual of the priors is among the three worst of 15"
    model = failing.fit_prior_model()
    assert model is not None
    assert (
        abs(
            model.compute_log_weight(
                *encode({"lr": 0.1, "width": 512, "optimizer": "adam", "batch": 16})
            )[0]
        )
        < 0.1
    )
    assert make_prior_history(9, 12).prior_share == pytest.approx(1 / 3), (
        "a long streak does not count"
    )


def test_trust_is_the_mean_over_equally_close_evaluations() -> None:
    space = SearchSpace(kind=Categorical("a", "b", prior="a"), x=Float(0.0, 1.0))
    genes = np.array([[kind, 0.1 * index] for index, kind in enumerate([0, 1, 1, 1, 1, 0])])
    # Of two with the prior, the first is the worst.
    costs = np.array([[9.0], [2.0], [3.0], [4.0], [5.0], [1.0]])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]):
        model = PriorModel(space)
        model.fit(genes[order], np.ones_like(genes, bool), costs[order])
        assert model.trust == 1


def test_agreement_counts_failures_as_the_worst() -> None:
    space = SearchSpace(lr=Float(0.0, 1.0, prior=0.9))
    evaluations = [
        make_evaluation(
            trial,
            "failed" if trial >= 16 else "complete",
            params={"lr": trial / 20},
            ended=float(order),
        )
        for order, trial in enumerate(
            [0, 16, 5, 17, 9, 18, 3, 19, 1, 2, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15]
        )
    ]
    evaluations += [make_evaluation(20, "running", params={"lr": 0.9})]
    (found,) = compare_priors(
        evaluations, space.describe(), describe_priors(space.parameters), ONLY_LOSS
    )
    assert found.verdict == "contradict"


def test_agreement_is_judged_by_the_active_evaluations() -> None:
    rng = random.Random(1)
    drawn: list[dict[str, Any]] = [SPACE.draw(rng) for _ in range(80)]
    evaluations = [
        make_evaluation(
            trial,
            loss=abs(math.log10(params["lr"]) + 4)
            - params["width"] / 100
            + 10 * abs(params.get("momentum", 2) - 0.9),
            params=params,
        )
        for trial, params in enumerate(drawn)
    ]
    found = {
        each.name: each for each in compare_priors(evaluations, SPACE.describe(), PRIORS, ONLY_LOSS)
    }
    assert {name: each.verdict for name, each in found.items()} == {
        "lr": "undecided",
        "width": "contradict",
        "optimizer": "contradict",
        "momentum": "agree",
    }
    assert (found["momentum"].correlation or 0.0) > 0.5
    assert (found["width"].value, found["width"].confidence) == (64, "high")
    none = compare_priors([], SPACE.describe(), PRIORS, ONLY_LOSS)
    few = compare_priors(evaluations[:4], SPACE.describe(), PRIORS, ONLY_LOSS)
    for each in (*none, *few):
        assert (each.verdict, each.correlation) == ("undecided", None), "it is not known"
    assert compare_priors(evaluations, SPACE.describe(), {}, ONLY_LOSS) == []
    edited = {"self": "Int(1, 5, prior=3)", "lr": "Float(1e-05, 0.1, log=True)"}
    assert compare_priors(evaluations, SPACE.describe(), edited, ONLY_LOSS) == []


def search(prior: float | None, evaluations: int, seed: int) -> float:
    """Return the lowest loss of a search in five dimensions. The optimum is 0.3 in each of them."""
    space = SearchSpace(**{f"x{index}": Float(0.0, 1.0, prior=prior) for index in range(5)})
    islands = SimulatedIslands(space, ("ga",), 2, seed)
    losses = simulate(
        islands, lambda params: (sum(abs(x - 0.3) for x in params.values()), 1.0), evaluations
    )
    return float(losses.min())


@pytest.mark.slow
def test_good_prior_helps_early_and_bad_prior_is_forgotten() -> None:
    early = {
        prior: np.mean([search(prior, 24, seed) for seed in range(8)]) for prior in (None, 0.35)
    }
    assert early[0.35] < 0.7 * early[None]
    late = {
        prior: np.mean([search(prior, 100, seed) for seed in range(4)]) for prior in (None, 0.95)
    }
    assert late[0.95] < 1.5 * late[None]
