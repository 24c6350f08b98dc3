"""Find evaluations of a run, collect all facts about them, and show them as text or JSON.

The label of an evaluation is "7" for trial 7 of the search, and "confirm-7" for trial 7 of the
confirmation.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_winner
from hpo.results.run_snapshot import RunSnapshot
from hpo.store.evaluations import INTERRUPTED, Evaluation
from hpo.store.output_log import LogTail, read_log_tail
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.text_format import (
    escape_unencodable,
    format_count,
    format_date,
    format_duration,
    format_number,
    make_printable,
    split_printable_lines,
)

_LABEL_WIDTH = 14  # columns
_LOSSES_PER_LINE = 5
_MAX_LOSSES = 50
_INDENT = "    "


@dataclass(frozen=True)
class EvaluationDetails:
    """All facts about one evaluation of a study: its record, other evaluations and its log."""

    evaluation: Evaluation
    study: str
    in_use: bool | None
    """Whether the run is active now; None if this host cannot see that."""
    seed: int | None
    """Seed of the training; None if it is unknown, for example if another run has trained it."""
    retried_by: int | None
    """Later trial of the same individual, if this one was interrupted or promoted."""
    retried_state: str
    """State of the previous trial of the same individual; "" if this is the first trial."""
    confirmed_by: list[Evaluation]
    """The confirmations that the latest session planned."""
    log_end: LogTail | None
    """The final lines of its log file; None if no log file exists."""
    is_on_front: bool | None = None
    """Whether it is on the Pareto front; None if the loss is the only objective."""
    dominated_by: int | None = None
    """A trial on the front that is as good or better in all objectives, if there is one."""
    repeat_command: str = ""
    """The command that evaluates the individual again in a new run; "" if it is not known."""


class EvaluationLookup:
    """Evaluations of a run, as they were when they were read, with a search by label."""

    def __init__(self, run_dir: RunDir, snapshot: RunSnapshot) -> None:
        self.run_dir = run_dir
        self._snapshot = snapshot
        self._run = snapshot.manifest
        self._in_use = snapshot.is_in_use
        self._evaluations = snapshot.evaluations
        self._confirmations = snapshot.confirmations

    @classmethod
    def read(cls, reader: RunReader) -> EvaluationLookup:
        """Read all evaluations of a run, and return a lookup for them."""
        snapshot = reader.take_snapshot()
        confirmations = reader.read_confirmations(all_plans=True)
        return cls(reader.run_dir, replace(snapshot, confirmations=confirmations))

    def find_evaluation(self, label: str) -> Evaluation:
        """Return the evaluation with a label, such as "7" or "confirm-0"."""
        if not re.fullmatch(r"(confirm-)?[0-9]{1,18}", label):
            raise UsageError(f"TRIAL must be a number or confirm-N, got {label!r}.")
        trial = int(label.removeprefix("confirm-"))
        evaluations = self._confirmations if label.startswith("confirm-") else self._evaluations
        found = _find_trial(evaluations, trial)
        if found is None:
            spans = map(_format_span, (self._evaluations, self._confirmations))
            available = " and ".join(filter(None, spans)) or "none yet"
            raise UsageError(f"{self.run_dir.path} has no trial {label}. Its trials: {available}")
        return found

    def choose_evaluation(self) -> tuple[Evaluation, str]:
        """Return the winner, or the latest failure if there is none, and the reason for it."""
        confirmations = make_plan(self._run).select_planned(self._confirmations)
        winner = find_winner(self._evaluations, confirmations, self._run.objectives)
        if winner is not None:
            have_ended = all(evaluation.is_finished for evaluation in confirmations)
            complete = {e.confirms for e in confirmations if e.state == "complete"}
            is_confirmed = have_ended and winner.trial in complete
            loss = "mean loss over other seeds" if is_confirmed else "loss"
            return winner, f"the winner: the lowest {loss}"
        failed = self.list_failed()
        if failed:
            return failed[0], "the latest failure, since no evaluation has succeeded"
        raise UsageError(
            f"{self.run_dir.path}: no evaluation has succeeded or failed. Name one of its trials: "
            f"{_format_span(self._evaluations) or 'none yet'}"
        )

    def list_failed(self) -> list[Evaluation]:
        """Return all failed evaluations, the latest failure first."""
        everything = [*self._evaluations, *self._confirmations]
        failed = [evaluation for evaluation in everything if evaluation.state == "failed"]
        return sorted(failed, key=lambda e: (e.ended, e.trial), reverse=True)

    def collect_details(self, evaluation: Evaluation) -> EvaluationDetails:
        """Return all known facts about an evaluation."""
        trial = evaluation.trial
        confirms = evaluation.confirms is not None
        siblings = self._confirmations if confirms else self._evaluations
        retries = (sibling.trial for sibling in siblings if sibling.retry_of == trial)
        retried = _find_trial(siblings, evaluation.retry_of)
        is_on_front, dominated_by = self._compare_with_front(evaluation)
        planned = make_plan(self._run).select_planned(self._confirmations)
        seed = evaluation.seed
        # The seed of an evaluation that another run has trained is unknown.
        is_seed_of_run = evaluation.state == "waiting" or len(self._run.sessions) == 1
        if seed is None and is_seed_of_run and not evaluation.imported_from:
            seed = self._run.seed
        return EvaluationDetails(
            evaluation,
            study=self._run.confirmation_study if confirms else self._run.study,
            in_use=self._in_use,
            seed=seed,
            retried_by=next(retries, None),
            retried_state=retried.state if retried else "",
            confirmed_by=[e for e in planned if not confirms and e.confirms == trial],
            log_end=read_log_tail(self.run_dir.get_log_path(trial, confirms)),
            is_on_front=is_on_front,
            dominated_by=dominated_by,
            repeat_command=self._snapshot.format_repeat_command(evaluation, seed),
        )

    def _compare_with_front(self, evaluation: Evaluation) -> tuple[bool | None, int | None]:
        objectives = self._run.objectives
        if not objectives.is_multi_objective:
            return None, None
        if evaluation.state != "complete" or evaluation.confirms is not None:
            return False, None
        if _find_trial(self._front, evaluation.trial):
            return True, None
        own = objectives.compute_costs(evaluation.values)
        for candidate in self._front:
            if all(map(operator.le, objectives.compute_costs(candidate.values), own)):
                return False, candidate.trial
        return False, None

    @cached_property
    def _front(self) -> list[Evaluation]:
        return find_front(self._evaluations, self._run.objectives)


def _find_trial(evaluations: Sequence[Evaluation], trial: int | None) -> Evaluation | None:
    return next((evaluation for evaluation in evaluations if evaluation.trial == trial), None)


def _format_span(evaluations: Sequence[Evaluation]) -> str:
    """Return the first and the last label as text, such as "0 to 7"; empty without evaluations."""
    if not evaluations:
        return ""
    first = evaluations[0].label
    last = evaluations[-1].label
    return first if first == last else f"{first} to {last}"


def list_fields(study: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return the facts in an evaluation's record that other programs read; None if unknown."""
    has_started = evaluation.state != "waiting"
    is_bred = has_started and not evaluation.imported_from and evaluation.confirms is None
    return {
        "study": study,
        "trial": evaluation.trial,
        "label": evaluation.label,
        "state": evaluation.state,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "metrics": evaluation.metrics,
        "island": evaluation.island if has_started else None,
        "worker": evaluation.worker if has_started else None,
        "generation": evaluation.generation if is_bred else None,
        "propagator": evaluation.propagator or None,
        "hosts": dict(evaluation.hosts),
        "gpus": {host: list(ids) for host, ids in evaluation.gpus.items()},
        "immigrants": dict(evaluation.immigrants),
        "seed": evaluation.seed,
        "imported_from": evaluation.imported_from or None,
        "confirms": evaluation.confirms,
        "confirmed_by": [],
        "inherits": evaluation.inherits,
        "retry_of": evaluation.retry_of,
        "retried_by": None,
        "crash_count": evaluation.crash_count,
        "resumed_from_step": evaluation.resumed_from_step or None,
        "checkpoint_step": evaluation.checkpoint_step or None,
        "paused_after": evaluation.paused_after or None,
        "cut_after": evaluation.cut_after or None,
        "started": _make_datetime(evaluation.started),
        "ended": _make_datetime(evaluation.ended),
        "seconds": evaluation.seconds if evaluation.has_ended else None,
        "epochs": max(evaluation.curve, default=0),
        "losses": {str(epoch): evaluation.curve[epoch] for epoch in sorted(evaluation.curve)},
        "failure": evaluation.failure if evaluation.state == "failed" else None,
        "traceback": evaluation.traceback or None,
    }


