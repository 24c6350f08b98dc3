"""Collect the evaluations of a run for propagators: known individuals, samples, parents."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hpo.breeding.encoding import GeneEncoding, Mask, Vector
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.space import SearchSpace, Value, make_key
from hpo.space.search_space import list_individuals
from hpo.store.evaluations import Evaluation
from hpo.store.inheritance import PARENTS_PER_ISLAND, find_parent

if TYPE_CHECKING:
    from hpo.breeding.population import Individual
    from hpo.breeding.prior_model import PriorModel

# Of random draws, unless evaluations contradict priors (benchmarks/priors.md).
_PRIOR_SHARE = 1 / 3
_PRIOR_TRIES = 20  # Draws from the priors before uniform ones.
_TRIES = 100  # Random draws before all remaining individuals are listed.
_MOST_TRIES = 10_000  # Random draws if the individuals cannot be listed.
_MOST_SECONDS = 60.0  # Time limit for the list, and for the draws after it.
_FOUNDER_CHANCE = 0.5  # Probability of a new founder while all parents are founders.
# A longer streak of failures has probability 3e-6 if every fifth evaluation fails.
_LONGEST_STREAK = 8


@dataclass(frozen=True)
class TimeBudget:
    """The time limit of a session, and its number of evaluations."""

    seconds: float
    """The time limit; infinite without one."""
    evaluations: int
    """The number of evaluations that are left at the start."""
    started: float
    """The start, by `time.monotonic`."""
    now: Callable[[], float] = time.monotonic
    ended_before: int = 0
    """The number of evaluations that ended in earlier sessions."""

    def compute_scarcity(self, ended: int) -> float:
        """Return how scarce time is, after `ended` evaluations of all sessions.

        It is 0 if all evaluations will end in time, otherwise the share of time that is left.
        """
        if math.isinf(self.seconds):
            return 0.0
        passed = self.now() - self.started
        ended -= self.ended_before
        will_end_in_time = not ended or passed * self.evaluations / ended <= self.seconds
        return 0.0 if will_end_in_time or passed >= self.seconds else 1 - passed / self.seconds


@dataclass(frozen=True)
class SurrogateSample:
    """Evaluations that a surrogate learns from: ended ones, and pending ones (`running`).

    The context of an evaluation is numbers that were known before it began, such as the loss of its
    parent.
    """

    genes: Vector
    costs: Vector
    """The costs, shape `(evaluations, objectives)`. They are infinite if an evaluation failed."""
    contexts: Vector
    """The contexts, shape `(evaluations, context values)`."""
    seconds: Vector
    """The durations, shape `(evaluations,)`. NaN if unknown, or if an evaluation was pruned."""
    running: Vector
    running_contexts: Vector
    context: Vector
    """The context of the next evaluation, shape `(context values,)`."""

    @property
    def succeeded(self) -> Mask:
        """Whether each of the ended evaluations has all its costs."""
        return np.isfinite(self.costs).all(axis=1)


class ParentPool:
    """The possible parents on an island, and the context of each evaluation with a parent.

    With population based training, an evaluation may start from the checkpoint of another
    evaluation, its parent. A founder is an evaluation without a parent. All others are heirs. The
    loss of an heir depends mostly on its parent. Therefore, propagators learn the change of the
    loss, given a context: the parent's loss and the age, the number of ancestors (Parker-Holder et
    al., Provably efficient online hyperparameter optimization with population-based bandits, 2020).

    Attributes:
        uses_pbt: Whether new evaluations can have parents.
        parents: The best evaluations of the island that have saved a checkpoint, the best first.
    """

    def __init__(
        self, space: SearchSpace, island: int = 0, islands: int = 1, uses_pbt: bool = False
    ) -> None:
        self.uses_pbt = uses_pbt
        self.parents: list[Evaluation] = []
        self._space = space
        self._island = island
        self._islands = islands
        self._losses: dict[int, float] = {}  # By trial.
        self._ages: dict[int, int] = {}

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation that has started or ended."""
        trial = evaluation.trial
        parent = evaluation.inherits
        self._ages[trial] = 0 if parent is None else 1 + self._ages.get(parent, 0)
        if evaluation.state == "complete":
            self._losses[trial] = evaluation.loss
            # Curves are unknown here, but the best of an island have saved a checkpoint at their
            # last step.
            has_saved = evaluation.checkpoint_step > 0 and not evaluation.imported_from
            if self.uses_pbt and has_saved and evaluation.island % self._islands == self._island:
                insort(self.parents, evaluation, key=lambda parent: (parent.loss, parent.trial))
                del self.parents[PARENTS_PER_ISLAND:]

    def find_context(self, evaluation: Evaluation) -> tuple[float, float] | None:
        """Return the parent's loss, and the age; None if the evaluation has no parent."""
        parent = evaluation.inherits
        if parent not in self._losses:
            return None
        return self._losses[parent], self._ages[evaluation.trial]

    def make_next_context(self, parent: Evaluation) -> tuple[float, float]:
        """Return the loss of a parent, and the age of its next heir."""
        return parent.loss, self._ages[parent.trial] + 1

    def compute_cost(self, evaluation: Evaluation) -> float:
        """Return the loss of a founder, or the change of the loss of an heir.

        The change is relative to the parent's loss.
        """
        context = self.find_context(evaluation)
        if context is None:
            return evaluation.loss
        parent_loss, _ = context
        return (evaluation.loss - parent_loss) / (abs(parent_loss) or 1.0)

    def find_parent(self, params: Mapping[str, Value]) -> Evaluation | None:
        """Return the best parent that differs only in mutable parameters; None without one."""
        return find_parent(params, self.parents, self._space)

    def draw_parent(self, rng: random.Random) -> Evaluation | None:
        """Draw a parent for the next evaluation; None if this evaluation becomes a founder.

        The more of the possible parents are heirs, the rarer are new founders. A founder that
        starts late cannot reach the age of these heirs before the run ends.
        """
        if not self.parents:
            return None
        founders = sum(parent.inherits is None for parent in self.parents) / len(self.parents)
        if self._space.immutable_names and rng.random() < _FOUNDER_CHANCE * founders:
            return None
        return self.find_parent(rng.choice(self.parents).params)


