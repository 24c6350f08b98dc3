"""Whether the best of a search lie at a bound of its space: beyond it, there may be better ones."""

from __future__ import annotations

from hpo.results.advice.edges import BEST, Edge, edges
from hpo.results.advice.result import Advice, Result, listed
from hpo.text import number, short

_LONGEST_NAME = 28


def on_bounds(result: Result) -> Advice | None:
    """Advise to widen the search space where the best lie at its bounds."""
    if result.manifest.objectives.are_several:
        return None  # the ends of a front are where losses, or something else, are the lowest
    founders = [one for one in result.ranked() if one.inherits is None]
    found = edges(founders, result.distributions)
    if not found:
        return None
    after = ", after you have changed --space" if result.has_space_in_command else ""
    return Advice(
        "bounds",
        f"Widen the search space, if such values make sense: {listed(map(_beyond, found))}.",
        f"Of the best {BEST}, {listed(map(_counted, found))}; and the nearer to it, the lower is the loss. "
        f"A new run can start from what this one knows{after}.",
        result.starting_anew("--warm-start", str(result.run_dir)),
    )


def _counted(edge: Edge) -> str:
    return f"{edge.count} have {_named(edge)} at its {'upper' if edge.upper else 'lower'} bound"


def _beyond(edge: Edge) -> str:
    return f"{_named(edge)} {'above' if edge.upper else 'below'} {number(edge.bound)}"


def _named(edge: Edge) -> str:
    return short(edge.name, _LONGEST_NAME)
