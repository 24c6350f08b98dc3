"""Compute the status of a run from a snapshot: its phase, progress and pace, and the state of islands and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual, compare_confirmed
from hpo.results.reader import RunSnapshot
from hpo.results.search_history import find_improvements
from hpo.results.summary import RungSummary, parse_session_start, summarize_rungs
from hpo.store.evaluations import Evaluation, find_best, group_by_individual
from hpo.store.pareto_front import find_front
from hpo.store.pruning import is_search_over
from hpo.views.loss_scale import find_complete_losses
from hpo.views.pace import Pace, compute_pace
from hpo.views.working_time import WorkingTime

ACTIVE_PHASES = ("searching", "confirming", "ending", "unknown")


@dataclass(frozen=True)
class IslandStatus:
    """Status of one island.

    Attributes:
        index: Number of the island, from 0.
        population: Number of its evaluations that are finished (complete, pruned, paused or
            failed).
        best: Its evaluation with the lowest loss; None if no evaluation has succeeded.
        failed: Number of failed evaluations.
    """

    index: int
    population: int
    best: Evaluation | None
    failed: int


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at one moment.

    Attributes:
        at: Time of the snapshot, in seconds since the epoch.
        phase: searching, confirming, ending (all evaluations are done, but the run is still
            active), finished, stopped (before the end, without a crash), crashed, or unknown if
            this host cannot see whether the run is active.
        reason: More about the phase, such as why the run stopped; may be empty.
        remedy: What to change in the command that resumes the run; may be empty.
        done: Number of individuals that have ended in the search, or in the confirmation if the
            phase is "confirming".
        total: Number of individuals to evaluate in the search, or in the confirmation.
        pace: Evaluations per minute, and the remaining time.
        counts: Number of evaluations by state. Imported evaluations count as "imported".
        objectives: The objectives of the run.
        best: The first individual of the front, or the evaluation with the lowest loss if that is
            the only objective.
        front: The Pareto front; empty if the loss is the only objective.
        islands: Status of each island with evaluations.
        running: The running evaluation of each worker, the oldest first.
        idle_workers: Workers that have evaluated in this session, but now run no evaluation.
        improvements: For each new best: the working time (see `working_seconds`) when it was found,
            and its loss.
        working_seconds: Time until now in which at least one worker evaluated, in seconds.
        losses: Losses of all complete evaluations.
        to_confirm: Whether the best will be confirmed with other seeds after the search.
        confirmed: Comparison of the confirmed individuals, best first.
    """

    at: float
    phase: str
    reason: str
    remedy: str
    done: int
    total: int
    pace: Pace
    counts: dict[str, int]
    objectives: Objectives
    best: Evaluation | None
    front: list[Evaluation]
    islands: list[IslandStatus]
    running: list[Evaluation]
    idle_workers: list[int]
    rungs: list[RungSummary]
    improvements: list[tuple[float, float]]
    working_seconds: float
    losses: list[float]
    to_confirm: bool
    confirmed: list[ConfirmedIndividual]

    @property
    def has_ended(self) -> bool:
        """Whether the run has finished, or has stopped without a crash."""
        return self.phase in ("finished", "stopped")

    @property
    def may_be_running(self) -> bool:
        """Whether the run is active, or may be active as far as this host can see."""
        return self.phase in ACTIVE_PHASES