class EvaluationHistory:
    """The evaluations of a run on all islands.

    In a plain process, `start` and `end` add evaluations. In a run, evaluations come from the
    record (see `RecordedHistory`).

    Founders and heirs (see `ParentPool`) are stored separately, because their losses cannot be
    compared.

    Attributes:
        parent_pool: The possible parents.
        encoding: Encodes hyperparameters as genes.
        time_budget: The time limit of this session; None without one.
        changes: Each evaluation when it started and when it ended, in this order.
    """

    def __init__(
        self,
        space: SearchSpace,
        objectives: Objectives = ONLY_LOSS,
        parent_pool: ParentPool | None = None,
    ) -> None:
        self.space = space
        self.encoding = GeneEncoding(space)
        self.objectives = objectives
        self.parent_pool = parent_pool or ParentPool(space)
        self.time_budget: TimeBudget | None = None
        self.changes: list[Evaluation] = []
        widths = (len(space.parameters), len(objectives.names))
        self._founders = _EvaluationRows(*widths, 0)
        self._heirs = _EvaluationRows(*widths, 2)  # The context is the parent's loss and the age.
        self._known: set[tuple[Value | None, ...]] = set()
        self._remaining: list[dict[str, Value]] | None = None  # None until draws find nothing new.
        self._prior_model: PriorModel | None = None
        self._pending: dict[int, Evaluation] = {}
        self._started_count = 0

    def update(self) -> None:
        """Add what other workers have evaluated since the last call: nothing in a plain process."""

    def is_stopping(self) -> bool:
        """Return whether the run is being stopped, so that new hyperparameters are not needed."""
        return False

    def start(self, individual: Individual) -> None:
        """Number an individual that was bred, and add its pending evaluation."""
        trial = self._started_count
        individual.trial = trial
        self._started_count += 1
        pending = Evaluation(trial, "running", math.inf, dict(individual.params), 0, 0, trial)
        if (parent := self.parent_pool.find_parent(individual.params)) is not None:
            pending = dataclasses.replace(pending, inherits=parent.trial)
        self._pending[trial] = pending
        self.add_evaluations([pending])

    def end(self, individual: Individual, values: tuple[float, ...], seconds: float) -> None:
        """Add the end of an evaluation. It has failed if its loss is not finite."""
        ended = dataclasses.replace(
            self._pending.pop(individual.trial),
            state="complete" if math.isfinite(values[0]) else "failed",
            loss=values[0],
            other_values=values[1:],
            seconds=seconds,
            ended=float(len(self.changes)),  # Only the order matters.
            checkpoint_step=1,
        )
        self.add_evaluations([ended])

    def add_evaluations(self, evaluations: Iterable[Evaluation]) -> None:
        """Add evaluations that have started or ended."""
        for evaluation in evaluations:
            self.changes.append(evaluation)
            self.parent_pool.add_evaluation(evaluation)
            self._known.add(make_key(evaluation.params, self.space.parameters))
            self._prior_model = None  # It must be fitted again.
            for rows in (self._founders, self._heirs):
                rows.running.pop(evaluation.trial, None)
                if evaluation.state == "interrupted":
                    rows.remove_ended(evaluation.trial)
            context = self.parent_pool.find_context(evaluation)
            rows = self._founders if context is None else self._heirs
            genes = self.encoding.encode_params(evaluation.params)
            if evaluation.state in ("running", "waiting"):
                rows.running[evaluation.trial] = [*genes, *(context or ())]
            elif evaluation.is_finished:
                values = evaluation.values
                if context is not None:
                    values = (self.parent_pool.compute_cost(evaluation),)
                costs = self.objectives.compute_costs(values)
                # A pruned evaluation was short because it was bad, and another run may have had a
                # faster machine.
                is_whole = evaluation.state == "complete" and not evaluation.imported_from
                seconds = evaluation.seconds if is_whole else math.nan
                rows.add_ended(evaluation, [*genes, *costs, *(context or ()), seconds])

    @property
    def ended_count(self) -> int:
        """The number of evaluations that are complete, pruned, paused or failed."""
        return self._founders.count + self._heirs.count

    def make_founder_sample(self) -> SurrogateSample:
        """Return the founders as a sample. Their costs depend on their hyperparameters alone."""
        return self._founders.make_sample()

    def make_heir_sample(self, parent: Evaluation) -> SurrogateSample:
        """Return the heirs as a sample, with the context of the next heir of `parent`.

        The cost of an heir is the change of the loss, relative to the parent's loss. The context of
        an heir is two numbers from 0 to 1. The first is the position of the parent's loss among the
        losses of all parents. The second is the age, divided by the highest age.
        """
        sample = self._heirs.make_sample()
        next_context = self.parent_pool.make_next_context(parent)
        contexts = np.vstack([sample.contexts, sample.running_contexts, [next_context]])
        contexts[:, 0] = np.unique(contexts[:, 0], return_inverse=True)[1]
        contexts /= np.maximum(contexts.max(axis=0), 1)
        ended = len(sample.contexts)
        return dataclasses.replace(
            sample,
            contexts=contexts[:ended],
            running_contexts=contexts[ended:-1],
            context=contexts[-1],
        )

    def fit_prior_model(self) -> PriorModel | None:
        """Return the priors, and how far founders agree with them; None without priors."""
        if self._prior_model is None and self.space.priors:
            from hpo.breeding.prior_model import PriorModel  # Imports scipy.

            sample = self.make_founder_sample()
            informative = find_informative(sample.succeeded)
            genes = sample.genes[informative]
            active = self.encoding.find_active(genes)
            self._prior_model = PriorModel(self.space)
            self._prior_model.fit(genes, active, sample.costs[informative])
        return self._prior_model

    @property
    def prior_share(self) -> float:
        """The share of random draws that are drawn from the priors; 0 without priors."""
        model = self.fit_prior_model()
        return 0.0 if model is None else _PRIOR_SHARE * model.trust

    def is_known(self, params: Mapping[str, Value]) -> bool:
        """Return whether the run has an evaluation of these hyperparameters, in any state."""
        return make_key(params, self.space.parameters) in self._known

    def draw_new(self, rng: random.Random) -> dict[str, Value] | None:
        """Draw random hyperparameters that are new to the run.

        If random draws find nothing new, all individuals of the space are listed once. New
        hyperparameters are then drawn from this list. The result is None if nothing new is left or
        was found, or if the run is being stopped.
        """
        if self._remaining is None:
            params = self._draw_unknown(rng, _TRIES)
            if params is not None or self.is_stopping():
                return params
            listed = list_individuals(self.space, math.inf, _MOST_SECONDS, self.is_stopping)
            if listed is None:
                params = self._draw_unknown(rng, _MOST_TRIES, _MOST_SECONDS)
            if params is not None:
                return params
            self._remaining = listed or []
        self._remaining = [params for params in self._remaining if not self.is_known(params)]
        return rng.choice(self._remaining) if self._remaining else None

    def _draw_unknown(
        self, rng: random.Random, tries: int, seconds: float = math.inf
    ) -> dict[str, Value] | None:
        """Return hyperparameters that are new to the run; None after too many tries or seconds."""
        until = time.monotonic() + seconds
        expected: list[dict[str, Value]] = []
        share = self.prior_share
        if share and rng.random() < share:
            expected = self.space.draw_from_priors(rng, _PRIOR_TRIES)
        for params in chain(expected, islice(self.space.iterate_draws(rng), tries)):
            if not self.is_known(params):
                return params
            if self.is_stopping() or time.monotonic() > until:
                break
        return None


