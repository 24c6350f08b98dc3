"""Advise to confirm the winner with other seeds, or with more seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpo.results.advice.run_result import Advice, RunResult, compute_relative_gap, format_list, format_percent
from hpo.results.confirmation import compare_confirmed, compute_margin, count_seeds_needed, select_comparable
from hpo.text_format import format_count, format_number

_MAX_RELATIVE_GAP = 0.02  # Share of a loss. Other seeds may easily swap two evaluations that are so close.
_MIN_SEEDS, _MAX_SEEDS = 3, 30  # Seeds for each of the best.


def advise_confirmation(result: RunResult) -> Advice | None:
    """Advise to train the best individuals again with other seeds, or with more seeds."""
    if result.is_running:
        return None
    if not result.confirmations:
        return _advise_first_confirmation(result)
    if not result.is_spent:
        return None  # A resumed run would search first.
    entries = compare_confirmed(result.confirmations)
    if (
        not all(evaluation.is_finished for evaluation in result.confirmations)
        or len(entries) < 2
        or entries[0]["mean"] is None
    ):
        return None
    if select_comparable(entries):
        return None if result.manifest.objectives.is_multi_objective else _advise_after_comparison(result, entries)
    seeds = result.manifest.confirm_seeds
    if seeds >= _MIN_SEEDS or entries[1]["failed"] > entries[0]["failed"]:
        return None
    return Advice(
        "confirm",
        f"Confirm with {_MIN_SEEDS} seeds or more.",
        f"The losses of {format_count(seeds, 'seed')} each are too few to compare the winner with the others.",
        result.format_confirm_command(_MIN_SEEDS),
    )


def _advise_first_confirmation(result: RunResult) -> Advice | None:
    """Advise to confirm the best individual if the loss of the second best is close.

    Give no such advice for several objectives, because a Pareto front has several best individuals anyway.
    """
    if result.manifest.objectives.is_multi_objective:
        return None
    best = result.rank_complete()[:2]
    if len(best) < 2 or not result.is_spent or result.manifest.confirm_seeds or result.has_inheritance:
        return None
    distance = compute_relative_gap(best[0].loss, best[1].loss)
    if distance > _MAX_RELATIVE_GAP:
        return None
    losses = f"The losses of trials {best[0].trial} and {best[1].trial}"
    differ = f"{losses} differ by {format_percent(distance)}" if distance else f"{losses} are the same"
    return Advice(
        "confirm",
        "Train the best again with other seeds before you rely on the winner.",
        f"{differ}, and each was trained once, with one seed.{_format_seed_hint(result)}",
        result.format_confirm_command(_MIN_SEEDS),
    )


def _format_seed_hint(result: RunResult) -> str:
    return " The script must take the seed, as --seed or by another option." if result.lacks_seed else ""


def _advise_after_comparison(result: RunResult, entries: Sequence[dict[str, Any]]) -> Advice | None:
    """Advise to choose among several individuals that are equally good, see `compute_margin`.

    Give no advice if only one individual is certainly as good as the best. If none is, advise to use more seeds.
    """
    seeds, first, margin = result.manifest.confirm_seeds, entries[0], compute_margin(entries) or 0.0
    given = f"With {format_count(seeds, 'other seed')} each"
    deviation = f"{format_number(margin)}, one standard deviation by seeds"
    good = [entry for entry in entries if entry["as_good"]]
    if len(good) > 1:
        return Advice(
            "confirm",
            f"Take the cheapest of trials {format_list((entry['trial'] for entry in good), len(good))}.",
            f"{given}, they are as good as the best within {deviation}.",
        )
    if good:
        return None
    choice = f"take trial {first['trial']}"
    if first["worse_by_at_most"] is not None:
        choice += f", which is worse than the best by {format_number(first['worse_by_at_most'])} at most"
    possible = format_list(entry["trial"] for entry in entries if entry["may_be_best"])
    why = f"{given}, trials {possible} may be the best, and none is certain to be as good within {deviation}."
    most = max(_MAX_SEEDS, 2 * seeds)
    needed = count_seeds_needed(entries, most)
    if needed is None:
        return Advice("confirm", f"{choice[0].upper()}{choice[1:]}.", f"{why} That would need more than {most} seeds.")
    return Advice("confirm", f"Confirm with {needed} seeds, or {choice}.", why, result.format_confirm_command(needed))
