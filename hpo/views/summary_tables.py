"""Print the results of a run as tables, and a table of its failed evaluations."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from hpo.results.advice import Advice
from hpo.results.display_names import collect_names, name_params
from hpo.results.failures import FailureGroup, format_reason
from hpo.results.summary import COUNTED_STATES, Summary
from hpo.store.evaluations import Evaluation
from hpo.text_format import (
    cut_text,
    format_count,
    format_duration,
    format_number,
    format_numbers,
    format_tenths,
    format_value,
    make_printable,
    make_show_command,
)
from hpo.views.result_text import (
    RESERVED_COLUMNS,
    describe_confirmed,
    describe_front,
    describe_hypervolume,
    format_cost,
    format_expected_loss,
    format_trial,
    make_improved_heading,
    make_prior_columns,
    make_rung_columns,
    name_columns,
    select_front_rows,
)
from hpo.views.tables import (
    MAX_HYPERPARAMETERS,
    format_individuals,
    format_table,
    make_empty_table,
    make_table,
)

_MAX_REASONS = 10
_MAX_FRONT_ROWS = 20  # rows in the table of the front, or --top-n if that is larger
_LINE_WIDTH = 100  # characters per line of sentences
_MAX_CHANGED = 8  # changed hyperparameters in the table of the lineage
# Characters of the column of failures, even if the table is then wider than the terminal.
_MIN_FAILURE_WIDTH = 40
_LONGEST_VALUE = 24
_GAP = 3  # characters between columns


def print_tables(
    summary: Summary, run_dir: Path, shows_expected_loss: bool = False, is_active: bool = True
) -> None:
    """Print the best individuals of the run, details, and the counts of evaluations.

    `is_active` is whether the run may be active.
    """
    print(_format_best(summary, run_dir, shows_expected_loss))
    if summary.confirmed:
        print(_format_confirmed(summary, run_dir))
        if not summary.unconfirmed:
            lines = (
                textwrap.fill(sentence, _LINE_WIDTH) for sentence in describe_confirmed(summary)
            )
            print(*lines, "", sep="\n")
    islands = summary.islands if len(summary.islands) > 1 else {}
    for island, best in islands.items():
        if best:
            print(_format_entries(f"Island {island}", best, summary, run_dir))
    if len(summary.propagators) > 1:
        print(_format_propagators(summary))
    if summary.priors:
        print(format_table("Priors", make_table(make_prior_columns(summary.priors))))
    if summary.lineage:
        print(_format_ancestry(summary.lineage))
    if summary.rungs:
        print(format_table("Rungs, in epochs", make_table(make_rung_columns(summary.rungs))))
    if summary.failures:
        print(_format_failure_reasons(summary.failures, run_dir))
    print(format_totals(summary, is_active))


def format_totals(summary: Summary, is_active: bool) -> str:
    """Return the counts of evaluations, and their cost."""
    counts = summary.counts
    words = {"paused": "not promoted"} if summary.is_over else {}
    words |= {} if is_active else {"running": "running when the run ended"}
    states = [
        f"{counts[state]} {words.get(state, state)}" for state in COUNTED_STATES if counts[state]
    ]
    if summary.waiting:
        states.append(f"{summary.waiting} waiting to be evaluated")
    confirming = f"; {summary.unconfirmed} to confirm the best" if summary.unconfirmed else ""
    imported = f"; {summary.imported} imported" if summary.imported else ""
    # A run can be resumed with a budget below its number of evaluations.
    listed = sum(counts[state] for state in COUNTED_STATES) + summary.waiting
    budget = f", of {counts['budget']}" if listed <= counts["budget"] else ""
    counted = f"{', '.join(states) or 'no evaluations'}{budget}{confirming}{imported}"
    return "\n".join(filter(None, [counted, format_cost(summary.cost)]))


def print_times(wall_seconds: float, worker_busy_fraction: float) -> None:
    """Print the wall time of a session, and the fraction of it in which workers were busy."""
    # The wall time is negative if the clock was set back.
    took = f"{format_duration(wall_seconds)}; " if wall_seconds >= 0 else ""
    busy = f"{worker_busy_fraction:.1%} of the time from the first evaluation to the last"
    print(f"{took}workers busy {busy}")


def print_advice(advice: Sequence[Advice]) -> None:
    """Print recommended next steps, if any, each with its evidence and command."""
    lines = ["", "What to do next"] if advice else []
    for item in advice:
        for text, first in ((item.text, "- "), (item.evidence, "  ")):
            lines += textwrap.wrap(
                make_printable(text), _LINE_WIDTH, initial_indent=first, subsequent_indent="  "
            )
        lines += [f"      {make_printable(item.command)}"] if item.command else []
    if lines:
        print("\n".join(lines))


def _format_best(summary: Summary, run_dir: Path, shows_expected_loss: bool) -> str:
    if summary.front:
        return _format_front(summary, run_dir)
    if summary.top:
        title = "All islands" if len(summary.islands) > 1 else "The best"
        text = _format_entries(title, summary.top, summary, run_dir)
        if not shows_expected_loss or summary.confirmed:
            return text
        expected = textwrap.wrap(format_expected_loss(summary), _LINE_WIDTH)
        return text + "".join(f"{line}\n" for line in expected)
    return "No evaluation succeeded.\n"


def _format_front(summary: Summary, run_dir: Path) -> str:
    """Return the table of the Pareto front; of a long front, individuals that are far apart."""
    objectives = summary.run.objectives
    front = summary.front
    shown, ties = select_front_rows(front, objectives, max(_MAX_FRONT_ROWS, len(summary.top)))
    lines = []
    if rest := len(front) - len(shown):
        command = f"hpo top {shlex.quote(str(run_dir))} -n {len(front)}"
        hint = "; +1 is another trial with the same values" if ties else ""
        count = format_count(rest, "other")
        lines.append(make_printable(f"{count} of the front: {command} shows all{hint}"))
    for sentence in (
        describe_front(len(front), objectives),
        describe_hypervolume(summary.hypervolume, objectives),
    ):
        lines += textwrap.wrap(make_printable(sentence), _LINE_WIDTH)
    table = _format_entries("The Pareto front", shown, summary, run_dir, ties)
    return "\n".join([table + lines[0], *lines[1:], ""])


def _format_entries(
    title: str,
    entries: Sequence[Evaluation],
    summary: Summary,
    run_dir: Path,
    ties: Mapping[int, int] | None = None,
) -> str:
    params = [entry.params for entry in entries]
    metrics, _ = name_columns(
        entries, collect_names(params), summary.run.objectives, RESERVED_COLUMNS
    )
    left = [
        ("loss", format_numbers([entry.loss for entry in entries])),
        *(
            (heading, format_numbers([entry.metrics.get(name) for entry in entries]))
            for name, heading in metrics.items()
        ),
    ]
    right = [
        ("trial", [format_trial(entry.trial, ties or {}) for entry in entries]),
        ("island", [str(entry.island) for entry in entries]),
        ("worker", [str(entry.worker) for entry in entries]),
        ("generation", [str(entry.generation) for entry in entries]),
        ("seconds", [format_tenths(entry.seconds) for entry in entries]),
    ]
    if any(entry.inherits is not None for entry in entries):
        parents = ["" if entry.inherits is None else f"from {entry.inherits}" for entry in entries]
        right.append(("inherits", parents))
    if any(entry.imported_from for entry in entries):
        right.append(("imported from", [entry.imported_from for entry in entries]))
    more = make_show_command(run_dir, str(entries[0].trial))
    return format_individuals(title, params, left, right, more, summary)


def _format_confirmed(summary: Summary, run_dir: Path) -> str:
    """Return a table of the confirmed individuals, with mean and deviation of losses over seeds."""
    entries = summary.confirmed
    searched = [summary.get_evaluation(entry.trial) for entry in entries]
    answers = {True: "yes", False: "no", None: ""}
    left = [
        ("mean loss", format_numbers([entry.mean for entry in entries])),
        ("deviation", [_format_optional(entry.deviation) for entry in entries]),
        ("seeds", [str(len(entry.losses) + entry.failed) for entry in entries]),
        ("failed", [str(entry.failed or "") for entry in entries]),
        ("loss before", format_numbers([evaluation.loss for evaluation in searched])),
    ]
    right = [
        ("trial", [str(entry.trial) for entry in entries]),
        ("may be best", [answers[entry.may_be_best] for entry in entries]),
        ("worse by at most", [_format_optional(entry.worse_by_at_most) for entry in entries]),
    ]
    return format_individuals(
        "Confirmed with other seeds",
        [evaluation.params for evaluation in searched],
        left,
        right,
        make_show_command(run_dir, str(entries[0].trial)),
        summary,
    )


def _format_optional(number: float | None) -> str:
    return "" if number is None else format_number(number)


def _format_propagators(summary: Summary) -> str:
    entries = summary.propagators
    columns = [
        ("propagator", [entry.propagator for entry in entries]),
        ("evaluations", [str(entry.evaluations) for entry in entries]),
        (make_improved_heading(summary.run.objectives), [str(e.improved) for e in entries]),
        ("own best", [_format_optional(entry.best) for entry in entries]),
    ]
    table = make_table(columns)
    table.columns[0].justify = "left"
    return format_table("Propagators", table)


def _format_ancestry(ancestry: Sequence[Evaluation]) -> str:
    """Return a table of the best and its ancestors, with the hyperparameters that changed."""
    names = collect_names(evaluation.params for evaluation in ancestry)
    columns = [
        ("trial", [str(evaluation.trial) for evaluation in ancestry]),
        ("epochs", [str(len(evaluation.curve)) for evaluation in ancestry]),
        ("loss", format_numbers([evaluation.loss for evaluation in ancestry])),
    ]
    values = {name: [evaluation.params.get(name, "") for evaluation in ancestry] for name in names}
    changed = [name for name in names if len(set(values[name])) > 1]
    columns += [(name, list(map(format_value, values[name]))) for name in changed[:_MAX_CHANGED]]
    return format_table(
        "Lineage of the best: each trial began with the checkpoint of the trial above",
        make_table(columns),
    )


def _format_failure_reasons(kinds: Sequence[FailureGroup], run_dir: Path) -> str:
    table = make_empty_table()
    table.add_column("count", justify="right")
    table.add_column("reason", no_wrap=True)
    for kind in kinds[:_MAX_REASONS]:
        table.add_row(str(len(kind.failed)), cut_text(make_printable(kind.reason)))
    if rest := kinds[_MAX_REASONS:]:
        table.add_row(str(sum(len(kind.failed) for kind in rest)), f"{len(rest)} other reasons")
    latest = kinds[0].latest
    more = "the traceback" if "Traceback (most recent" in latest.traceback else "more of it"
    return format_table(
        "Failures", table, f"{make_show_command(run_dir, latest.label)} shows {more}"
    )


def format_failed(failed: Sequence[Evaluation], n: int, run_dir: Path) -> list[str]:
    """Return a table of the latest `n` failed evaluations, and a command that shows more.

    The evaluations are sorted, the latest failure first.
    """
    if not failed:
        return ["No evaluation failed."]
    shown = failed[:n]
    width = max(map(cell_len, format_table("", _make_failure_table(shown)).split("\n")))
    reasons = [make_printable(format_reason(evaluation)) for evaluation in shown]
    if sys.stdout.isatty():
        longest = max(_MIN_FAILURE_WIDTH, shutil.get_terminal_size().columns - width - _GAP)
        texts = [Text(reason) for reason in reasons]
        for text in texts:
            text.truncate(longest, overflow="ellipsis")
        reasons = [text.plain for text in texts]
    # The right edge of the table is a space.
    whole = width + _GAP + max(map(cell_len, ["failure", *reasons])) + 1
    table = format_table("Failed", _make_failure_table(shown, reasons), width=whole)
    latest = shown[0].label
    more = f"{make_show_command(run_dir, latest)} shows everything about trial {latest}"
    if (many := len(_find_param_names(shown))) > MAX_HYPERPARAMETERS:
        more += f", including its {many} hyperparameters"
    count = f"all {len(failed)} failures" if len(failed) > 1 else "the only failure"
    if len(shown) < len(failed):
        latest_ones = f"the latest {len(shown)}" if len(shown) > 1 else "the latest"
        count = f"{latest_ones} of {len(failed)} failures"
    return [table, make_printable(f"{count}; {more}")]


def _make_failure_table(failed: Sequence[Evaluation], reasons: Sequence[str] = ()) -> Table:
    columns = [
        ("trial", [evaluation.label for evaluation in failed]),
        ("island", [str(evaluation.island) for evaluation in failed]),
        ("worker", [str(evaluation.worker) for evaluation in failed]),
        ("seconds", [format_tenths(evaluation.seconds) for evaluation in failed]),
        ("epochs", [str(max(evaluation.curve, default=0)) for evaluation in failed]),
    ]
    names = name_params(_find_param_names(failed), [*(name for name, _ in columns), "failure"])
    if len(names) <= MAX_HYPERPARAMETERS:  # More columns would leave no space for the reasons.
        for name, shown in names.items():
            values = [format_value(evaluation.params.get(name, "")) for evaluation in failed]
            columns.append((shown, [cut_text(value, _LONGEST_VALUE) for value in values]))
    if not reasons:
        return make_table(columns)
    table = make_table([*columns, ("failure", list(reasons))])
    table.columns[-1].justify = "left"
    return table


def _find_param_names(failed: Sequence[Evaluation]) -> list[str]:
    return collect_names(evaluation.params for evaluation in failed)