def compute_run_status(snapshot: RunSnapshot) -> RunStatus:
    """Return the status of a run at the time of a snapshot."""
    evaluations, confirmations = snapshot.evaluations, snapshot.confirmations
    everything = [*evaluations, *confirmations]
    phase, reason = _find_phase(snapshot)
    shown = confirmations if phase == "confirming" else evaluations
    total = len(confirmations) if phase == "confirming" else snapshot.manifest.budget
    done = sum(
        any(evaluation.has_ended_in_run for evaluation in group)
        for group in group_by_individual(shown).values()
    )
    may_be_running = phase in ACTIVE_PHASES
    running = _find_running(everything)
    since = parse_session_start(snapshot.manifest)
    objectives = snapshot.manifest.objectives
    found = find_front(evaluations, objectives) if objectives.is_multi_objective else []
    time = WorkingTime(everything, snapshot.taken_at if may_be_running else None)
    return RunStatus(
        at=snapshot.taken_at,
        phase=phase,
        reason=reason,
        remedy=snapshot.remedy,
        done=done,
        total=total,
        pace=compute_pace(
            shown, total - done, since, snapshot.taken_at if may_be_running else None
        ),
        counts=_count_states(evaluations),
        objectives=objectives,
        best=found[0] if found else find_best(evaluations),
        front=found,
        islands=_summarize_islands(evaluations, snapshot.manifest.layout.islands),
        running=running,
        idle_workers=_find_idle_workers(everything, running, since) if may_be_running else [],
        rungs=summarize_rungs(evaluations, snapshot.manifest.pruner, snapshot.manifest.objectives),
        improvements=_find_improvements(evaluations, time),
        working_seconds=time.total,
        losses=find_complete_losses(evaluations),
        to_confirm=phase == "searching" and snapshot.manifest.confirm_seeds > 0,
        confirmed=compare_confirmed(confirmations) if confirmations else [],
    )


def _find_phase(snapshot: RunSnapshot) -> tuple[str, str]:
    """Return the phase of a run, and the reason for it or an empty text."""
    confirming = any(evaluation.state == "running" for evaluation in snapshot.confirmations)
    unconfirmed = confirming or any(
        evaluation.state == "waiting" for evaluation in snapshot.confirmations
    )
    searching = any(evaluation.state == "running" for evaluation in snapshot.evaluations)
    run = snapshot.manifest
    spent = is_search_over(snapshot.evaluations, run.budget, run.pruner, run.objectives)
    to_confirm = (
        snapshot.manifest.confirm_seeds
        and not snapshot.confirmations
        and find_best(snapshot.evaluations) is not None
    )
    finished = spent and not searching and not unconfirmed and not to_confirm
    if snapshot.is_in_use:
        confirming = confirming or (unconfirmed and spent and not searching)
        return ("ending" if finished else "confirming" if confirming else "searching"), ""
    if finished:
        return "finished", ""
    if snapshot.is_in_use is None:
        return (
            "unknown",
            f"{snapshot.holder or 'the run'} may still be active; this host cannot see its lock",
        )
    return (
        ("crashed", snapshot.holder.split(" since ")[0])
        if snapshot.holder
        else ("stopped", snapshot.stop_reason)
    )


def _count_states(evaluations: Iterable[Evaluation]) -> dict[str, int]:
    return dict(
        Counter(
            "imported" if evaluation.imported_from else evaluation.state
            for evaluation in evaluations
        )
    )


def _summarize_islands(evaluations: Sequence[Evaluation], count: int) -> list[IslandStatus]:
    """Return the status of each island that has evaluations.

    If an earlier session had more islands, evaluations of its island `i` count for island `i %
    count`.
    """
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
    """Return the running evaluation of each worker. If a crashed session has left several, return the latest."""
    by_worker: dict[int, Evaluation] = {}
    for evaluation in sorted(
        (e for e in evaluations if e.state == "running"), key=lambda e: e.started
    ):
        by_worker[evaluation.worker] = evaluation
    return sorted(
        by_worker.values(), key=lambda evaluation: (evaluation.started, evaluation.worker)
    )


def _find_idle_workers(
    evaluations: Iterable[Evaluation], running: Iterable[Evaluation], since: float
) -> list[int]:
    seen = {evaluation.worker for evaluation in evaluations if evaluation.started >= since}
    return sorted(seen - {evaluation.worker for evaluation in running})


def _find_improvements(
    evaluations: Sequence[Evaluation], time: WorkingTime
) -> list[tuple[float, float]]:
    """Return the working time and the loss of each new best. The best imported evaluation has time 0."""
    first = find_best(evaluation for evaluation in evaluations if evaluation.imported_from)
    found = [(0.0, first.loss)] if first else []
    return found + [
        (time.compute_seconds(evaluation.ended), evaluation.loss)
        for evaluation in find_improvements(evaluations)
    ]
