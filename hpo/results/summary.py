"""Summarize a run: counts, the best individuals, and how busy the workers were."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.objectives import Objectives
from hpo.results.confirmation import (
    ConfirmedIndividual,
    SeedNoise,
    compare_confirmed,
    compute_margin,
    estimate_seed_noise,
)
from hpo.results.cost import Cost, compute_cost
from hpo.results.failures import FailureGroup, group_failures
from hpo.results.hypervolume import Hypervolume, summarize_hypervolume
from hpo.results.recommendation import find_winner
from hpo.store.evaluations import INTERRUPTED, Evaluation, find_best, sort_by_end
from hpo.store.inheritance import trace_lineage
from hpo.store.pareto_front import FrontArchive, find_front, select_top
from hpo.store.pruning import HALVING_SCHEDULES, compute_rungs, is_search_over
from hpo.store.run_dir import write_json

if TYPE_CHECKING:
    from hpo.results.models import ExpectedLoss, Importance, PriorAgreement
    from hpo.store.manifest import Manifest

# Interrupted evaluations are retried, and waiting ones are counted separately.
COUNTED_STATES = ("complete", "pruned", "paused", "failed", "running")


@dataclass(frozen=True)
class SessionOutcome:
    """How a session, one start of the run, has ended, and its times."""

    stopped: str | None = None
    """The reason why the session stopped early; None if it did not."""
    remedy: str | None = None
    """The option that a resumed run needs; None if it needs none."""
    exhausted: bool = False
    """Whether all individuals of the search space have been evaluated."""
    wall_seconds: float | None = None
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
    """How many individuals must first reach the rung, if none is better; None for never."""


@dataclass(frozen=True)
class RungSummary:
    """The number of individuals that have reached a rung, and what became of them."""

    bracket: int
    epochs: int
    reached: int
    continued: int
    paused: int
    pruned: int
    best: float | None
    """The lowest loss at the rung; None if it is not finite."""
    next: NextPromotion | None


@dataclass(frozen=True)
class Summary:
    """The results of a run. Each is computed when it is first read: some take seconds.

    The `top_n` best evaluations are listed.
    """

    evaluations: Sequence[Evaluation]
    run: Manifest
    top_n: int
    confirmations: Sequence[Evaluation] = ()
    earlier_confirmations: Sequence[Evaluation] = ()
    """Those that the latest session has not planned. They count as a cost only."""
    ask_models: bool = True
    """Whether models may be fitted. A run that is being stopped has no time for them."""
    session: SessionOutcome = SessionOutcome()

    @cached_property
    def counts(self) -> dict[str, int]:
        """The number of evaluations of this run in each state, and the budget."""
        states = Counter(e.state for e in self.evaluations if not e.imported_from)
        return {**{state: states[state] for state in COUNTED_STATES}, "budget": self.run.budget}

    @property
    def waiting(self) -> int:
        """The number of evaluations that were interrupted or enqueued, and will start next."""
        return sum(evaluation.state == "waiting" for evaluation in self.evaluations)

    @cached_property
    def is_over(self) -> bool:
        """Whether the search has ended, so that no paused evaluation is promoted any more."""
        return _is_over(self.evaluations, self.run)

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

    @cached_property
    def winner(self) -> Evaluation | None:
        """The evaluation that the run recommends; None if no evaluation has succeeded."""
        return find_winner(self.evaluations, self.confirmations, self.run.objectives)

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
    def failures(self) -> list[FailureGroup]:
        """The failures by reason, the most frequent first."""
        return group_failures([*self.evaluations, *self.confirmations])

    @cached_property
    def propagators(self) -> list[PropagatorResult]:
        """The results of each propagator, ordered by the end of its first evaluation."""
        if self.run.objectives.is_multi_objective:
            better = find_front_additions(self.evaluations, self.run.objectives)
        else:
            better = find_improvements(self.evaluations)
        improved = Counter(evaluation.propagator for evaluation in better)
        groups: dict[str, list[Evaluation]] = {}
        for evaluation in sort_by_end(self.evaluations):
            groups.setdefault(evaluation.propagator, []).append(evaluation)
        results = []
        for propagator, group in groups.items():
            best = min((e.loss for e in group if e.state == "complete"), default=None)
            results.append(PropagatorResult(propagator, len(group), improved[propagator], best))
        return results

    @cached_property
    def cost(self) -> Cost:
        """The hours of ranks and GPUs in evaluations of all sessions."""
        return compute_cost(self.evaluations, [*self.confirmations, *self.earlier_confirmations])

    @cached_property
    def rungs(self) -> list[RungSummary]:
        """The rungs of a pruner that pauses evaluations; empty for others."""
        return summarize_rungs(self.evaluations, self.run)

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
        """The difference to the best mean loss that counts as equally good, if any are compared."""
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
        from hpo.results.models import compare_priors  # Imports scipy, which takes 0.1 s.

        with suppress(ValueError):  # A user has edited run.json.
            return compare_priors(
                self.evaluations, self.run.space, self.run.priors, self.run.objectives
            )
        return []

    @cached_property
    def expected_loss(self) -> ExpectedLoss | None:
        """The loss that a model expects of the best; None for several objectives or too few losses.

        A Gaussian process is fitted several times, which takes seconds.
        """
        if not self.ask_models or self.best is None or self.run.objectives.is_multi_objective:
            return None
        from hpo.results.models import predict_best

        with suppress(ValueError):  # A user has edited run.json.
            return predict_best(self.evaluations, self.run.space, self.best)
        return None

    @cached_property
    def importances(self) -> list[Importance]:
        """The importance of each hyperparameter, the highest first. Sampling them takes seconds."""
        if not self.ask_models:
            return []
        from hpo.results.models import compute_importances

        with suppress(ValueError):  # A user has edited run.json.
            return compute_importances(self.evaluations, self.run.space)
        return []


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json."""
    write_json(path, {**make_summary_content(summary), **asdict(summary.session)})


