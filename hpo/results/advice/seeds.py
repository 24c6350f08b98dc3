"""Whether the winner is told apart from the others, and how many seeds it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.advice.result import Advice, Result, apart, listed, percent
from hpo.results.confirmation import compare
from hpo.text import counted, number

_CLOSE = 0.02  # of a loss: other seeds may well turn two evaluations around
_FEWEST, _MOST = 3, 30  # seeds for each of the best: who would give more?
_DEVIATIONS = 1.96 + 0.84  # at a level of 5%, a difference is found in four of five cases


def not_told_apart(result: Result) -> Advice | None:
    """Advise to train the best again with other seeds, or with more of them."""
    if result.goes_on:
        return None
    if not result.confirmations:
        return _to_confirm(result)
    if not result.is_spent:
        return None  # A resumed run would search first.
    entries = compare(result.confirmations)
    if not all(one.finished for one in result.confirmations) or len(entries) < 2 or entries[0]["mean"] is None:
        return None
    first, *others = entries
    same = [entry for entry in others if entry["p"] is not None and not entry["told_apart"]]
    if same:
        return _not_confirmed(result, first, same)
    seeds = result.manifest.confirm
    if seeds >= _FEWEST or all(entry["told_apart"] for entry in others):
        return None
    return Advice(
        "confirm",
        f"Confirm with {_FEWEST} seeds or more.",
        f"The losses of {counted(seeds, 'seed')} each are too few to tell the winner from the others.",
        result.confirming(_FEWEST),
    )


def _to_confirm(result: Result) -> Advice | None:
    """Advise to train the best again where the runner-up is close; of a front, several are chosen anyway."""
    if result.manifest.objectives.are_several:
        return None
    best = result.ranked()[:2]
    if len(best) < 2 or not result.is_spent or result.manifest.confirm or result.manifest.inherit:
        return None
    distance = apart(best[0].loss, best[1].loss)
    if distance > _CLOSE:
        return None
    losses = f"The losses of trials {best[0].trial} and {best[1].trial}"
    differ = f"{losses} differ by {percent(distance)}" if distance else f"{losses} are the same"
    return Advice(
        "confirm",
        "Train the best again with other seeds before you rely on the winner.",
        f"{differ}, and each was trained once, with one seed.{_on_seed(result)}",
        result.confirming(_FEWEST),
    )


def _on_seed(result: Result) -> str:
    return " The script must take the seed, as --seed or by another option." if result.lacks_seed else ""


def _not_confirmed(result: Result, first: Mapping[str, Any], same: Sequence[Mapping[str, Any]]) -> Advice:
    """Advise to give more seeds, or where very many would be needed, to choose by something else."""
    seeds, nearest = result.manifest.confirm, same[0]
    alike = f"take the cheapest of trials {listed(entry['trial'] for entry in [first, *same])}"
    given = (
        f"With {counted(seeds, 'other seed')} each, the mean losses of trials {first['trial']} and {nearest['trial']}"
    )
    needed, enough = _needed(first, nearest), max(_MOST, 2 * seeds)
    if needed > enough:
        why = f"{given} differ so little that more than {enough} seeds each would be needed to tell them apart."
        return Advice("confirm", f"{alike[0].upper()}{alike[1:]}.", why)
    more = max(2 * seeds, math.ceil(needed))
    return Advice(
        "confirm",
        f"Confirm with {more} seeds, or {alike}.",
        f"{given} are {number(first['mean'])} and {number(nearest['mean'])}, and the standard deviation is up to "
        f"{number(_spread(first, nearest))}.",
        result.confirming(more),
    )


def _needed(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Estimate how many seeds each tell two individuals apart."""
    difference = abs(first["mean"] - other["mean"])
    ratio = _spread(first, other) / difference if difference > 0 else math.inf
    return 2 * (_DEVIATIONS * ratio) * (_DEVIATIONS * ratio)


def _spread(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return float(max(first["deviation"] or 0.0, other["deviation"] or 0.0))
