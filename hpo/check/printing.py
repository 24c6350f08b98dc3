"""Print the output of a check: a headline, a table of the evaluations, and the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hpo.check.check_evaluator import MAX_LOSSES, CheckOutcome
from hpo.check.finding import Finding
from hpo.text_format import format_count, format_number, format_tenths, make_printable
from hpo.views.table_format import format_table, make_table

_LINE_WIDTH = 100  # Findings are wrapped at this width, in characters.
_MEBIBYTE = 1 << 20


def print_headline(description: str, ranks: int) -> None:
    """Print which evaluation is checked and on how many ranks."""
    where = "once again, and on 1 rank" if ranks > 1 else "and once again"
    print(make_printable(description))
    print(f"on {format_count(ranks, 'rank')}, {where}; {MAX_LOSSES} losses each at most\n", flush=True)


def print_outcomes(outcomes: Sequence[CheckOutcome]) -> None:
    """Print a table with a row for each evaluation."""
    columns = [("", [_name_outcome(outcomes, index) for index in range(len(outcomes))])]
    for epoch in range(max(len(outcome.losses) for outcome in outcomes)):
        cells = [format_number(outcome.losses[epoch]) if epoch < len(outcome.losses) else "" for outcome in outcomes]
        columns.append((f"loss {epoch + 1}", cells))
    columns += [
        ("steps", [_format_steps(outcome) for outcome in outcomes]),
        ("seconds", [format_tenths(outcome.traces[0].seconds) for outcome in outcomes]),
        ("MiB per rank", [_format_memory(outcome) for outcome in outcomes]),
    ]
    table = make_table(columns)
    table.columns[0].justify = "left"
    print(format_table("", table).lstrip("\n"))


def print_findings(points: Sequence[Finding]) -> None:
    """Print the findings, and the number of wrong ones."""
    for point in points:
        lines = textwrap.wrap(make_printable(point.text), _LINE_WIDTH - 7)
        lines += textwrap.wrap(make_printable(point.advice), _LINE_WIDTH - 7)
        for first, line in enumerate(lines):
            print(f"{point.level if first == 0 else '':5}  {line}")
    wrong = sum(point.level == "wrong" for point in points)
    looks = sum(point.level == "look" for point in points)
    look = f"{format_count(looks, 'finding')} to look at" if looks else ""
    if wrong:
        print(f"\n{format_count(wrong, 'finding')} wrong{', ' if look else ''}{look}", flush=True)
    else:
        print(f"\nNothing is wrong{', ' if look else ''}{look}", flush=True)


def _name_outcome(outcomes: Sequence[CheckOutcome], index: int) -> str:
    ranks = outcomes[index].ranks
    name = format_count(ranks, "rank")
    return f"{name}, again" if any(outcome.ranks == ranks for outcome in outcomes[:index]) else name


def _format_steps(outcome: CheckOutcome) -> str:
    """Return the number of optimizer steps from each loss to the next as text, separated by spaces.

    If all are equal, return one number. If none were recorded, return the number of all steps.
    """
    until = outcome.traces[0].steps_at_losses
    steps = [after - before for before, after in zip([0, *until], until, strict=False)]
    if not steps:
        return str(outcome.traces[0].steps)
    return str(steps[0]) if len(set(steps)) == 1 else " ".join(map(str, steps))


def _format_memory(outcome: CheckOutcome) -> str:
    return " ".join(f"{trace.memory / _MEBIBYTE:.0f}" for trace in outcome.traces)