def make_summary_content(summary: Summary) -> dict[str, Any]:
    """Return the content of summary.json without the times of the session."""
    return {
        "evaluations": summary.counts,
        "waiting": summary.waiting,
        "failures": [
            {
                "reason": kind.reason,
                "count": len(kind.failed),
                "trial": kind.latest.trial,
                "confirms": kind.latest.confirms,
                "has_traceback": bool(kind.latest.traceback),
            }
            for kind in summary.failures
        ],
        "priors": [asdict(prior) for prior in summary.priors],
        "propagators": [asdict(propagator) for propagator in summary.propagators],
        "rungs": [asdict(rung) for rung in summary.rungs],
        "lineage": [
            {"trial": e.trial, "epochs": len(e.curve), "loss": e.loss, "params": e.params}
            for e in summary.lineage
        ],
        "best": describe_individual(summary.best) if summary.best else None,
        "top": [describe_individual(evaluation) for evaluation in summary.top],
        "objectives": list(summary.run.objectives.names),
        "maximized": list(summary.run.objectives.maximized),
        "front": [describe_individual(evaluation) for evaluation in summary.front],
        "hypervolume": asdict(summary.hypervolume) if summary.hypervolume else None,
        "expected_loss": asdict(summary.expected_loss) if summary.expected_loss else None,
        "importances": [
            {**asdict(importance), "significant": importance.is_significant}
            for importance in summary.importances
        ],
        "islands": [
            {"island": island, "top": [describe_individual(evaluation) for evaluation in best]}
            for island, best in summary.islands.items()
        ],
        "imported": summary.imported,
        "confirmed": [
            {**describe_individual(summary.get_evaluation(individual.trial)), **asdict(individual)}
            for individual in summary.confirmed
        ],
        "as_good_within": summary.as_good_within,
        "seed_noise": asdict(summary.seed_noise) if summary.seed_noise else None,
        "unconfirmed": summary.unconfirmed,
        **asdict(summary.cost),
        "stopped": summary.session.stopped,
        "remedy": summary.session.remedy,
        "exhausted": summary.session.exhausted,
    }