def make_json_content(details: EvaluationDetails) -> dict[str, Any]:
    """Return all facts about an evaluation as a dictionary for `json.dumps`."""
    log_end = details.log_end
    content = list_fields(details.study, details.evaluation) | {
        "seed": details.seed,
        "confirmed_by": [confirmation.label for confirmation in details.confirmed_by],
        "retried_by": details.retried_by,
        "repeat_command": details.repeat_command,
        "logs": log_end
        and {"path": str(log_end.path), "before": log_end.lines_before, "lines": log_end.lines},
    }
    if details.is_on_front is not None:
        content["front"] = details.is_on_front
    return {name: _make_json_value(value) for name, value in content.items()}


def _make_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {_make_json_value(name): _make_json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_json_value(item) for item in value]
    return format_time(value) if isinstance(value, datetime) else make_plain_value(value)


def make_plain_value(value: Any) -> Any:
    """Return None for NaN and infinity, and escape characters that UTF-8 cannot encode."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return escape_unencodable(value) if isinstance(value, str) else value


def _make_datetime(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, timezone.utc) if math.isfinite(seconds) else None


def format_time(time: datetime) -> str:
    """Return a time as ISO 8601 with microseconds."""
    return time.isoformat(timespec="microseconds")


def format_evaluation(
    details: EvaluationDetails, run_dir: Path, reason: str, now: float
) -> list[str]:
    """Return all facts about an evaluation as lines of text, with the reason why it is shown."""
    evaluation = details.evaluation
    title = f"trial {evaluation.label} of {run_dir}: {_describe_state(details)}"
    if reason:
        title += f" ({reason})"
    lines = [make_printable(title), ""]
    for name, fact in _list_facts(details, now):
        lines.append(f"{name:{_LABEL_WIDTH}}{make_printable(fact)}".rstrip())
    lines += _indent_lines(_format_losses(evaluation.curve))
    log_end = details.log_end
    if log_end and log_end.lines:
        source = str(log_end.path)
        if log_end.lines_before:
            source = f"without its first {format_count(log_end.lines_before, 'line')}, {source}"
        lines += ["", make_printable(f"output, {source}:")]
        lines += _indent_lines(
            line for text in log_end.lines for line in split_printable_lines(text)
        )
    if evaluation.traceback:
        lines += ["", "traceback:", *_indent_lines(split_printable_lines(evaluation.traceback))]
    return lines


def _indent_lines(lines: Iterable[str]) -> list[str]:
    return [f"{_INDENT}{line}".rstrip() for line in lines]


def _describe_state(details: EvaluationDetails) -> str:
    evaluation = details.evaluation
    again = details.retried_by
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
        text = "not on it"
        if details.is_on_front:
            text = "on it: no other individual dominates it"
        elif details.dominated_by is not None:
            text += f": trial {details.dominated_by} is as good or better in all objectives"
        yield "front", text
    yield from _list_items("metrics", [f"{name} = {m}" for name, m in evaluation.metrics.items()])
    yield from _list_items("parameters", [f"{name} = {p}" for name, p in evaluation.params.items()])
    yield from _list_origin(details)
    if details.seed is not None:
        yield "seed", str(details.seed)
    yield from _list_times(details, now)
    yield from _list_items("to repeat it", list(filter(None, [details.repeat_command])))
    if evaluation.state == "failed" and not evaluation.traceback:
        yield "traceback", "none was recorded"
    log_end = details.log_end
    if log_end is None and evaluation.state != "waiting" and not evaluation.imported_from:
        yield "logs", "nothing was kept"
    if log_end is not None and log_end.problem:
        yield "logs", f"{log_end.path} cannot be read: {log_end.problem}"
    yield "losses", _summarize_losses(evaluation.curve)


def _list_places(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    for host, ranks in evaluation.hosts.items():
        # The first part of a UUID, such as 5d1f3c2a, is enough to find a GPU in nvidia-smi -L.
        gpus = [f"GPU {name.partition('-')[0]}" for name in evaluation.gpus.get(host, ())]
        yield "ran on", f"{host}: {', '.join([format_count(ranks, 'rank'), *gpus])}"


def _list_origin(details: EvaluationDetails) -> Iterator[tuple[str, str]]:
    evaluation = details.evaluation
    location = f"island {evaluation.island}, worker {evaluation.worker}"
    if evaluation.imported_from:
        yield "imported from", f"{evaluation.imported_from}, to {location}"
    elif evaluation.confirms is not None:
        on_worker = "" if evaluation.state == "waiting" else f"; on {location}"
        yield "confirms", f"trial {evaluation.confirms}, with another seed{on_worker}"
    elif evaluation.state != "waiting":
        propagator = evaluation.propagator or "unknown"
        name = "bred" if evaluation.retry_of is None else "evaluated"
        yield name, f"{location}, generation {evaluation.generation}, propagator {propagator}"
    yield from _list_places(evaluation)
    if evaluation.immigrants:
        counts = [f"{count} from island {name}" for name, count in evaluation.immigrants.items()]
        yield "immigrants", f"{', '.join(counts)} had come to its island when it began"
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
    results = [
        f"{each.label}: {format_number(each.loss) if each.state == 'complete' else each.state}"
        for each in details.confirmed_by
    ]
    yield from _list_items("confirmed by", results)


def _list_times(details: EvaluationDetails, now: float) -> Iterator[tuple[str, str]]:
    evaluation = details.evaluation
    if math.isfinite(evaluation.started):
        yield "started", format_date(evaluation.started)
    if evaluation.state == INTERRUPTED and math.isnan(evaluation.seconds):
        found = format_date(evaluation.ended)
        yield "ended", f"when its job was killed; found {found}"
    elif math.isfinite(evaluation.ended):
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


def _summarize_losses(curve: Mapping[int, float]) -> str:
    if not curve:
        return "none is recorded"
    lowest = min(curve, key=lambda epoch: _make_comparable(curve[epoch]))
    text = (
        f"{format_count(len(curve), 'epoch')}, "
        f"the lowest {format_number(curve[lowest])} after epoch {lowest}"
    )
    if len(curve) > _MAX_LOSSES:
        text += f"; {len(_choose_epochs(curve))} are shown, --json has all"
    return text


def _format_losses(curve: Mapping[int, float]) -> list[str]:
    cells = [(str(epoch), format_number(curve[epoch])) for epoch in _choose_epochs(curve)]
    wide, wider = (max((len(cell[index]) for cell in cells), default=0) for index in (0, 1))
    texts = [f"{epoch:>{wide}}  {loss:<{wider}}" for epoch, loss in cells]
    rows = [
        texts[index : index + _LOSSES_PER_LINE] for index in range(0, len(texts), _LOSSES_PER_LINE)
    ]
    return ["   ".join(row).rstrip() for row in rows]


def _choose_epochs(curve: Mapping[int, float]) -> list[int]:
    """Return the epochs whose losses are shown.

    Of many epochs, these are every n-th, and those with the first, lowest and final loss. The
    interval n is 2, 5, 10, 20 and so on.
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
