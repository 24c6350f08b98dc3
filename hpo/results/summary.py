"""Summarize a run: counts, the best individuals, and how busy the workers were.

A session is one start of the run. The latest session plans confirmations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.confirmation import (
    ConfirmedIndividual,
    SeedNoise,
    compare_confirmed,
    compute_margin,
    estimate_seed_noise,
)
from hpo.results.failures import FailureKind, group_failures
from hpo.results.hypervolume import Hypervolume, summarize_hypervolume
from hpo.results.search_history import find_front_additions, find_improvements
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.inheritance import trace_lineage
from hpo.store.pareto_front import find_front, select_top
from hpo.store.pruning import HALVING_SCHEDULES, HalvingSchedule, Rung, compute_rungs
from hpo.store.run_dir import write_json

if TYPE_CHECKING:
    from hpo.results.expected_loss import ExpectedLoss
    from hpo.results.importances import Importance
    from hpo.results.prior_agreement import PriorAgreement
    from hpo.store.manifest import Manifest

# Interrupted evaluations are retried, and waiting ones are counted separately.
COUNTED_STATES = ("complete", "pruned", "paused", "failed", "running")


@dataclass(frozen=True)
class SessionOutcome:
    """How a session ended, and its times."""

    stopped: str | None = None
    """The reason why the session stopped early; None if it did not."""
    remedy: str | None = None
    """The option that a resumed run needs; None if it needs none."""
    exhausted: bool = False
    """Whether all individuals of the search space have been evaluated."""
    wall_seconds: float | None = None
    """The duration of the session; None if it is unknown."""
    worker_busy_fraction: float | None = None
    """The share of time that workers spent in evaluations; None if it is unknown."""


@dataclass(frozen=True)
class PropagatorResult:
    """The results of one propagator."""

    propagator: str
    evaluations: int
    improved: int
    """The number of evaluations that improved the best loss, or joined the Pareto front."""
    best: float | None
    """The lowest loss; None if no evaluation is complete."""


@dataclass(frozen=True)
class NextPromotion:
    """The paused evaluation that is promoted next at a rung."""

    trial: int
    loss: float | None
    count_needed: int | None
    """The number of individuals that must first reach the rung, if none of them is better; None for never."""


@dataclass(frozen=True)
class RungSummary:
    """The number of individuals that have reached a rung, and what became of them."""

    bracket: int
    epochs: int
    reached: int
    continued: int
    paused: int
    best: float | None
    """The lowest loss at the rung; None if it is not finite."""
    next: NextPromotion | None


@dataclass(frozen=True)
class Summary:
    """The results of a run. Each is computed when it is first read: some take seconds."""

    evaluations: Sequence[Evaluation]
    run: Manifest
    """The content of run.json."""
    top_n: int
    """The number of best evaluations to list."""
    confirmations: Sequence[Evaluation] = ()
    ask_models: bool = True
    """Whether models may be fitted. A run that is being stopped has no time for them."""
    session: SessionOutcome = SessionOutcome()

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of evaluations in each state, and the budget. Imported evaluations are left out."""
        states = Counter(
            evaluation.state for evaluation in self.evaluations if not evaluation.imported_from
        )
        return {**{state: states[state] for state in COUNTED_STATES}, "budget": self.run.budget}

    @property
    def waiting(self) -> int:
        """The number of evaluations that were interrupted or enqueued, and will start next."""
        return sum(evaluation.state == "waiting" for evaluation in self.evaluations)

    @property
    def imported(self) -> int:
        """The number of evaluations from a warm start."""
        return sum(bool(evaluation.imported_from) for evaluation in self.evaluations)

    @property
    def unconfirmed(self) -> int:
        """The number of confirmations that have not ended."""
        return sum(evaluation.state in ("waiting", "running") for evaluation in self.confirmations)

    @cached_property
    def _best_or_front(self) -> list[Evaluation]:
        return find_front(self.evaluations, self.run.objectives)

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the lowest loss; None if no evaluation has succeeded."""
        return next(iter(self._best_or_front), None)

    @property
    def front(self) -> list[Evaluation]:
        """The Pareto front, the lowest loss first; empty if the loss is the only objective."""
        return self._best_or_front if self.run.objectives.is_multi_objective else []

    @cached_property
    def top(self) -> list[Evaluation]:
        """The best evaluations of the run."""
        return select_top(self.evaluations, self.top_n, self.run.objectives)

    @cached_property
    def islands(self) -> dict[int, list[Evaluation]]:
        """The best evaluations of each island, by its number."""
        groups: dict[int, list[Evaluation]] = {}
        for evaluation in self.evaluations:
            groups.setdefault(evaluation.island, []).append(evaluation)
        return {
            island: select_top(group, self.top_n, self.run.objectives)
            for island, group in sorted(groups.items())
            if any(evaluation.is_finished for evaluation in group)
        }

    @cached_property
    def failures(self) -> list[FailureKind]:
        """The failures by reason, the most frequent first."""
        return group_failures([*self.evaluations, *self.confirmations])

    @cached_property
    def propagators(self) -> list[PropagatorResult]:
        """The results of each propagator."""
        return summarize_propagators(self.evaluations, self.run.objectives)

    @cached_property
    def rungs(self) -> list[RungSummary]:
        """The rungs of a pruner that pauses evaluations; empty for others."""
        return summarize_rungs(self.evaluations, self.run.pruner, self.run.objectives)

    @cached_property
    def lineage(self) -> list[Evaluation]:
        """The best evaluation and its ancestors, the oldest first; empty without ancestors."""
        lineage = trace_lineage(self.best, self._by_trial) if self.best else []
        return lineage if len(lineage) > 1 else []

    @cached_property
    def hypervolume(self) -> Hypervolume | None:
        """The hypervolume of the front; None if the loss is the only objective."""
        return summarize_hypervolume(self.evaluations, self.run.objectives)

    @cached_property
    def confirmed(self) -> list[ConfirmedIndividual]:
        """The confirmed individuals, the best first."""
        return compare_confirmed(self.confirmations)

    @property
    def as_good_within(self) -> float | None:
        """The largest difference to the best mean loss that counts as equally good; None without a comparison."""
        return compute_margin(self.confirmed)

    @property
    def seed_noise(self) -> SeedNoise | None:
        """How much the seed changes the loss; None if there are too few confirmations."""
        return estimate_seed_noise([individual.losses for individual in self.confirmed])

    def get_evaluation(self, trial: int) -> Evaluation:
        """Return the evaluation of the search with this trial number."""
        return self._by_trial[trial]

    @cached_property
    def _by_trial(self) -> dict[int, Evaluation]:
        return {evaluation.trial: evaluation for evaluation in self.evaluations}

    @cached_property
    def priors(self) -> list[PriorAgreement]:
        """The priors, and whether evaluations agree with them."""
        if not self.run.priors:
            return []
        # Imports numpy, which only leaders need.
        from hpo.results.prior_agreement import compare_priors

        try:
            return compare_priors(
                self.evaluations, self.run.space, self.run.priors, self.run.objectives
            )
        except ValueError:  # A user has edited run.json.
            return []

    @cached_property
    def expected_loss(self) -> ExpectedLoss | None:
        """The loss that a model expects of the best; None for several objectives or too few losses.

        A Gaussian process is fitted several times, which takes seconds.
        """
        if not self.ask_models or self.best is None or self.run.objectives.is_multi_objective:
            return None
        from hpo.results.expected_loss import predict_best  # Imports scipy, which takes 0.1 s.
        from hpo.results.genes import read_space

        try:
            return predict_best(self.evaluations, read_space(self.run.space), self.best)
        except ValueError:  # A user has edited run.json.
            return None

    @cached_property
    def importances(self) -> list[Importance]:
        """The importance of each hyperparameter, the highest first. Sampling them takes seconds."""
        if not self.ask_models:
            return []
        from hpo.results.importances import compute_importances  # Imports scipy.

        try:
            return compute_importances(self.evaluations, self.run.space)
        except ValueError:  # A user has edited run.json.
            return []


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json."""
    session = summary.session
    times = {
        "wall_seconds": session.wall_seconds,
        "worker_busy_fraction": session.worker_busy_fraction,
    }
    write_json(path, {**make_summary_content(summary), **times})