def describe_individual(evaluation: Evaluation) -> dict[str, Any]:
    """Return an individual as JSON values."""
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


def find_improvements(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations that had the lowest loss of the run when they ended.

    Their losses are also lower than those of all evaluations that were imported before them.
    """
    found = []
    lowest = math.inf
    for evaluation in _iterate_by_end(evaluations):
        if evaluation.state == "complete" and evaluation.loss < lowest:
            lowest = evaluation.loss
            found.append(evaluation)
    return [evaluation for evaluation in found if not evaluation.imported_from]


def list_best_so_far(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the best imported evaluation, if any, and those that improved the lowest loss."""
    first = find_best(e for e in evaluations if e.imported_from)
    return [*filter(None, [first]), *find_improvements(evaluations)]


def find_front_additions(
    evaluations: Sequence[Evaluation], objectives: Objectives
) -> list[Evaluation]:
    """Return the evaluations that joined the front of earlier ones when they ended."""
    archive = FrontArchive(objectives)
    found = [evaluation for evaluation in _iterate_by_end(evaluations) if archive.add(evaluation)]
    return [evaluation for evaluation in found if not evaluation.imported_from]


def _iterate_by_end(evaluations: Sequence[Evaluation]) -> Iterator[Evaluation]:
    """Yield each imported evaluation before the first ended one with a higher trial number."""
    imported = [evaluation for evaluation in evaluations if evaluation.imported_from]
    pending = deque(sorted(imported, key=lambda evaluation: evaluation.trial))
    for evaluation in sort_by_end(evaluations):
        while pending and pending[0].trial < evaluation.trial:
            yield pending.popleft()
        yield evaluation


def _is_over(evaluations: Sequence[Evaluation], run: Manifest) -> bool:
    if any(evaluation.state in ("waiting", "running") for evaluation in evaluations):
        return False
    return is_search_over(evaluations, run.budget, run.pruner, run.objectives)


def summarize_rungs(evaluations: Sequence[Evaluation], run: Manifest) -> list[RungSummary]:
    """Return the rungs of a pruner that pauses evaluations; empty for others.

    After the end of the search, no evaluation is promoted next.
    """
    halving = HALVING_SCHEDULES.get(run.pruner)
    if halving is None:
        return []
    is_over = _is_over(evaluations, run)
    found = []
    for rung in compute_rungs(halving, evaluations, run.objectives):
        promotion = None
        if rung.next_paused is not None and not is_over:
            position, evaluation = rung.next_paused
            loss = _drop_infinite(evaluation.loss)
            promotion = NextPromotion(evaluation.trial, loss, halving.count_needed(position))
        summary = RungSummary(
            rung.bracket,
            rung.epochs,
            reached=len(rung.losses),
            continued=len(rung.continued),
            paused=len(rung.paused),
            pruned=len(rung.stopped),
            best=_drop_infinite(rung.losses[0][0]),
            next=promotion,
        )
        found.append(summary)
    return found


def _drop_infinite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def select_session(evaluations: Sequence[Evaluation], since: float) -> list[Evaluation]:
    """Return the evaluations that have ended in the session that started at `since`."""
    return [e for e in evaluations if e.has_ended_in_run and e.started >= since]


def compute_busy_fraction(
    evaluations: Sequence[Evaluation], workers: int, since: float
) -> float | None:
    """Return the share of time that workers spent in evaluations, also in interrupted ones.

    The time is that between the first start and the last end of the session that started at
    `since`. Return None if no evaluation has ended, or if the clock was set back since then.
    """
    ours = [
        evaluation
        for evaluation in evaluations
        if (evaluation.has_ended_in_run or evaluation.state == INTERRUPTED)
        and not math.isnan(evaluation.seconds)
        and evaluation.started >= since
    ]
    if not ours:
        return None
    span = max(e.ended for e in ours) - min(e.started for e in ours)
    if span < 0:
        return None
    session_seconds = [evaluation.seconds - evaluation.seconds_before for evaluation in ours]
    return round(min(1.0, sum(session_seconds) / (workers * span)), 4) if span else 1.0
