"""Compute the status of a run from a snapshot, and describe it in a few lines.

The status has the phase, progress and pace of the run, and the state of islands and workers.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual, compare_confirmed
from hpo.results.display_names import merge_params_and_metrics
from hpo.results.run_snapshot import EXHAUSTED_REASON, RunSnapshot
from hpo.results.summary import (
    RungSummary,
    describe_individual,
    list_best_so_far,
    summarize_rungs,
)
from hpo.store.evaluations import Evaluation, find_best, group_by_individual
from hpo.store.manifest import parse_start
from hpo.store.pareto_front import find_front
from hpo.store.pruning import is_search_over
from hpo.text_format import (
    cut_text,
    format_clock,
    format_duration,
    format_named_values,
    format_number,
    make_printable,
    make_show_command,
)
from hpo.views.loss_scale import find_complete_losses
from hpo.views.tables import MAX_HYPERPARAMETERS
from hpo.views.times import Pace, WorkingTime, compute_pace

ACTIVE_PHASES = ("searching", "confirming", "ending", "unknown")
TEXT_STYLES = {"failed": "red", "pruned": "yellow", "paused": "yellow"}
_PHASE_TITLES = {
    "searching": ("searching", "bold"),
    "confirming": ("confirming the best", "bold"),
    "ending": ("ending", "bold"),
    "finished": ("finished", "bold green"),
    "stopped": ("stopped", "bold yellow"),
    "crashed": ("crashed", "bold red"),
    "unknown": ("running or not?", "bold yellow"),
}
_MAX_LINE_LENGTH = 500  # characters
_STATES = (
    *("complete", "pruned", "paused", "failed", "running", "waiting"),
    *("imported", "promoted", "interrupted"),
)
_STATE_NAMES = {"promoted": "promoted and continued", "interrupted": "interrupted and retried"}


@dataclass(frozen=True)
class IslandStatus:
    """Status of one island."""

    index: int
    """Number of the island, from 0."""
    population: int
    """Number of its evaluations that are finished (complete, pruned, paused or failed)."""
    best: Evaluation | None
    """Its evaluation with the lowest loss; None if no evaluation has succeeded."""
    failed: int


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at the time of a snapshot."""

    snapshot: RunSnapshot
    at: float
    """Time in seconds since the epoch, to which the ages of evaluations refer."""
    phase: str
    """Searching, confirming, ending, finished, stopped, crashed or unknown.

    A run is ending if all evaluations are done, but it is still active. It has stopped if it ended
    early without a crash. The phase is unknown if this host cannot see whether the run is active.
    """
    reason: str
    """More about the phase, such as why the run stopped; may be empty."""
    done: int
    """Number of individuals that have ended, in the confirmation if that is the phase."""
    total: int
    """Number of individuals to evaluate in the search, or in the confirmation."""
    pace: Pace
    counts: dict[str, int]
    """Number of evaluations by state. Imported evaluations count as "imported"."""
    best: Evaluation | None
    """The first individual of the front, or the evaluation with the lowest loss."""
    front: list[Evaluation]
    islands: list[IslandStatus]
    running: list[Evaluation]
    """The running evaluation of each worker, the oldest first."""
    idle_workers: list[int]
    """Workers that have evaluated in this session, but now run no evaluation."""
    rungs: list[RungSummary]
    improvements: list[tuple[float, float]]
    """For each new best: the working time when it was found, 0 if imported, and its loss."""
    working_seconds: float
    """Time until now in which at least one worker evaluated, in seconds."""
    losses: list[float]
    to_confirm: bool
    """Whether the best will be confirmed with other seeds after the search."""
    confirmed: list[ConfirmedIndividual]
    """Comparison of the confirmed individuals, best first."""

    @property
    def may_be_running(self) -> bool:
        """Whether the run is active, or may be active as far as this host can see."""
        return self.phase in ACTIVE_PHASES