def make_summary_content(summary: Summary) -> dict[str, Any]:
    """Return the content of summary.json without the times of the session."""
    objectives = summary.run.objectives
    return {
        "evaluations": summary.counts,
        "waiting": summary.waiting,
        "failures": list(map(_describe_failures, summary.failures)),
        "priors": list(map(asdict, summary.priors)),
        "propagators": list(map(asdict, summary.propagators)),
        "rungs": list(map(asdict, summary.rungs)),
        "lineage": [
            {"trial": e.trial, "epochs": len(e.curve), "loss": e.loss, "params": e.params}
            for e in summary.lineage
        ],
        "best": _describe(summary.best) if summary.best else None,
        "top": list(map(_describe, summary.top)),
        "objectives": list(objectives.names),
        "maximized": list(objectives.maximized),
        "front": list(map(_describe, summary.front)),
        "hypervolume": asdict(summary.hypervolume) if summary.hypervolume else None,
        "expected_loss": asdict(summary.expected_loss) if summary.expected_loss else None,
        "importances": [
            {**asdict(importance), "significant": importance.is_significant}
            for importance in summary.importances
        ],
        "islands": [
            {"island": island, "top": list(map(_describe, best))}
            for island, best in summary.islands.items()
        ],
        "imported": summary.imported,
        "confirmed": [
            {**_describe(summary.get_evaluation(individual.trial)), **asdict(individual)}
            for individual in summary.confirmed
        ],
        "as_good_within": summary.as_good_within,
        "seed_noise": asdict(summary.seed_noise) if summary.seed_noise else None,
        "unconfirmed": summary.unconfirmed,
        "stopped": summary.session.stopped,
        "remedy": summary.session.remedy,
        "exhausted": summary.session.exhausted,
    }


