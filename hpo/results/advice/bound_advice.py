"""Advise to widen the search space if the best evaluations lie at a bound of a parameter."""

from __future__ import annotations

from hpo.results.advice.crowded_bounds import BEST_COUNT, CrowdedBound, find_crowded_bounds
from hpo.results.advice.run_result import Advice, RunResult, format_list
from hpo.text_format import cut_text, format_number

_MAX_NAME_LENGTH = 28


def advise_wider_space(result: RunResult) -> Advice | None:
    """Advise to widen the search space if the best evaluations lie at its bounds."""
    if result.manifest.objectives.is_multi_objective:
        return None  # The ends of a front lie at bounds naturally.
    founders = [evaluation for evaluation in result.rank_complete() if evaluation.inherits is None]
    found = find_crowded_bounds(founders, result.distributions)
    if not found:
        return None
    after = ", after you have changed --space" if result.has_space_in_command else ""
    return Advice(
        "bounds",
        f"Widen the search space, if such values make sense: {format_list(map(_describe_beyond, found))}.",
        f"Of the best {BEST_COUNT}, {format_list(map(_describe_count, found))}; and the nearer to it, the lower is "
        f"the loss. A new run can start from the evaluations of this run{after}.",
        result.format_new_command("--warm-start", str(result.run_dir)),
    )


def _describe_count(edge: CrowdedBound) -> str:
    return f"{edge.count} have {_shorten_name(edge)} at its {'upper' if edge.is_upper else 'lower'} bound"


def _describe_beyond(edge: CrowdedBound) -> str:
    return f"{_shorten_name(edge)} {'above' if edge.is_upper else 'below'} {format_number(edge.bound)}"


def _shorten_name(edge: CrowdedBound) -> str:
    return cut_text(edge.name, _MAX_NAME_LENGTH)