def compute_run_status(snapshot: RunSnapshot) -> RunStatus:
    """Return the status of a run at the time of a snapshot."""
    evaluations = snapshot.evaluations
    confirmations = snapshot.confirmations
    everything = [*evaluations, *confirmations]
    phase, reason = _find_phase(snapshot)
    shown = confirmations if phase == "confirming" else evaluations
    total = len(confirmations) if phase == "confirming" else snapshot.manifest.budget
    done = sum(
        any(e.has_ended_in_run for e in group) for group in group_by_individual(shown).values()
    )
    may_be_running = phase in ACTIVE_PHASES
    running = _find_running(everything)
    since = parse_start(snapshot.manifest.started)
    seen = {e.worker for e in everything if may_be_running and e.started >= since}
    objectives = snapshot.manifest.objectives
    front = find_front(evaluations, objectives) if objectives.is_multi_objective else []
    now = snapshot.taken_at if may_be_running else None
    time = WorkingTime(everything, now)
    return RunStatus(
        snapshot,
        at=snapshot.taken_at,
        phase=phase,
        reason=reason,
        done=done,
        total=total,
        pace=compute_pace(shown, total - done, since, now),
        counts=dict(Counter("imported" if e.imported_from else e.state for e in evaluations)),
        best=front[0] if front else find_best(evaluations),
        front=front,
        islands=_summarize_islands(evaluations, snapshot.manifest.layout.islands),
        running=running,
        idle_workers=sorted(seen - {evaluation.worker for evaluation in running}),
        rungs=summarize_rungs(evaluations, snapshot.manifest),
        improvements=[
            (0.0 if e.imported_from else time.compute_seconds(e.ended), e.loss)
            for e in list_best_so_far(evaluations)
        ],
        working_seconds=time.total,
        losses=find_complete_losses(evaluations),
        to_confirm=phase == "searching" and snapshot.manifest.confirm_seeds > 0,
        confirmed=compare_confirmed(confirmations),
    )


def make_status_content(status: RunStatus) -> dict[str, Any]:
    """Return the status of a run as JSON values."""
    return {
        "phase": status.phase,
        "reason": status.reason,
        "done": status.done,
        "total": status.total,
        "evaluations_per_minute": status.pace.per_minute,
        "seconds_left": status.pace.seconds_left,
        "counts": status.counts,
        "best": None if status.best is None else describe_individual(status.best),
        "running": [
            {
                "trial": evaluation.label,
                "worker": evaluation.worker,
                "params": evaluation.params,
                "epochs": len(evaluation.curve),
                "seconds": round(status.at - evaluation.started, 3),
            }
            for evaluation in status.running
        ],
        "idle_workers": status.idle_workers,
    }


def _find_phase(snapshot: RunSnapshot) -> tuple[str, str]:
    run = snapshot.manifest
    states = {evaluation.state for evaluation in snapshot.confirmations}
    is_confirming = "running" in states
    is_unconfirmed = is_confirming or "waiting" in states
    is_searching = any(evaluation.state == "running" for evaluation in snapshot.evaluations)
    is_over = is_search_over(snapshot.evaluations, run.budget, run.pruner, run.objectives)
    has_best = find_best(snapshot.evaluations) is not None
    will_confirm = run.confirm_seeds and not snapshot.confirmations and has_best
    is_over = is_over and not is_searching
    is_finished = is_over and not is_unconfirmed and not will_confirm
    if snapshot.is_in_use and is_finished:
        return "ending", ""
    if snapshot.is_in_use:
        return "confirming" if is_confirming or (is_unconfirmed and is_over) else "searching", ""
    if is_finished:
        return "finished", ""
    if snapshot.is_in_use is None:
        holder = snapshot.holder or "the run"
        return "unknown", f"{holder} may still be active; this host cannot see its lock"
    if snapshot.holder:
        return "crashed", snapshot.holder.split(" since ")[0]
    return "stopped", snapshot.stop_reason


def _summarize_islands(evaluations: Sequence[Evaluation], count: int) -> list[IslandStatus]:
    """Return the status of each island. Island `i` of a larger session counts for `i % count`."""
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.is_finished or evaluation.state == "running":
            groups.setdefault(evaluation.island % count, []).append(evaluation)
    return [
        IslandStatus(
            index,
            sum(evaluation.is_finished for evaluation in group),
            find_best(group),
            sum(evaluation.state == "failed" for evaluation in group),
        )
        for index, group in sorted(groups.items())
    ]


