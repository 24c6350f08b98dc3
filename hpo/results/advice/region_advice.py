"""Advise on the region of the search space in which evaluations fail."""

from __future__ import annotations

from hpo.results.advice.run_result import Advice, RunResult, format_list
from hpo.results.failure_region import find_failure_region
from hpo.text_format import cut_text, make_show_command

_MAX_REASON_LENGTH = 80


def advise_on_failure_region(result: RunResult) -> Advice | None:
    """Advise to exclude the region in which most failures lie, or to make its evaluations possible."""
    region = find_failure_region(result.evaluations, result.distributions)
    if region is None:
        return None
    failed = [e for e in result.evaluations if e.has_ended_in_run and e.state == "failed"]
    last = max(failed, key=lambda evaluation: (evaluation.ended, evaluation.trial))
    return Advice(
        "failures",
        f"Exclude {format_list(region.conditions)} from the search space, or make such evaluations possible.",
        f"{region.failed} of {len(failed)} failures have {format_list(region.conditions)}, and "
        f"{region.failed} of the {region.ended} evaluations there failed. The latest failure is "
        f"{cut_text(last.failure or '', _MAX_REASON_LENGTH)}.",
        make_show_command(result.run_dir, last.label),
    )
