"""Apply all rules that give advice. Each rule has a low rate of false alarms."""

from __future__ import annotations

from hpo.results.advice.bound_advice import advise_wider_space
from hpo.results.advice.budget_advice import advise_more_epochs, advise_more_evaluations, advise_stop
from hpo.results.advice.region_advice import advise_on_failure_region
from hpo.results.advice.run_result import Advice, RunResult
from hpo.results.advice.seed_advice import advise_confirmation
from hpo.results.advice.worker_advice import advise_on_broken_workers, advise_on_idle_workers

_RULES = (
    advise_on_broken_workers,
    advise_on_failure_region,
    advise_confirmation,
    advise_wider_space,
    advise_more_epochs,
    advise_stop,
    advise_more_evaluations,
    advise_on_idle_workers,
)


def find_advice(result: RunResult) -> list[Advice]:
    """Return the advice that follows from the result of a run, the most urgent first."""
    return [advice for rule in _RULES if (advice := rule(result)) is not None]