def _find_running(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the running evaluation of each worker, the latest if a crash has left several."""
    by_worker: dict[int, Evaluation] = {}
    running = [evaluation for evaluation in evaluations if evaluation.state == "running"]
    for evaluation in sorted(running, key=lambda evaluation: evaluation.started):
        by_worker[evaluation.worker] = evaluation
    return sorted(by_worker.values(), key=lambda e: (e.started, e.worker))


def format_header(run: RunStatus, path: Path) -> list[Text]:
    """Return the lines of the header. The first line has the phase and the progress of the run."""
    name, style = _PHASE_TITLES[run.phase]
    progress = f"  {format_progress(run)}  {make_printable(str(path))}"
    title = Text.assemble((name, style), progress)
    explanation = [Text(make_printable(line), style) for line in _explain(run, path)]
    return [title, *explanation, *_format_results(run, path)]


def _format_results(run: RunStatus, path: Path) -> Iterator[Text]:
    names = dict(_STATE_NAMES)
    states = list(_STATES)
    if not run.may_be_running:
        names["running"] = "not ended"
        states.append(states.pop(states.index("running")))
    texts = [
        Text(f"{run.counts[state]} {names.get(state, state)}", TEXT_STYLES.get(state, ""))
        for state in states
        if run.counts.get(state)
    ]
    yield Text(", ").join(texts) if texts else Text("no evaluation has begun")
    if run.best is None:
        yield Text("no evaluation is complete")
        return
    yield _describe_best(run, run.best)
    params = run.best.params
    metrics = run.best.metrics
    if len(params) > MAX_HYPERPARAMETERS:
        yield Text(cut_text(format_named_values(metrics), _MAX_LINE_LENGTH))
        command = make_show_command(path, run.best.label)
        yield Text(f"{command} shows all {len(params)} hyperparameters", "dim")
    else:
        values = merge_params_and_metrics(params, metrics, ("loss", "trial"))
        yield Text(cut_text(format_named_values(values), _MAX_LINE_LENGTH))
    if run.front:
        objectives = run.snapshot.manifest.objectives
        yield Text(make_printable(_format_ranges(run.front, objectives)))
    first = next(iter(run.confirmed), None)
    if first is not None and first.mean is not None:
        mean = format_number(first.mean)
        seeds = len(first.losses)
        yield Text(
            f"confirmed: trial {first.trial} is first, mean loss {mean} of {seeds} other seeds"
        )


def _format_ranges(front: Sequence[Evaluation], objectives: Objectives) -> str:
    texts = []
    values = zip(*(evaluation.values for evaluation in front), strict=True)
    for name, own in zip(objectives.names, values, strict=False):
        lowest = format_number(min(own))
        highest = format_number(max(own))
        texts.append(f"{name} {lowest} to {highest}" if lowest != highest else f"{name} {lowest}")
    return ", ".join(texts)


def _describe_best(run: RunStatus, best: Evaluation) -> Text:
    age = format_clock(run.at - best.ended)
    found = f"found {age} ago on island {best.island} by worker {best.worker}"
    if best.imported_from:
        found = cut_text(make_printable(f"imported from {best.imported_from}"), _MAX_LINE_LENGTH)
    name = f"front {len(run.front)}  lowest loss" if run.front else "best"
    text = f"{name} {format_number(best.loss)}"
    return Text.assemble((text, "bold green"), f"  trial {best.trial}, {found}")


def format_progress(run: RunStatus) -> str:
    """Return the number of ended evaluations, and if known the pace and the remaining time."""
    unit = "confirmations" if run.phase == "confirming" else "evaluations"
    text = f"{run.done}/{run.total} {unit}"
    if run.pace.per_minute is not None:
        digits = ".0f" if run.pace.per_minute >= 10 else ".2g"
        text += f", {run.pace.per_minute:{digits}} a minute"
    seconds = run.pace.seconds_left
    if seconds is not None and run.done < run.total:
        left = format_duration(seconds) if seconds >= 60 else f"{seconds:.0f} s"
        text += f", about {left} left{', then --confirm-seeds' if run.to_confirm else ''}"
    return text


def _explain(run: RunStatus, path: Path) -> list[str]:
    """Return lines that explain the phase, such as how to resume a run that has stopped."""
    resume = f"To resume: the same command with --run-dir {shlex.quote(str(path))} --resume"
    if run.phase == "stopped" and run.reason != EXHAUSTED_REASON:
        remedy = f" and {run.snapshot.remedy}" if run.snapshot.remedy else ""
        return [f"{run.reason or 'the run is not active'}. {resume}{remedy}"]
    if run.phase == "crashed":
        return [f"the run is not active: {run.reason} has crashed. {resume}"]
    return [run.reason] if run.reason else []
