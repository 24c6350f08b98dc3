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
    evaluation = details.evaluation
    title = f"trial {evaluation.label} of {run_dir}: {_describe_state(details)}{f' ({reason})' if reason else ''}"
    facts = [(name, make_printable(text)) for name, text in _list_facts(details, now)]
    lines = [make_printable(title), "", *(f"{name:{_LABEL_WIDTH}}{text}".rstrip() for name, text in facts)]
    lines += _indent_lines(_format_losses(evaluation.curve))
    if details.log_end and details.log_end.lines:
        lines += ["", make_printable(f"what it printed, {_describe_log(details.log_end)}:")]
        lines += _indent_lines(line for text in details.log_end.lines for line in split_printable_lines(text))
    if evaluation.traceback:
        lines += ["", "traceback:", *_indent_lines(split_printable_lines(evaluation.traceback))]
    return lines


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _describe_state(details: EvaluationDetails) -> str:
    """Return how the evaluation ended, or what becomes of it."""
    evaluation, again = details.evaluation, details.retried_by
    if evaluation.state == "interrupted":
        return (
            "interrupted"
            if again is None
            else f"interrupted, and repeated as trial {_format_other_trial(evaluation, again)}"
        )
    if evaluation.state in ("paused", "promoted"):
        paused = f"paused after {format_count(evaluation.paused_after, 'epoch')}"
        return paused if again is None else f"{paused}, and promoted: it goes on as trial {again}"
    if evaluation.state == "complete" and evaluation.cut_after:
        return f"complete, ended after {format_count(evaluation.cut_after, 'epoch')} at the target loss"
    if evaluation.state == "running" and details.in_use is None:
        return "running, or the run has died: that cannot be told from this host"
    if evaluation.state in ("running", "waiting") and details.in_use is False:
        state = "not ended" if evaluation.state == "running" else "waiting"
        return f"{state}: no run is going on there; --resume evaluates it"
    return evaluation.state


def _list_facts(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    """Yield names and texts, one pair per line; a line without a name belongs to the one above it."""
    evaluation = details.evaluation
    if evaluation.state == "failed":
        yield "failure", evaluation.failure or "no reason was recorded"
    if math.isfinite(evaluation.loss):
        yield "loss", f"{evaluation.loss}"
    if details.is_on_front is not None and evaluation.state == "complete" and evaluation.confirms is None:
        yield "front", _describe_front(details)
    yield from _list_items("metrics", [f"{name} = {metric}" for name, metric in evaluation.metrics.items()])
    yield from _list_items("parameters", [f"{name} = {item}" for name, item in evaluation.params.items()])
    yield from _list_origin(details)
    if details.seed is not None:
        yield "seed", str(details.seed)
    yield from _list_times(details, now)
    if evaluation.state == "failed" and not evaluation.traceback:
        yield "traceback", "none was recorded"
    if details.log_end is None and evaluation.state != "waiting" and not evaluation.imported_from:
        yield "logs", "nothing was kept"
    if details.log_end is not None and details.log_end.problem:
        yield "logs", f"{details.log_end.path} cannot be read: {details.log_end.problem}"
    yield "losses", _summarize_losses(evaluation.curve)


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
    evaluation = details.evaluation
    location = f"island {evaluation.island}, worker {evaluation.worker}"
    if evaluation.imported_from:
        yield "imported from", f"{evaluation.imported_from}, to {location}"
    elif evaluation.confirms is not None:
        on_worker = "" if evaluation.state == "waiting" else f"; on {location}"
        yield "confirms", f"trial {evaluation.confirms}, with another seed{on_worker}"
    elif evaluation.state != "waiting":
        yield "bred", f"{location}, generation {evaluation.generation}, propagator {evaluation.propagator or 'unknown'}"
    if evaluation.immigrants:
        counts = [f"{count} of island {island}" for island, count in evaluation.immigrants.items()]
        yield "immigrants", f"{', '.join(counts)} lived on its island when it began"
    if evaluation.inherits is not None:
        yield "inherits", f"what trial {evaluation.inherits} had learned when it ended"
    if evaluation.retry_of is not None:
        yield (
            "retry of",
            f"trial {_format_other_trial(evaluation, evaluation.retry_of)}, which was {details.retried_state}",
        )
    if evaluation.crash_count:
        yield (
            "crashes",
            f"the job had crashed {format_count(evaluation.crash_count, 'time')} in a row during it before this",
        )
    if evaluation.resumed_from_step:
        yield (
            "resumed",
            f"from the checkpoint of that trial, after {format_count(evaluation.resumed_from_step, 'epoch')}",
        )
    yield from _list_items(
        "worker groups", [_describe_group(group["workers"], group["after"]) for group in evaluation.worker_groups]
    )
    if evaluation.checkpoint_step and evaluation.state in ("running", "interrupted"):
        yield "checkpoint", f"after {format_count(evaluation.checkpoint_step, 'epoch')}"
    yield from _list_items(
        "confirmed by",
        [f"{confirmation.label}: {_format_result(confirmation)}" for confirmation in details.confirmed_by],
    )


def _describe_group(workers: Sequence[int], after: int) -> str:
    some = f"workers {', '.join(map(str, workers))} together"
    return f"after {format_count(after, 'epoch')}: {some if len(workers) > 1 else f'worker {workers[0]} alone again'}"


def _list_times(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    evaluation = details.evaluation
    if math.isfinite(evaluation.started):
        yield "started", format_date(evaluation.started)
    if math.isfinite(evaluation.ended):
        before = (
            f", {format_duration(evaluation.seconds_before)} of it before it went on"
            if evaluation.seconds_before
            else ""
        )
        yield (
            "ended",
            format_date(evaluation.ended)
            + (f", after {format_duration(evaluation.seconds)}{before}" if evaluation.has_ended else ""),
        )
    elif evaluation.state == "running" and details.in_use and math.isfinite(evaluation.started):
        yield "ended", f"not yet, after {format_duration(now - evaluation.started)}"


def _list_items(name: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name if index == 0 else "", text) for index, text in enumerate(texts))


def _format_other_trial(evaluation: Evaluation, trial: int) -> str:
    """Return the label of another trial of the same study."""
    return str(trial) if evaluation.confirms is None else f"confirm-{trial}"


def _format_result(evaluation: Evaluation) -> str:
    return format_number(evaluation.loss) if evaluation.state == "complete" else evaluation.state


def _summarize_losses(curve: Mapping[int, float]) -> str:
    if not curve:
        return "none was reported"
    lowest = min(curve, key=lambda epoch: _make_comparable(curve[epoch]))
    shown = f"; {len(_choose_epochs(curve))} are shown, --json has all" if len(curve) > _MAX_LOSSES else ""
    return f"{format_count(len(curve), 'epoch')}, the lowest {format_number(curve[lowest])} after epoch {lowest}{shown}"


def _format_losses(curve: Mapping[int, float]) -> list[str]:
    """Return losses as lines, each behind its epoch, several in a line."""
    cells = [(str(epoch), format_number(curve[epoch])) for epoch in _choose_epochs(curve)]
    wide, wider = (max((len(cell[index]) for cell in cells), default=0) for index in (0, 1))
    texts = [f"{epoch:>{wide}}  {loss:<{wider}}" for epoch, loss in cells]
    rows = [texts[index : index + _LOSSES_PER_LINE] for index in range(0, len(texts), _LOSSES_PER_LINE)]
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


def _describe_log(log_end: LogTail) -> str:
    before = f"its last lines, after {log_end.lines_before} others in " if log_end.lines_before else ""
    return f"{before}{log_end.path}"
