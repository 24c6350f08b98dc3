"""How a run stands at a moment: how far it is, how fast, and what its islands and workers do. Pure computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.objectives import Objectives
from hpo.results.confirmation import compare
from hpo.results.history import improvements
from hpo.results.reader import Look, session_start
from hpo.results.summary import rungs
from hpo.store.evaluations import Evaluation, best, individuals
from hpo.store.front import front
from hpo.store.rungs import is_over
from hpo.views.pace import Pace, pace
from hpo.views.scale import complete_losses
from hpo.views.working_time import WorkingTime

GOING_ON = ("searching", "confirming", "ending", "unknown")


@dataclass(frozen=True)
class Island:
    """An island: how many individuals have been evaluated on it, its best, and how many of them failed."""

    index: int
    population: int
    best: Evaluation | None
    failed: int


@dataclass(frozen=True)
class Standing:
    """What is shown of a run.

    `phase` is searching, confirming, ending, finished, stopped, died or unknown (whether it goes on cannot be told from
    this host), and `why` says more of it. `done` of `total` evaluations are those of the search, or of its
    confirmation while that goes on. `running` holds one evaluation per worker, the oldest first, and `idle` the other
    workers of this session, of which some are `helping`, with a text of what; `rungs` are those of
    `hpo.results.summary`.
    `front` are the individuals that no other one dominates in the `objectives`, and `best` is the first of them; the
    front is empty where the loss is the only objective.
    `improvements` are pairs: the seconds in which something was evaluated before a new best was found, and its loss.
    `worked` is the sum of such seconds until now, and `losses` are those of all complete evaluations. `to_confirm` says
    that the best will be confirmed, and `confirmed` what came out of it, as `hpo.results.confirmation.compare` returns
    it.
    """

    at: float
    phase: str
    why: str
    remedy: str
    done: int
    total: int
    pace: Pace
    counts: dict[str, int]
    objectives: Objectives
    best: Evaluation | None
    front: list[Evaluation]
    islands: list[Island]
    running: list[Evaluation]
    idle: list[int]
    helping: dict[int, str]
    rungs: list[dict[str, Any]]
    improvements: list[tuple[float, float]]
    worked: float
    losses: list[float]
    to_confirm: bool
    confirmed: list[dict[str, Any]]

    @property
    def over(self) -> bool:
        """Whether the run has ended by itself, or has done all it was to do."""
        return self.phase in ("finished", "stopped")

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on, or may go on for all that can be told."""
        return self.phase in GOING_ON


def standing(look: Look) -> Standing:
    """Return how a run stands."""
    evaluations, confirmations = look.evaluations, look.confirmations
    everything = [*evaluations, *confirmations]
    phase, why = _phase(look)
    shown = confirmations if phase == "confirming" else evaluations
    total = len(confirmations) if phase == "confirming" else look.manifest.budget
    done = sum(any(evaluation.ended_in_run for evaluation in group) for group in individuals(shown).values())
    goes_on = phase in GOING_ON
    running = _running(everything)
    since = session_start(look.manifest)
    objectives = look.manifest.objectives
    found = front(evaluations, objectives) if objectives.are_several else []
    time = WorkingTime(everything, look.at if goes_on else None)
    return Standing(
        at=look.at,
        phase=phase,
        why=why,
        remedy=look.remedy,
        done=done,
        total=total,
        pace=pace(shown, total - done, since, look.at if goes_on else None),
        counts=_counts(evaluations),
        objectives=objectives,
        best=found[0] if found else best(evaluations),
        front=found,
        islands=_islands(evaluations, look.manifest.layout.islands),
        running=running,
        idle=_idle(everything, running, since) if goes_on else [],
        helping=_helping(running) if goes_on else {},
        rungs=rungs(evaluations, look.manifest.pruner, look.manifest.objectives),
        improvements=_improvements(evaluations, time),
        worked=time.total,
        losses=complete_losses(evaluations),
        to_confirm=phase == "searching" and look.manifest.confirm_seeds > 0,
        confirmed=compare(confirmations) if confirmations else [],
    )


def _phase(look: Look) -> tuple[str, str]:
    """Return the phase that a run is in, and a text that says more of it."""
    confirming = any(evaluation.state == "running" for evaluation in look.confirmations)
    unconfirmed = confirming or any(evaluation.state == "waiting" for evaluation in look.confirmations)
    searching = any(evaluation.state == "running" for evaluation in look.evaluations)
    run = look.manifest
    spent = is_over(look.evaluations, run.budget, run.pruner, run.objectives)
    to_confirm = look.manifest.confirm_seeds and not look.confirmations and best(look.evaluations) is not None
    finished = spent and not searching and not unconfirmed and not to_confirm
    if look.in_use:
        confirming = confirming or (unconfirmed and spent and not searching)
        return ("ending" if finished else "confirming" if confirming else "searching"), ""
    if finished:
        return "finished", ""
    if look.in_use is None:
        return "unknown", f"{look.holder or 'the run'} may still go on; its lock cannot be seen from this host"
    return ("died", look.holder.split(" since ")[0]) if look.holder else ("stopped", look.stopped)


def _counts(evaluations: Iterable[Evaluation]) -> dict[str, int]:
    """Return the number of evaluations by state; those that were taken over are counted apart."""
    return dict(Counter("taken over" if evaluation.imported_from else evaluation.state for evaluation in evaluations))


def _islands(evaluations: Sequence[Evaluation], number: int) -> list[Island]:
    """Return the islands on which something was evaluated; evaluations of islands that are gone are dealt to them."""
    groups: dict[int, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.finished or evaluation.state == "running":
            groups.setdefault(evaluation.island % number, []).append(evaluation)
    return [
        Island(
            index,
            sum(evaluation.finished for evaluation in group),
            best(group),
            sum(evaluation.state == "failed" for evaluation in group),
        )
        for index, group in sorted(groups.items())
    ]


def _running(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return what each worker evaluates; of several that a session has left when it died, the last one counts."""
    by_worker: dict[int, Evaluation] = {}
    for evaluation in sorted((e for e in evaluations if e.state == "running"), key=lambda e: e.started):
        by_worker[evaluation.worker] = evaluation
    return sorted(by_worker.values(), key=lambda evaluation: (evaluation.started, evaluation.worker))


def _idle(evaluations: Iterable[Evaluation], running: Iterable[Evaluation], since: float) -> list[int]:
    seen = {worker for evaluation in evaluations if evaluation.started >= since for worker in evaluation.workers}
    return sorted(seen - {evaluation.worker for evaluation in running})


def _helping(running: Sequence[Evaluation]) -> dict[int, str]:
    """Return what workers do that are at evaluations of others."""
    # A worker may have parted, and begun another evaluation, before the one that it has helped with is over.
    own = {one.worker for one in running}
    return {worker: f"helps worker {one.worker}" for one in running for worker in one.workers[1:] if worker not in own}


def _improvements(evaluations: Sequence[Evaluation], time: WorkingTime) -> list[tuple[float, float]]:
    """Return when there was a new best, and its loss; what was taken over was there from the beginning."""
    first = best(one for one in evaluations if one.imported_from)
    found = [(0.0, first.loss)] if first else []
    return found + [(time.at(one.ended), one.loss) for one in improvements(evaluations)]
