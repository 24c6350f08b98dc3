"""All rules in one place. Each seldom speaks without a cause; where nothing follows, nothing is said."""

from __future__ import annotations

from hpo.results.advice.bounds import on_bounds
from hpo.results.advice.result import Advice, Result
from hpo.results.advice.search import too_few_epochs, too_many_evaluations
from hpo.results.advice.seeds import confirm_winner
from hpo.results.advice.workers import broken_workers, idle_workers

_RULES = (broken_workers, confirm_winner, on_bounds, too_few_epochs, too_many_evaluations, idle_workers)


def advice_on(result: Result) -> list[Advice]:
    """Return what follows from a result, the most urgent first."""
    return [one for rule in _RULES if (one := rule(result)) is not None]