class RecordedHistory(EvaluationHistory):
    """The evaluations of all workers, as the study has them.

    Args:
        read_changes: Returns the evaluations that have started or ended since its previous call.
        is_stopping: Returns whether the run is being stopped.
    """

    def __init__(
        self,
        space: SearchSpace,
        objectives: Objectives,
        read_changes: Callable[[], Sequence[Evaluation]],
        is_stopping: Callable[[], bool] = lambda: False,
        parent_pool: ParentPool | None = None,
    ) -> None:
        super().__init__(space, objectives, parent_pool)
        self._read_changes = read_changes
        self._is_stopping = is_stopping

    def restore(self, recorded: Sequence[Evaluation]) -> None:
        """Add the evaluations that were recorded before this session."""
        self.add_evaluations(sort_for_learning(recorded))

    def update(self) -> None:
        """Add the evaluations that have started or ended since the previous call."""
        self.add_evaluations(self._read_changes())

    def is_stopping(self) -> bool:
        """Return whether the run is being stopped."""
        return self._is_stopping()

    def start(self, individual: Individual) -> None:
        """Do nothing: the writer numbers and records evaluations, which `update` then reads."""

    def end(self, individual: Individual, values: tuple[float, ...], seconds: float) -> None:
        """Do nothing: the writer records the end, which `update` then reads."""


