"""The output of a check: a headline, a table of the evaluations, and the points."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hpo.check.bench import MOST_LOSSES, Outcome
from hpo.check.point import Point
from hpo.text import counted, number, printable, tenths
from hpo.views.grid import filled_table, table_text

_WIDTH = 100  # of sentences
_MEBIBYTE = 1 << 20


def print_headline(what: str, ranks: int) -> None:
    """Print what is going to be evaluated, and on how many ranks."""
    where = "once again, and on 1 rank" if ranks > 1 else "and once again"
    print(printable(what))
    print(f"on {counted(ranks, 'rank')}, {where}; {MOST_LOSSES} losses each at most\n", flush=True)


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a table with a row for each evaluation."""
    columns = [("", [_name(outcomes, place) for place in range(len(outcomes))])]
    for epoch in range(max(len(outcome.losses) for outcome in outcomes)):
        cells = [number(one.losses[epoch]) if epoch < len(one.losses) else "" for one in outcomes]
        columns.append((f"loss {epoch + 1}", cells))
    columns += [
        ("steps", [_steps(outcome) for outcome in outcomes]),
        ("seconds", [tenths(outcome.seen[0].seconds) for outcome in outcomes]),
        ("MiB per rank", [_memory(outcome) for outcome in outcomes]),
    ]
    table = filled_table(columns)
    table.columns[0].justify = "left"
    print(table_text("", table).lstrip("\n"))


def print_points(points: Sequence[Point]) -> None:
    """Print what was found, and how many points are wrong."""
    for point in points:
        lines = textwrap.wrap(printable(point.text), _WIDTH - 7)
        lines += textwrap.wrap(printable(point.advice), _WIDTH - 7)
        for first, line in enumerate(lines):
            print(f"{point.state if first == 0 else '':5}  {line}")
    wrong = sum(point.state == "wrong" for point in points)
    looks = sum(point.state == "look" for point in points)
    look = f"{counted(looks, 'point')} to look at" if looks else ""
    if wrong:
        print(f"\n{counted(wrong, 'point')} wrong{', ' if look else ''}{look}", flush=True)
    else:
        print(f"\nNothing is wrong{', ' if look else ''}{look}", flush=True)


def _name(outcomes: Sequence[Outcome], place: int) -> str:
    name = counted(outcomes[place].ranks, "rank")
    return f"{name}, again" if any(one.ranks == outcomes[place].ranks for one in outcomes[:place]) else name


def _steps(outcome: Outcome) -> str:
    """Return the optimizer's steps for each loss, or their number where that does not vary."""
    until = outcome.seen[0].until
    steps = [after - before for before, after in zip([0, *until], until, strict=False)]
    if not steps:
        return str(outcome.seen[0].steps)
    return str(steps[0]) if len(set(steps)) == 1 else " ".join(map(str, steps))


def _memory(outcome: Outcome) -> str:
    return " ".join(f"{one.memory / _MEBIBYTE:.0f}" for one in outcome.seen)
