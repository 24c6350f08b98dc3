"""Compare runs: their best individuals, what they cost, and why their losses may not be comparable.

The best loss of a run is the lowest of many, so that of the longer run is probably lower. Means
over other seeds (`--confirm-seeds`) can be compared, by the interval of Welch (1947).
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpo.results.confirmation import ConfirmedIndividual
from hpo.results.summary import Summary, describe_individual
from hpo.store.evaluations import Evaluation
from hpo.text_format import format_list, format_named_values, format_number
from hpo.views.tables import format_table, make_table

_LINE_WIDTH = 100
_CONFIDENCE = 0.95
_TAKE_SEED = " Scripts must take the seed, as in --seed {seed}."


def format_comparison(runs: Mapping[str, Summary]) -> str:
    """Return a table of runs, by name, and sentences that compare each one with the first."""
    (first, *others) = runs
    lines = [_format_runs(runs)]
    lines += [
        f"{name}: trial {best.trial}: {format_named_values(best.params)}"
        for name, run in runs.items()
        if (best := run.winner)
    ]
    for name in others:
        lines += ["", *_compare_runs(first, runs[first], name, runs[name])]
    return "\n".join(lines)


def make_comparison_content(runs: Mapping[str, Summary]) -> list[dict[str, Any]]:
    """Return the runs as JSON values, and how each one compares with the first."""
    first, *_ = runs
    content = []
    for name, run in runs.items():
        winner = _find_winner(run)
        compared = [] if name == first else _compare_runs(first, runs[first], name, run)
        content.append(
            {
                "run_dir": name,
                "complete": run.counts["complete"],
                "best": None if run.winner is None else describe_individual(run.winner),
                "confirmed": None if winner is None else asdict(winner),
                "rank_hours": sum(run.cost.rank_hours.values()),
                "gpu_hours": sum(run.cost.gpu_hours.values()),
                "comparison": " ".join(compared),
            }
        )
    return content


def _format_runs(runs: Mapping[str, Summary]) -> str:
    bests = [run.best for run in runs.values()]
    winners = [_find_winner(run) for run in runs.values()]
    hours = [run.cost.gpu_hours or run.cost.rank_hours for run in runs.values()]
    unit = "GPU" if any(run.cost.gpu_hours for run in runs.values()) else "rank"
    columns = [
        ("", list(runs)),
        ("complete", [str(run.counts["complete"]) for run in runs.values()]),
        ("best loss", [format_number(best.loss) if best else "" for best in bests]),
        ("trial", [str(best.trial) if best else "" for best in bests]),
        ("confirmed", [str(winner.trial) if winner else "" for winner in winners]),
        ("mean loss", [_format_number(winner.mean) if winner else "" for winner in winners]),
        ("deviation", [_format_number(winner.deviation) if winner else "" for winner in winners]),
        ("seeds", [str(len(winner.losses)) if winner else "" for winner in winners]),
        (f"{unit} hours", [f"{sum(each.values()):.3g}" for each in hours]),
    ]
    table = make_table(columns)
    table.columns[0].justify = "left"
    return format_table("", table).lstrip("\n")


def _find_winner(run: Summary) -> ConfirmedIndividual | None:
    """Return the individual with the lowest mean loss over other seeds; None without any."""
    return next(iter(run.confirmed), None)


def _format_number(value: float | None) -> str:
    return "" if value is None else format_number(value)


def _compare_runs(first: str, run: Summary, name: str, other: Summary) -> Iterator[str]:
    if run.run.objectives != other.run.objectives:
        yield f"{first} and {name} differ in their objectives: their losses cannot be compared."
        return
    for difference in _list_differences(run, other):
        yield f"{first} and {name} differ in {difference}: their losses may not be comparable."
    yield from textwrap.wrap(_compare_means(first, run, name, other), _LINE_WIDTH)
    unequal = _list_unequal(run.run.space, other.run.space)
    shared = run.run.space.keys() & other.run.space.keys()
    if names := [each for each in unequal if each in shared]:
        yield f"{first} and {name} search other values of {format_list(names)}."
    if names := [each for each in unequal if each not in shared]:
        yield f"Only one of {first} and {name} has {format_list(names)}."


def _compare_means(first: str, run: Summary, name: str, other: Summary) -> str:
    """Return a sentence about the difference of the means over other seeds."""
    for each, summary in ((first, run), (name, other)):
        if summary.best is None:
            return f"{first} and {name}: {each} has no complete evaluation."
    ours = _find_winner(run)
    theirs = _find_winner(other)
    lacks_seed = run.run.lacks_seed or other.run.lacks_seed
    open_runs = [
        each
        for each, winner in ((first, ours), (name, theirs))
        if winner is None or len(winner.losses) < 2
    ]
    if ours is None or theirs is None or open_runs:
        how = ""
        if run.run.command and other.run.command:
            how = f": --resume --confirm-seeds 5.{_TAKE_SEED if lacks_seed else ''}"
        return (
            f"{first} and {name}: the best loss of a run is the lowest of many. Before you choose "
            f"by it, train the best of {' and '.join(open_runs)} with other seeds{how or '.'}"
        )
    low, high = _compute_interval(ours, theirs)
    if low <= 0 <= high:
        return (
            f"The mean losses of {first} and {name} may be equal: with many seeds, the difference "
            f"is {format_number(low)} to {format_number(high)} ({_CONFIDENCE:.0%} confidence)."
        )
    better, worse = (first, name) if low > 0 else (name, first)
    least, most = sorted((abs(low), abs(high)))
    return (
        f"{better} is better: with many seeds, its mean loss is lower than that of {worse} by "
        f"{format_number(least)} to {format_number(most)} ({_CONFIDENCE:.0%} confidence)."
    )


def _compute_interval(
    ours: ConfirmedIndividual, theirs: ConfirmedIndividual
) -> tuple[float, float]:
    """Return the limits of the mean loss of `theirs`, less that of `ours`."""
    from scipy.stats import ttest_ind  # Takes 0.5 s to import.

    if not ours.deviation and not theirs.deviation:  # The test divides by the deviations.
        difference = theirs.losses[0] - ours.losses[0]
        return difference, difference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns if the losses of one of them are equal.
        interval = ttest_ind(theirs.losses, ours.losses, equal_var=False).confidence_interval(
            _CONFIDENCE
        )
    return float(interval.low), float(interval.high)


def _list_differences(run: Summary, other: Summary) -> Iterator[str]:
    """Yield what differs between the runs that may change the meaning of their losses."""
    ranks = [_format_ranks(each) for each in (run, other)]
    if all(ranks) and ranks[0] != ranks[1]:
        yield f"the ranks per worker ({ranks[0]} and {ranks[1]})"
    programs = [
        each.run.command.partition(" -- ")[2] or Path(each.run.search_space).name
        for each in (run, other)
    ]
    if programs[0] != programs[1]:
        yield f"the program ({programs[0]} and {programs[1]})"
    elif names := _list_unequal(_find_settings(run), _find_settings(other)):
        yield f"the setting{'s' * (len(names) > 1)} {format_list(names)}"


def _list_compared(run: Summary) -> list[Evaluation]:
    """Return the evaluations whose losses are compared: of the best, with other seeds if any."""
    winner = _find_winner(run)
    if winner:
        return [each for each in run.confirmations if each.confirms == winner.trial]
    return [run.best] if run.best else []


def _format_ranks(run: Summary) -> str:
    """Return the number of ranks that have trained the best; "" if it is not known."""
    ranks = {evaluation.ranks for evaluation in _list_compared(run) if evaluation.ranks}
    return " or ".join(map(str, sorted(ranks)))


def _find_settings(run: Summary) -> Mapping[str, object]:
    """Return the settings with which the best was trained. A resume may have changed them."""
    for evaluation in _list_compared(run):
        session = run.run.find_session(evaluation.started)
        if session and session.settings:
            return session.settings
    return run.run.settings


def _list_unequal(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