def sort_for_learning(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Return evaluations in the order of their ends, and those that have not ended last.

    Models depend on the order of ends, which a resumed run must not change.
    """
    return sorted(evaluations, key=lambda e: (e.ended if e.has_ended else math.inf, e.trial))


class _EvaluationRows:
    """Evaluations as rows of genes, costs, context and seconds, in the order of their ends.

    Attributes:
        count: The number of evaluations that have ended.
        running: The genes and the context of each pending evaluation, by trial.
    """

    def __init__(self, genes: int, costs: int, context: int) -> None:
        self.count = 0
        self._genes = genes
        self._ends = np.cumsum([genes, costs, context])
        self._rows: Vector = np.empty((64, genes + costs + context + 1))
        self.running: dict[int, Sequence[float]] = {}
        self._running_width = genes + context
        self._repeatable_rows: dict[int, int] = {}  # Of paused and failed evaluations, by trial.

    def make_sample(self) -> SurrogateSample:
        """Return the evaluations as a sample. The context of the next evaluation is empty."""
        genes, costs, contexts, seconds = np.split(self._rows[: self.count], self._ends, axis=1)
        pending = np.reshape(list(self.running.values()), (-1, self._running_width))
        running, running_contexts = np.split(pending, [self._genes], axis=1)
        context = np.empty(0)
        return SurrogateSample(
            genes, costs, contexts, seconds[:, 0], running, running_contexts, context
        )

    def add_ended(self, evaluation: Evaluation, row: Sequence[float]) -> None:
        """Add an evaluation that has ended. It replaces the evaluation that it promotes."""
        index = self.count
        if evaluation.retry_of is not None:
            index = self._repeatable_rows.pop(evaluation.retry_of, self.count)
        if index == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[index] = row
        self.count = max(self.count, index + 1)
        if evaluation.state in ("paused", "failed"):
            self._repeatable_rows[evaluation.trial] = index

    def remove_ended(self, trial: int) -> None:
        """Remove a failed evaluation that no longer counts, if there is one with this number."""
        removed = self._repeatable_rows.pop(trial, None)
        if removed is None:
            return
        self._rows[removed : self.count - 1] = self._rows[removed + 1 : self.count]
        self.count -= 1
        self._repeatable_rows = {
            known: index - (index > removed) for known, index in self._repeatable_rows.items()
        }


def find_informative(succeeded: Mask) -> npt.NDArray[np.int64]:
    """Return the indices of the evaluations whose success may depend on their hyperparameters.

    They are in the order of their end. A streak of more than 8 failures is left out: a mistake in
    the code or a broken machine fails all evaluations, whatever their hyperparameters.
    """
    streaks = np.cumsum(succeeded)  # All failures of a streak have the same number.
    lengths = np.bincount(streaks[~succeeded], minlength=len(succeeded) + 1)
    return np.flatnonzero(succeeded | (lengths[streaks] <= _LONGEST_STREAK))
