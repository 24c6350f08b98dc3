"""Format one evaluation as text: its parameters, result, losses, output and traceback."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpo.store.evaluations import INTERRUPTED, Evaluation
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


def format_evaluation(
    details: EvaluationDetails, run_dir: Path, reason: str, now: float
) -> list[str]:
    """Return all facts about an evaluation as lines of text.

    Args:
        details: The evaluation and its facts.
        run_dir: The run directory, for the title.
        reason: Why this evaluation was chosen; "" if the user named it.
        now: Current time, in seconds since the epoch.
    """
    evaluation = details.evaluation
    title = f"trial {evaluation.label} of {run_dir}: {_describe_state(details)}"
    if reason:
        title += f" ({reason})"
    facts = [(name, make_printable(text)) for name, text in _list_facts(details, now)]
    lines = [
        make_printable(title),
        "",
        *(f"{name:{_LABEL_WIDTH}}{text}".rstrip() for name, text in facts),
    ]
    lines += _indent_lines(_format_losses(evaluation.curve))
    if details.log_end and details.log_end.lines:
        lines += ["", make_printable(f"output, {_describe_log(details.log_end)}:")]
        lines += _indent_lines(
            line for text in details.log_end.lines for line in split_printable_lines(text)
        )
    if evaluation.traceback:
        lines += ["", "traceback:", *_indent_lines(split_printable_lines(evaluation.traceback))]
    return lines


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _describe_state(details: EvaluationDetails) -> str:
    evaluation, again = details.evaluation, details.retried_by
    if evaluation.state == "interrupted":
        if evaluation.tests is not None:
            return f"a test of worker {evaluation.worker}, which repeats trial {evaluation.tests}"
        retry = ""
        if again is not None:
            retry = f", and retried as trial {_format_other_trial(evaluation, again)}"
        end = "failed on a broken worker" if _has_own_failure(evaluation) else "interrupted"
        return f"{end}{retry}"
    if evaluation.state in ("paused", "promoted"):
        paused = f"paused after {format_count(evaluation.paused_after, 'epoch')}"
        return paused if again is None else f"{paused}, and promoted: it continues as trial {again}"
    if evaluation.state == "complete" and evaluation.cut_after:
        epochs = format_count(evaluation.cut_after, "epoch")
        return f"complete, ended after {epochs} at the target loss"
    if evaluation.state == "running" and details.in_use is None:
        return "running, or the run has crashed: this host cannot see which"
    if evaluation.state in ("running", "waiting") and details.in_use is False:
        state = "not ended" if evaluation.state == "running" else "waiting"
        return f"{state}: the run is not active; --resume evaluates it"
    return evaluation.state


def _has_own_failure(evaluation: Evaluation) -> bool:
    """Return whether it has failed, even if it is retried because its worker was broken."""
    return evaluation.failure not in (None, INTERRUPTED)


def _list_facts(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each line. The name is "" for later lines of a fact."""
    evaluation = details.evaluation
    is_search = evaluation.confirms is None
    if evaluation.state == "failed" or _has_own_failure(evaluation):
        yield "failure", evaluation.failure or "no reason was recorded"
    if math.isfinite(evaluation.loss):
        yield "loss", f"{evaluation.loss}"
    if details.is_on_front is not None and evaluation.state == "complete" and is_search:
        yield "front", _describe_front(details)
    yield from _list_items("metrics", [f"{name} = {m}" for name, m in evaluation.metrics.items()])
    yield from _list_items("parameters", [f"{name} = {p}" for name, p in evaluation.params.items()])
    yield from _list_origin(details)
    if details.seed is not None:
        yield "seed", str(details.seed)
    yield from _list_times(details, now)
    if evaluation.state == "failed" and not evaluation.traceback:
        yield "traceback", "none was recorded"
    log_end = details.log_end
    if log_end is None and evaluation.state != "waiting" and not evaluation.imported_from:
        yield "logs", "nothing was kept"
    if log_end is not None and log_end.problem:
        yield "logs", f"{log_end.path} cannot be read: {log_end.problem}"
    yield "losses", _summarize_losses(evaluation.curve)


def _describe_front(details: EvaluationDetails) -> str:
    if details.is_on_front:
        return "on it: no other individual dominates it"
    if details.dominated_by is None:
        return "not on it"
    return f"not on it: trial {details.dominated_by} is as good or better in all objectives"


