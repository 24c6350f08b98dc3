"""Format the results of a confirmation, in which the best individuals are trained again with other seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpo.results.confirmation import ConfirmedIndividual
from hpo.results.summary import Summary
from hpo.text_format import format_list, format_number, format_numbers, make_show_command
from hpo.views.individual_table import find_important_names, format_individuals

_METHOD = "95% confidence, Hsu's multiple comparisons with the best"
_ANSWER_TEXTS = {True: "yes", False: "no", None: ""}


def format_confirmed(summary: Summary, run_dir: Path) -> str:
    """Return a table of the confirmed individuals as text, with the mean and deviation of their losses over seeds."""
    entries = summary.confirmed
    searched = [summary.get_evaluation(entry.trial) for entry in entries]
    left = [
        ("mean loss", format_numbers([entry.mean for entry in entries])),
        ("deviation", [_format_figure(entry.deviation) for entry in entries]),
        ("seeds", [str(len(entry.losses) + entry.failed) for entry in entries]),
        ("failed", [str(entry.failed or "") for entry in entries]),
        ("loss before", format_numbers([evaluation.loss for evaluation in searched])),
    ]
    right = [
        ("trial", [str(entry.trial) for entry in entries]),
        ("may be best", [_ANSWER_TEXTS[entry.may_be_best] for entry in entries]),
        ("worse by at most", [_format_figure(entry.worse_by_at_most) for entry in entries]),
    ]
    more = make_show_command(run_dir, str(entries[0].trial))
    params = [evaluation.params for evaluation in searched]
    return format_individuals(
        "Confirmed with other seeds",
        params,
        left,
        right,
        more,
        lambda: find_important_names(summary),
    )


def describe_confirmed(summary: Summary, names: Sequence[str]) -> list[str]:
    """Return sentences that compare the confirmed individuals.

    They say which individuals may be the best, which are as good as the best, and how much the loss
    depends on the seed.

    Args:
        names: A name for each individual in `summary.confirmed`, in the same order.
    """
    noise = summary.seed_noise
    sentences = describe_comparison(summary.confirmed, summary.as_good_within, names)
    if noise:
        sentences.append(
            f"Seeds make {noise.share:.0%} of the variance of these losses: those of one individual have a "
            f"standard deviation of {format_number(noise.deviation)}."
        )
    return sentences


def describe_comparison(
    entries: Sequence[ConfirmedIndividual], margin: float | None, names: Sequence[str]
) -> list[str]:
    """Return sentences that compare individuals; `margin` as in `compute_margin`."""
    if len(entries) < 2:
        return (
            ["There is nothing to compare it with: --top-n 3 would confirm three."]
            if entries
            else []
        )
    if margin is None:
        others_failed = all(entry.failed > entries[0].failed for entry in entries[1:])
        reason = "All others failed more often" if others_failed else "There are too few losses"
        return [f"{reason}: nothing is compared with the best."]
    candidates = [name for name, entry in zip(names, entries, strict=True) if entry.may_be_best]
    good = [name for name, entry in zip(names, entries, strict=True) if entry.as_good]
    if len(candidates) == 1:
        sentences = [f"{_capitalize(candidates[0])} is the best of these ({_METHOD})."]
    else:
        rest = "" if len(candidates) == len(entries) else ", and no other one"
        sentences = [
            f"{_capitalize(format_list(candidates, len(candidates)))} may be the best{rest} ({_METHOD})."
        ]
    within = f"as good as the best within {format_number(margin)}, one standard deviation by seeds"
    if len(good) > 1:
        sentences.append(f"{_capitalize(format_list(good, len(good)))} are {within}.")
    elif not good:
        excess = entries[0].worse_by_at_most
        known = "" if excess is None else f": {names[0]} is at most {format_number(excess)} worse"
        sentences.append(f"None is certain to be {within}{known}.")
    elif len(candidates) > 1:
        sentences.append(f"Only {good[0]} is certain to be {within}.")
    return sentences


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _format_figure(figure: float | None) -> str:
    return "" if figure is None else format_number(figure)
