"""Keep the possible parents of an island for population based training.

A parent is an evaluation from whose checkpoint another evaluation starts. The age is the number of
ancestors.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo.store.inheritance import PARENTS_PER_ISLAND, find_parent

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.evaluations import Evaluation

_FOUNDER_CHANCE = 0.5  # Probability of a new founder while all parents are founders.


class ParentPool:
    """The possible parents on an island, and the context of each evaluation with a parent.

    A founder is an evaluation without a parent. All others are heirs. The loss of an heir depends
    mostly on its parent. Therefore, propagators learn the change of the loss, given a context: the
    parent's loss and the age (Parker-Holder et al., Provably efficient online hyperparameter
    optimization with population-based bandits, 2020). The age of an evaluation is the number of its
    ancestors.

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
        """Return the loss of a founder, or the relative change of the loss of an heir.

        The change is the loss minus the parent's loss, divided by the parent's loss.
        """
        context = self.find_context(evaluation)
        if context is None:
            return evaluation.loss
        parent_loss, _ = context
        return (evaluation.loss - parent_loss) / (abs(parent_loss) or 1.0)

    def find_parent(self, params: Mapping[str, Any]) -> Evaluation | None:
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
