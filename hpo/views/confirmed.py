"""The best individuals, trained again with other seeds: a table, and which of them are as good as the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.results.advice.result import listed
from hpo.text import number, numbers, show_command
from hpo.views.individuals import individuals_text, names_told_apart

_METHOD = "95% confidence, Hsu's multiple comparisons with the best"
_ANSWERS = {True: "yes", False: "no", None: ""}


def confirmed_table(summary: Mapping[str, Any], run_dir: Path) -> str:
    """Return the table of confirmed individuals."""
    entries = summary["confirmed"]
    left = [
        ("mean loss", numbers([entry["mean"] for entry in entries])),
        ("deviation", [_known(entry["deviation"]) for entry in entries]),
        ("seeds", [str(len(entry["losses"]) + entry["failed"]) for entry in entries]),
        ("failed", [str(entry["failed"] or "") for entry in entries]),
        ("loss before", numbers([entry["loss"] for entry in entries])),
    ]
    right = [
        ("trial", [str(entry["trial"]) for entry in entries]),
        ("may be best", [_ANSWERS[entry["may_be_best"]] for entry in entries]),
        ("worse by at most", [_known(entry["worse_by_at_most"]) for entry in entries]),
    ]
    more = show_command(run_dir, str(entries[0]["trial"]))
    params = [entry["params"] for entry in entries]
    return individuals_text("Confirmed with other seeds", params, left, right, more, names_told_apart(summary))


def confirmed_sentences(summary: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return which individuals may be the best, which are as good, and what seeds do to losses, as far as is known.

    `names` are what to call the individuals in `summary["confirmed"]`.
    """
    noise = summary["seed_noise"]
    sentences = _compared(summary["confirmed"], summary["as_good_within"], names)
    if noise:
        sentences.append(
            f"Seeds make {noise['share']:.0%} of the variance of these losses: those of one individual have a "
            f"standard deviation of {number(noise['deviation'])}."
        )
    return sentences


def _compared(entries: Sequence[Mapping[str, Any]], margin: float | None, names: Sequence[str]) -> list[str]:
    if len(entries) < 2:
        return ["There is nothing to compare it with: --top-n 3 would confirm three."] if entries else []
    if margin is None:
        others_failed = all(entry["failed"] > entries[0]["failed"] for entry in entries[1:])
        reason = "All others failed more often" if others_failed else "There are too few losses"
        return [f"{reason}: nothing is compared with the best."]
    candidates = [name for name, entry in zip(names, entries, strict=True) if entry["may_be_best"]]
    good = [name for name, entry in zip(names, entries, strict=True) if entry["as_good"]]
    if len(candidates) == 1:
        sentences = [f"{_capitalized(candidates[0])} is the best of these ({_METHOD})."]
    else:
        rest = "" if len(candidates) == len(entries) else ", and no other one"
        sentences = [f"{_capitalized(listed(candidates, len(candidates)))} may be the best{rest} ({_METHOD})."]
    within = f"as good as the best within {number(margin)}, one standard deviation by seeds"
    if len(good) > 1:
        sentences.append(f"{_capitalized(listed(good, len(good)))} are {within}.")
    elif not good:
        excess = entries[0]["worse_by_at_most"]
        known = "" if excess is None else f": {names[0]} is at most {number(excess)} worse"
        sentences.append(f"None is certain to be {within}{known}.")
    elif len(candidates) > 1:
        sentences.append(f"Only {good[0]} is certain to be {within}.")
    return sentences


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _known(figure: float | None) -> str:
    return "" if figure is None else number(figure)
