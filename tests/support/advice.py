"""Make results of runs, and find the advice about them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo import Categorical, Float, Int, SearchSpace
from hpo.results.advice import Advice, find_advice
from hpo.results.run_snapshot import RunSnapshot
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import FORMAT
from tests.support.runs import make_manifest

SPACE = SearchSpace(
    lr=Float(1e-3, 1.0, log=True),
    gamma=Float(0.0, 1.0),
    layers=Int(1, 6),
    act=Categorical("a", "b"),
)
MANIFEST: dict[str, Any] = {
    "budget": 1,
    "confirm_seeds": 0,
    "format": FORMAT,
    "settings": {"epochs": 10},
    "set": {"epochs": "10", "data": "my data"},
    "layout": {"ranks": 8, "ranks_per_worker": 2, "islands": 2},
    "command": "run_islands.py my.py --set epochs=10",
    "search_space": "my.py",
    "started": "",
}


def make_ended(trial: int, loss: float, state: str = "complete", **others: Any) -> Evaluation:
    """Return an evaluation that took ten seconds. Four workers run at the same time."""
    params = others.pop("params", {"lr": 0.03, "gamma": 0.5, "layers": 3, "act": "a"})
    times = {"started": 10.0 * (trial // 4), "ended": 10.0 * (trial // 4) + 10.0, "seconds": 10.0}
    index = {"island": 0, "worker": trial % 4, "generation": trial // 4}
    return Evaluation(
        trial,
        state,
        math.inf if state == "failed" else loss,
        params,
        **{**index, **times, **others},
    )


def make_result(
    evaluations: Sequence[Evaluation], changes: Mapping[str, Any] | None = None, **others: Any
) -> RunSnapshot:
    """Return the result of a run that has ended and spent its budget."""
    given: dict[str, Any] = {
        "confirmations": [],
        "distributions": SPACE.make_distributions(),
        "last_summary": {"stopped": None},
        "is_in_use": False,
        "run_dir": Path("runs/x"),
        **others,
    }
    manifest = make_manifest(**{**MANIFEST, **(changes or {})})
    return RunSnapshot(0.0, manifest, evaluations, **given)


def find_by_kind(run_result: RunSnapshot, kind: str) -> Advice | None:
    """Return the advice of this kind, or None if the run gives none."""
    found = [advice for advice in find_advice(run_result) if advice.kind == kind]
    assert len(found) <= 1
    return found[0] if found else None


def draw_search(
    count: int, loss: Callable[[dict[str, Any]], float], seed: int = 0, space: SearchSpace = SPACE
) -> list[Evaluation]:
    """Return the evaluations of a random search, whose losses `loss` computes."""
    rng = random.Random(seed)
    return [
        make_ended(trial, loss(params), params=params)
        for trial in range(count)
        for params in [space.draw(rng)]
    ]


def make_crowded_search(
    count: int, loss: Callable[[dict[str, Any]], float], **bound: Any
) -> list[Evaluation]:
    """Return a search with a random first half. The second half has the values of `bound`."""
    evaluations = draw_search(count, loss)
    late = [{**evaluation.params, **bound} for evaluation in evaluations[count // 2 :]]
    ended = [
        make_ended(trial, loss(params), params=params)
        for trial, params in enumerate(late, start=count // 2)
    ]
    return [*evaluations[: count // 2], *ended]


def compute_distant_loss(params: Mapping[str, Any]) -> float:
    """Return a loss that is lowest far above the range of the learning rate."""
    return float((math.log10(params["lr"]) - 1) ** 2 + 0.1 * (params["gamma"] - 0.5) ** 2)


def make_flat_search(count: int = 64) -> list[Evaluation]:
    """Return a search of `count` evaluations.

    Its eleventh has the lowest loss, and all others are close to it.
    """
    losses = [0.5 + 1e-4 * (1 + (7 * index) % count) for index in range(count)]
    losses[10] = 0.5
    return [make_ended(trial, loss) for trial, loss in enumerate(losses)]


def make_curves(curve: Callable[[int], float], epochs: int = 10, **others: Any) -> list[Evaluation]:
    """Return evaluations whose losses by epoch follow `curve`.

    Each is slightly worse than the previous one.
    """
    curves = [
        {epoch: (1 + trial / 100) * curve(epoch) for epoch in range(1, epochs + 1)}
        for trial in range(8)
    ]
    return [
        make_ended(trial, min(curve.values()), curve=curve, **others)
        for trial, curve in enumerate(curves)
    ]


def compute_falling_loss(epoch: int) -> float:
    """Return a loss of 0.1, plus a term that halves in ten epochs."""
    return float(0.1 + 2 ** (-epoch / 10))


def make_session_times(fraction: object, seconds: float = 100.0) -> dict[str, Any]:
    """Return the content of summary.json with the times of a session."""
    return {"worker_busy_fraction": fraction, "wall_seconds": seconds}
