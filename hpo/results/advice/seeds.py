"""Whether the winner is as good as the best, and how many seeds show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpo.results.advice.result import Advice, Result, apart, listed, percent
from hpo.results.confirmation import as_good_within, comparable, compare, count_seeds_needed
from hpo.text import counted, number

_CLOSE = 0.02  # of a loss: other seeds may well turn two evaluations around
_FEWEST, _MOST = 3, 30  # seeds for each of the best: who would give more?


def confirm_winner(result: Result) -> Advice | None:
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
    if comparable(entries):
        return None if result.manifest.objectives.are_several else _after_comparison(result, entries)
    seeds = result.manifest.confirm_seeds
    if seeds >= _FEWEST or entries[1]["failed"] > entries[0]["failed"]:
        return None
    return Advice(
        "confirm",
        f"Confirm with {_FEWEST} seeds or more.",
        f"The losses of {counted(seeds, 'seed')} each are too few to compare the winner with the others.",
        result.confirming(_FEWEST),
    )


def _to_confirm(result: Result) -> Advice | None:
    """Advise to train the best again where the runner-up is close; of a front, several are chosen anyway."""
    if result.manifest.objectives.are_several:
        return None
    best = result.ranked()[:2]
    if len(best) < 2 or not result.is_spent or result.manifest.confirm_seeds or result.has_heirs:
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


def _after_comparison(result: Result, entries: Sequence[dict[str, Any]]) -> Advice | None:
    """Advise to choose among those that are as good as the best, or to give more seeds if none is certain to be."""
    seeds, first, margin = result.manifest.confirm_seeds, entries[0], as_good_within(entries) or 0.0
    given = f"With {counted(seeds, 'other seed')} each"
    deviation = f"{number(margin)}, one standard deviation by seeds"
    good = [entry for entry in entries if entry["as_good"]]
    if len(good) > 1:
        return Advice(
            "confirm",
            f"Take the cheapest of trials {listed((entry['trial'] for entry in good), len(good))}.",
            f"{given}, they are as good as the best within {deviation}.",
        )
    if good:
        return None
    choice = f"take trial {first['trial']}"
    if first["worse_by_at_most"] is not None:
        choice += f", which is worse than the best by {number(first['worse_by_at_most'])} at most"
    possible = listed(entry["trial"] for entry in entries if entry["may_be_best"])
    why = f"{given}, trials {possible} may be the best, and none is certain to be as good within {deviation}."
    most = max(_MOST, 2 * seeds)
    needed = count_seeds_needed(entries, most)
    if needed is None:
        return Advice("confirm", f"{choice[0].upper()}{choice[1:]}.", f"{why} That would need more than {most} seeds.")
    return Advice("confirm", f"Confirm with {needed} seeds, or {choice}.", why, result.confirming(needed))
