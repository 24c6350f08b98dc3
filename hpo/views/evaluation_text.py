"""Everything about one evaluation, as text: what it was, how it ended, its losses, what it printed, its traceback."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpo.store.evaluations import Evaluation
from hpo.store.output_log import LogTail
from hpo.text_format import (
    format_count,
    format_date,
    format_duration,
    format_number,
    make_printable,
    split_printable_lines,
)
from hpo.views.evaluation_details import EvaluationDetails

_LABEL_WIDTH = 14  # columns
_LOSSES_PER_LINE = 5
_MAX_LOSSES = 50
_INDENT = "    "


def format_evaluation(details: EvaluationDetails, run_dir: Path, reason: str, now: float) -> list[str]:
    """Return all that is known of an evaluation as lines; `why` says why it was chosen, empty if it was named."""
    one = details.evaluation
    title = f"trial {one.label} of {run_dir}: {_describe_state(details)}{f' ({reason})' if reason else ''}"
    facts = [(name, make_printable(text)) for name, text in _list_facts(details, now)]
    lines = [make_printable(title), "", *(f"{name:{_LABEL_WIDTH}}{text}".rstrip() for name, text in facts)]
    lines += _indent_lines(_format_losses(one.curve))
    if details.log_end and details.log_end.lines:
        lines += ["", make_printable(f"what it printed, {_describe_log(details.log_end)}:")]
        lines += _indent_lines(line for text in details.log_end.lines for line in split_printable_lines(text))
    if one.traceback:
        lines += ["", "traceback:", *_indent_lines(split_printable_lines(one.traceback))]
    return lines


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _describe_state(details: EvaluationDetails) -> str:
    """Return how the evaluation ended, or what becomes of it."""
    one, again = details.evaluation, details.retried_by
    if one.state == "interrupted":
        return (
            "interrupted" if again is None else f"interrupted, and repeated as trial {_format_other_trial(one, again)}"
        )
    if one.state in ("paused", "promoted"):
        paused = f"paused after {format_count(one.paused_after, 'epoch')}"
        return paused if again is None else f"{paused}, and promoted: it goes on as trial {again}"
    if one.state == "complete" and one.cut_after:
        return f"complete, ended after {format_count(one.cut_after, 'epoch')} at the target loss"
    if one.state == "running" and details.in_use is None:
        return "running, or the run has died: that cannot be told from this host"
    if one.state in ("running", "waiting") and details.in_use is False:
        state = "not ended" if one.state == "running" else "waiting"
        return f"{state}: no run is going on there; --resume evaluates it"
    return one.state


def _list_facts(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    """Yield names and texts, one pair per line; a line without a name belongs to the one above it."""
    one = details.evaluation
    if one.state == "failed":
        yield "failure", one.failure or "no reason was recorded"
    if math.isfinite(one.loss):
        yield "loss", f"{one.loss}"
    if details.is_on_front is not None and one.state == "complete" and one.confirms is None:
        yield "front", _describe_front(details)
    yield from _list_items("metrics", [f"{name} = {metric}" for name, metric in one.metrics.items()])
    yield from _list_items("parameters", [f"{name} = {item}" for name, item in one.params.items()])
    yield from _list_origin(details)
    if details.seed is not None:
        yield "seed", str(details.seed)
    yield from _list_times(details, now)
    if one.state == "failed" and not one.traceback:
        yield "traceback", "none was recorded"
    if details.log_end is None and one.state != "waiting" and not one.imported_from:
        yield "logs", "nothing was kept"
    if details.log_end is not None and details.log_end.problem:
        yield "logs", f"{details.log_end.path} cannot be read: {details.log_end.problem}"
    yield "losses", _summarize_losses(one.curve)


def _describe_front(details: EvaluationDetails) -> str:
    """Return whether an evaluation is on the front, and otherwise why not."""
    if details.is_on_front:
        return "on it: no other individual dominates it"
    why = (
        "" if details.dominated_by is None else f": trial {details.dominated_by} is as good or better in all objectives"
    )
    return f"not on it{why}"


def _list_origin(details: EvaluationDetails) -> Iterator[tuple[str, str]]:
    """Yield where an evaluation comes from: what bred it, or which other evaluation it belongs to."""
    one = details.evaluation
    place = f"island {one.island}, worker {one.worker}"
    if one.imported_from:
        yield "imported from", f"{one.imported_from}, to {place}"
    elif one.confirms is not None:
        yield "confirms", f"trial {one.confirms}, with another seed{'' if one.state == 'waiting' else f'; on {place}'}"
    elif one.state != "waiting":
        yield "bred", f"{place}, generation {one.generation}, propagator {one.propagator or 'unknown'}"
    if one.immigrants:
        of = [f"{count} of island {island}" for island, count in one.immigrants.items()]
        yield "immigrants", f"{', '.join(of)} lived on its island when it began"
    if one.inherits is not None:
        yield "inherits", f"what trial {one.inherits} had learned when it ended"
    if one.retry_of is not None:
        yield "retry of", f"trial {_format_other_trial(one, one.retry_of)}, which was {details.retried_state}"
    if one.crash_count:
        yield "crashes", f"the job had crashed {format_count(one.crash_count, 'time')} in a row during it before this"
    if one.resumed_from_step:
        yield "resumed", f"from the checkpoint of that trial, after {format_count(one.resumed_from_step, 'epoch')}"
    yield from _list_items(
        "worker groups", [_describe_group(team["workers"], team["after"]) for team in one.worker_groups]
    )
    if one.checkpoint_step and one.state in ("running", "interrupted"):
        yield "checkpoint", f"after {format_count(one.checkpoint_step, 'epoch')}"
    yield from _list_items(
        "confirmed by", [f"{other.label}: {_format_result(other)}" for other in details.confirmed_by]
    )


def _describe_group(workers: Sequence[int], after: int) -> str:
    some = f"workers {', '.join(map(str, workers))} together"
    return f"after {format_count(after, 'epoch')}: {some if len(workers) > 1 else f'worker {workers[0]} alone again'}"


def _list_times(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    one = details.evaluation
    if math.isfinite(one.started):
        yield "started", format_date(one.started)
    if math.isfinite(one.ended):
        before = f", {format_duration(one.seconds_before)} of it before it went on" if one.seconds_before else ""
        yield (
            "ended",
            format_date(one.ended) + (f", after {format_duration(one.seconds)}{before}" if one.has_ended else ""),
        )
    elif one.state == "running" and details.in_use and math.isfinite(one.started):
        yield "ended", f"not yet, after {format_duration(now - one.started)}"


def _list_items(name: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name if place == 0 else "", text) for place, text in enumerate(texts))


def _format_other_trial(one: Evaluation, trial: int) -> str:
    """Return the label of another trial of the same study."""
    return str(trial) if one.confirms is None else f"confirm-{trial}"


def _format_result(one: Evaluation) -> str:
    return format_number(one.loss) if one.state == "complete" else one.state


def _summarize_losses(curve: Mapping[int, float]) -> str:
    if not curve:
        return "none was reported"
    lowest = min(curve, key=lambda epoch: _make_comparable(curve[epoch]))
    shown = f"; {len(_choose_epochs(curve))} are shown, --json has all" if len(curve) > _MAX_LOSSES else ""
    return f"{format_count(len(curve), 'epoch')}, the lowest {format_number(curve[lowest])} after epoch {lowest}{shown}"


def _format_losses(curve: Mapping[int, float]) -> list[str]:
    """Return losses as lines, each behind its epoch, several in a line."""
    cells = [(str(epoch), format_number(curve[epoch])) for epoch in _choose_epochs(curve)]
    wide, wider = (max((len(cell[place]) for cell in cells), default=0) for place in (0, 1))
    texts = [f"{epoch:>{wide}}  {loss:<{wider}}" for epoch, loss in cells]
    rows = [texts[place : place + _LOSSES_PER_LINE] for place in range(0, len(texts), _LOSSES_PER_LINE)]
    return ["   ".join(row).rstrip() for row in rows]


def _choose_epochs(curve: Mapping[int, float]) -> list[int]:
    """Return the epochs to show: all, or every second, fifth, tenth... and the first, the lowest and the last."""
    epochs = sorted(curve)
    steps = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    step = next(step for step in steps if len(epochs) <= _MAX_LOSSES * step)
    lowest = min(epochs, key=lambda epoch: _make_comparable(curve[epoch]), default=0)
    return sorted({*epochs[step - 1 :: step], *epochs[:1], *epochs[-1:], *([lowest] if epochs else [])})


def _make_comparable(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _describe_log(printed: LogTail) -> str:
    before = f"its last lines, after {printed.lines_before} others in " if printed.lines_before else ""
    return f"{before}{printed.path}"
