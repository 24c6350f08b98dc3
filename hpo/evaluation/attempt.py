"""An evaluation on one of its worker's ranks: its losses so far, the weights of the lowest, and what it has saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpo.evaluation.state import Parts, is_function, parts_of, put_together
from hpo.evaluation.verdict import GOING, Verdict
from hpo.process import clock

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.evaluation.worker import Offered
    from hpo.store.states import State
    from hpo.store.trials import Assignment


class Attempt:
    """An evaluation as it goes on; `loss` is the lowest of its `losses` so far, with its `metrics`.

    `began` is when the evaluation began, on this process's clock, plus the time in which its losses were recorded.
    `offered` are the weights that the objective has offered for its next loss, or a function that gathers them, and
    `weights` a copy of those with the lowest loss, if they are to be kept. `saving` is what the objective goes on from
    after its next loss, in parts, or a function that gathers it, and `state` the last such state that is to be kept.

    `restored` is the state of an evaluation that was interrupted, and which goes on if the objective asks for it: it
    then has its losses, too. `inherited` is that of the individual it comes from, if it begins with that, and
    `has_inherited` says whether the objective has asked for it. `earlier` are the seconds that the evaluation took in
    earlier sessions, where it has a loss of this one already; they are known once it goes on from there.
    """

    def __init__(
        self,
        assignment: Assignment,
        restored: State | None = None,
        inherited: State | None = None,
        earlier: float | None = None,
    ) -> None:
        self.assignment = assignment
        self.is_first = earlier is None
        self.earlier = earlier or 0.0
        self.restored = restored
        self.inherited = inherited
        self.has_inherited = False
        self.losses: list[float] = []
        self.taken_over = 0  # losses of the evaluation that was interrupted
        self.seconds_before = 0.0  # which those took
        self.saving: Parts | Callable[[], Any] | None = None
        self.state: State | None = None
        self.began = clock.now()
        self.verdict: Verdict = GOING
        self.loss = math.inf
        self.metrics: Mapping[str, float] = {}
        self.offered: Offered | None = None
        self.weights: dict[str, Tensor] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to take."""
        return self.verdict.state == "going"

    @property
    def seconds(self) -> float:
        """The seconds for which the evaluation has gone on."""
        return clock.now() - self.began

    @property
    def has_loss(self) -> bool:
        """Whether it has a loss of its own."""
        return len(self.losses) > self.taken_over

    @property
    def has_been_given(self) -> bool:
        """Whether it has begun from a state, without a loss of its own yet; the same on all ranks."""
        return self.restored is not None or (self.inherited is not None and self.verdict.inherited)

    @property
    def saves_together(self) -> bool:
        """Whether all ranks have to gather what the objective has saved."""
        return self.saving is not None and (not isinstance(self.saving, Parts) or self.saving.is_sharded)

    @property
    def seconds_in_all(self) -> float:
        """The seconds for which it has gone on, also before it was interrupted."""
        return self.seconds + self.seconds_before

    @property
    def was_broken_off(self) -> bool:
        """Whether the evaluation has ended without a result, and ranks may be anywhere in the objective."""
        return self.verdict.state in ("failed", "again", "suspended", "stopped")

    def save(self, state: Any) -> None:
        """Remember what the objective goes on from after its next loss."""
        self.saving = state if is_function(state) else parts_of(state)

    def offer(self, weights: Offered) -> None:
        """Remember the weights that the next loss belongs to, or what gathers them."""
        self.offered = weights

    def go_on(self) -> Any:
        """Return what the interrupted evaluation has saved, and take over its losses; None where there is none."""
        if self.has_loss:
            raise RuntimeError("worker.restored is asked for before the first loss, to go on from")
        if self.restored is None:
            return None
        if not self.losses:
            about = self.restored.about
            self.losses, self.taken_over, self.seconds_before = list(about.losses), len(about.losses), about.seconds
            self.earlier = about.seconds if self.is_first else self.earlier
            self.loss, self.metrics = min(self.losses, default=math.inf), about.metrics
            self.weights = dict(self.restored.weights) if self.restored.weights else None
        return put_together(self.restored.about.tree, self.restored.tensors)

    def inherit(self) -> Any:
        """Return what the parent has saved last; None where there is none."""
        if self.has_loss:
            raise RuntimeError("worker.inherited is asked for before the first loss, to begin with")
        if self.inherited is None:
            return None
        self.has_inherited = True
        return put_together(self.inherited.about.tree, self.inherited.tensors)

    def let_go(self) -> None:
        """Forget what was offered and saved for a loss: it holds the model."""
        self.offered = self.saving = None

    def take(self, verdict: Verdict) -> None:
        """Take over the verdict of all ranks."""
        self.verdict = verdict
        if verdict.loss is not None:
            self.losses.append(verdict.loss)
            self.restored = self.inherited = None  # their files may be replaced from now on
            if verdict.loss < self.loss:
                self.loss, self.metrics, self.weights = verdict.loss, verdict.metrics, None