def _describe(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "trial": evaluation.trial,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "island": evaluation.island,
        "worker": evaluation.worker,
        "generation": evaluation.generation,
        "seconds": None if math.isnan(evaluation.seconds) else evaluation.seconds,
        "metrics": evaluation.metrics,
        "imported_from": evaluation.imported_from,
        "inherits": evaluation.inherits,
    }


def _describe_failures(kind: FailureKind) -> dict[str, Any]:
    return {
        "reason": kind.reason,
        "count": len(kind.failed),
        "trial": kind.latest.trial,
        "confirms": kind.latest.confirms,
        "has_traceback": bool(kind.latest.traceback),
    }


def summarize_propagators(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> list[PropagatorResult]:
    """Return the results of each propagator, in the order in which their first evaluations ended."""
    if objectives.is_multi_objective:
        better = find_front_additions(evaluations, objectives)
    else:
        better = find_improvements(evaluations)
    improved = Counter(evaluation.propagator for evaluation in better)
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in sort_by_end(evaluations):
        groups.setdefault(evaluation.propagator, []).append(evaluation)
    return [
        PropagatorResult(
            propagator,
            len(group),
            improved[propagator],
            min((e.loss for e in group if e.state == "complete"), default=None),
        )
        for propagator, group in groups.items()
    ]


def summarize_rungs(
    evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives = ONLY_LOSS
) -> list[RungSummary]:
    """Return the rungs of a pruner that pauses evaluations; empty for others."""
    halving = HALVING_SCHEDULES.get(pruner)
    if halving is None:
        return []
    return [
        RungSummary(
            rung.bracket,
            rung.epochs,
            reached=len(rung.losses),
            continued=len(rung.continued),
            paused=len(rung.paused),
            best=_drop_infinite(rung.losses[0][0]),
            next=_find_next(halving, rung),
        )
        for rung in compute_rungs(halving, evaluations, objectives)
    ]


def _find_next(halving: HalvingSchedule, rung: Rung) -> NextPromotion | None:
    if rung.next_paused is None:
        return None
    position, evaluation = rung.next_paused
    return NextPromotion(
        evaluation.trial, _drop_infinite(evaluation.loss), halving.count_needed(position)
    )


def _drop_infinite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def compute_busy_fraction(
    evaluations: Sequence[Evaluation], workers: int, since: float
) -> float | None:
    """Return the share of time that workers spent in evaluations, between the first start and the last end.

    Args:
        since: The start of the session in seconds since the epoch. Earlier evaluations are ignored.

    Returns:
        The share, from 0 to 1. None if no evaluation has ended, or if the clock was set back during
        the session.
    """
    ours = [e for e in evaluations if e.has_ended and not e.imported_from and e.started >= since]
    if not ours:
        return None
    span = max(evaluation.ended for evaluation in ours) - min(
        evaluation.started for evaluation in ours
    )
    if span < 0:
        return None
    session_seconds = [evaluation.seconds - evaluation.seconds_before for evaluation in ours]
    busy = sum(seconds for seconds in session_seconds if not math.isnan(seconds))
    return round(min(1.0, busy / (workers * span)), 4) if span else 1.0
