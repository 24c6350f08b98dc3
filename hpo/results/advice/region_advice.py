"""Advise on the region of the search space in which evaluations fail."""

from __future__ import annotations

from hpo.results.advice.run_result import Advice, RunResult, format_list
from hpo.results.failure_region import find_failure_kinds, find_failure_region
from hpo.text_format import cut_text, make_show_command

_MAX_REASON_LENGTH = 80


def advise_on_failure_region(result: RunResult) -> Advice | None:
    """Advise to exclude the region in which most failures lie, or to make its evaluations possible.

    It is the region of the most frequent reason that has a region, and otherwise the region of all failures.
    """
    kinds = find_failure_kinds(result.evaluations, result.distributions)
    kind = next((kind for kind in kinds if kind.region is not None), None)
    every_failure = [evaluation for each in kinds for evaluation in each.failed]
    region = kind.region if kind else find_failure_region(result.evaluations, result.distributions, every_failure)
    if region is None:
        return None
    last = region.failed[-1]
    conditions, reason = format_list(region.conditions), cut_text(last.failure or "", _MAX_REASON_LENGTH)
    is_one_of_several = kind is not None and len(kinds) > 1
    all_failed = f"{region.all_failed} failures" + (" for one reason" if is_one_of_several else "")
    return Advice(
        "failures",
        f"Exclude {conditions} from the search space, or make such evaluations possible.",
        f"{len(region.failed)} of {all_failed} have {conditions}, and "
        f"{len(region.failed)} of the {region.ended} evaluations there failed{' for it' if is_one_of_several else ''}. "
        f"The latest failure there is {reason}.",
        make_show_command(result.run_dir, last.label),
    )