def _list_origin(details: EvaluationDetails) -> Iterator[tuple[str, str]]:
    """Yield facts about the origin of an evaluation, and its relation to other trials."""
    evaluation = details.evaluation
    location = f"island {evaluation.island}, worker {evaluation.worker}"
    if evaluation.imported_from:
        yield "imported from", f"{evaluation.imported_from}, to {location}"
    elif evaluation.confirms is not None:
        on_worker = "" if evaluation.state == "waiting" else f"; on {location}"
        yield "confirms", f"trial {evaluation.confirms}, with another seed{on_worker}"
    elif evaluation.state != "waiting":
        propagator = evaluation.propagator or "unknown"
        yield "bred", f"{location}, generation {evaluation.generation}, propagator {propagator}"
    if evaluation.immigrants:
        counts = [f"{count} of island {island}" for island, count in evaluation.immigrants.items()]
        yield "immigrants", f"{', '.join(counts)} were on its island when it began"
    if evaluation.inherits is not None:
        yield "inherits", f"the checkpoint at the end of trial {evaluation.inherits}"
    if evaluation.retry_of is not None:
        retried = _format_other_trial(evaluation, evaluation.retry_of)
        yield "retry of", f"trial {retried}, which was {details.retried_state}"
    if evaluation.crash_count:
        times = format_count(evaluation.crash_count, "time")
        yield "crashes", f"the job crashed {times} in a row during its earlier trials"
    if evaluation.resumed_from_step:
        epochs = format_count(evaluation.resumed_from_step, "epoch")
        yield "resumed", f"from the checkpoint of that trial, after {epochs}"
    if evaluation.checkpoint_step and evaluation.state in ("running", "interrupted"):
        yield "checkpoint", f"after {format_count(evaluation.checkpoint_step, 'epoch')}"
    results = [f"{other.label}: {_format_result(other)}" for other in details.confirmed_by]
    yield from _list_items("confirmed by", results)


def _list_times(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    evaluation = details.evaluation
    if math.isfinite(evaluation.started):
        yield "started", format_date(evaluation.started)
    if math.isfinite(evaluation.ended):
        text = format_date(evaluation.ended)
        if evaluation.has_ended:
            text += f", after {format_duration(evaluation.seconds)}"
            if evaluation.seconds_before:
                before = format_duration(evaluation.seconds_before)
                text += f", {before} of it before the resume"
        yield "ended", text
    elif evaluation.state == "running" and details.in_use and math.isfinite(evaluation.started):
        yield "ended", f"not yet, after {format_duration(now - evaluation.started)}"


def _list_items(name: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((name if index == 0 else "", text) for index, text in enumerate(texts))


def _format_other_trial(evaluation: Evaluation, trial: int) -> str:
    """Return the label of trial number `trial`, which is in the same study as `evaluation`."""
    return str(trial) if evaluation.confirms is None else f"confirm-{trial}"


def _format_result(evaluation: Evaluation) -> str:
    return format_number(evaluation.loss) if evaluation.state == "complete" else evaluation.state


def _summarize_losses(curve: Mapping[int, float]) -> str:
    if not curve:
        return "none was reported"
    lowest = min(curve, key=lambda epoch: _make_comparable(curve[epoch]))
    text = (
        f"{format_count(len(curve), 'epoch')}, "
        f"the lowest {format_number(curve[lowest])} after epoch {lowest}"
    )
    if len(curve) > _MAX_LOSSES:
        text += f"; {len(_choose_epochs(curve))} are shown, --json has all"
    return text


def _format_losses(curve: Mapping[int, float]) -> list[str]:
    """Return lines that list epochs and their losses, with several epochs per line."""
    cells = [(str(epoch), format_number(curve[epoch])) for epoch in _choose_epochs(curve)]
    wide, wider = (max((len(cell[index]) for cell in cells), default=0) for index in (0, 1))
    texts = [f"{epoch:>{wide}}  {loss:<{wider}}" for epoch, loss in cells]
    rows = [
        texts[index : index + _LOSSES_PER_LINE] for index in range(0, len(texts), _LOSSES_PER_LINE)
    ]
    return ["   ".join(row).rstrip() for row in rows]


def _choose_epochs(curve: Mapping[int, float]) -> list[int]:
    """Return the epochs whose losses are shown.

    If there are many epochs, only every n-th is shown, and the epochs with the first, lowest and
    final loss. The interval n is 2, 5, 10, 20 and so on.
    """
    epochs = sorted(curve)
    if not epochs:
        return []
    steps = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    step = next(step for step in steps if len(epochs) <= _MAX_LOSSES * step)
    lowest = min(epochs, key=lambda epoch: _make_comparable(curve[epoch]))
    return sorted({*epochs[step - 1 :: step], epochs[0], epochs[-1], lowest})


def _make_comparable(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _describe_log(log_end: LogTail) -> str:
    if not log_end.lines_before:
        return str(log_end.path)
    return f"without its first {format_count(log_end.lines_before, 'line')}, {log_end.path}"
