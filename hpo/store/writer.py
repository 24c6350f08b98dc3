"""The one that writes a run's record: what the leaders of all workers ask it and tell it, and what is new to them."""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hpo.process import clock
from hpo.store.evaluations import TOLD
from hpo.store.growth import Promising, losses_left, promising
from hpo.store.news import News

if TYPE_CHECKING:
    from hpo.store.claims import Claims
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.heirs import Heirs
    from hpo.store.log import Log
    from hpo.store.mirror import Mirror
    from hpo.store.pruning import Judgement, Pruner
    from hpo.store.record import Record
    from hpo.store.rungs import Halving
    from hpo.store.states import States
    from hpo.store.weights import BestWeights, ConfirmedWeights

_OF_RECORD = frozenset(
    (
        *("report", "went_on", "saved", "grew", "disinherit", "complete", "prune", "fail", "interrupt"),
        "failures_before_any_success",
    )
)
# The next commit is waited for a tenth of a second, since file systems take the same time for many lines as for one,
# and four times as long as the last one took: who asks meanwhile is answered at once.
_LEAST_PAUSE = 0.1
_SHARE = 4.0


@dataclass
class Writer:
    """Writes to the record, and answers leaders; in one thread, which nobody else may be in.

    Every question is answered at once. With a `mirror`, which the record is then of, what was told is durable once it
    is committed, by `settle` or with the next claim, and without one at once. It is not in `settled` before it is.
    """

    record: Record
    claims: Claims
    log: Log
    states: States
    mirror: Mirror | None = None
    pruner: Pruner | None = None
    halving: Halving | None = None
    heirs: Heirs | None = None
    weights: BestWeights | ConfirmedWeights | None = None
    _news: News = field(default_factory=News, init=False)
    _told: list[bytes] = field(default_factory=list, init=False)
    _unsettled: list[Evaluation] = field(default_factory=list, init=False)
    _settled: deque[Evaluation] = field(default_factory=deque, init=False)
    _has_changed: bool = field(default=False, init=False)
    _due: float = field(default=0.0, init=False)
    _texts: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._take_news()
        self._publish()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect what is told inside ``with``, and commit it together."""
        with self.mirror.collecting() if self.mirror else nullcontext():
            yield
            self.commit()

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Do what a leader says by the name of a method, and return the answer."""
        self._has_changed = True
        method: Callable[..., Any] = getattr(self.record if name in _OF_RECORD else self, name)
        return method(*arguments, **options)

    def settle(self) -> None:
        """Commit what was told, unless the last commit was just now."""
        if clock.now() >= self._due:
            self.commit()

    def commit(self) -> None:
        """Make durable what was told so far."""
        began = clock.now()
        if self.mirror and self.mirror.commit():
            now = clock.now()
            self._due = now + max(_LEAST_PAUSE, _SHARE * (now - began))
        self.log.write()
        if self._has_changed:
            self._has_changed = False
            self._take_news()
            self._publish()

    def settled(self) -> list[Evaluation]:
        """Return what has started, ended or been promoted, durably, since the last call; for one other thread."""
        news = []
        while self._settled:
            news.append(self._settled.popleft())
        return news

    # What leaders ask, and tell

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start an evaluation as `Claims.claim` does; a new one may inherit from one of the best of its island."""
        parent = self.heirs.parent(params, attributes["island"]) if self.heirs else None
        return self._durably(self.claims.claim(params, parent, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start an evaluation that has waited, or was paused, as `Claims.claim_waiting` does."""
        return self._durably(self.claims.claim_waiting(**attributes))

    def _durably(self, assignment: Assignment | None) -> Assignment | None:
        """Commit the start of an evaluation: if it kills the job at once, it has to be known that it was in flight."""
        if assignment is not None:
            self.commit()
        return assignment

    def news(self, since: int) -> tuple[bytes, int]:
        """Return what is new behind the first so many news, pickled one by one, and how many there are by now."""
        self._take_news()
        return b"".join(self._told[since:]), len(self._told)

    def judge(self, assignment: Assignment, losses: int, values: Sequence[float] = ()) -> Judgement:
        """Let the pruner judge an evaluation by its losses, and forget the states of those that fall out by that."""
        assert self.pruner is not None
        judgement = self.pruner.judge(self.record, assignment, losses, values)
        self._drop(judgement.fall_out)
        return judgement

    def printed(self, trial: int, text: str) -> None:
        """Keep what an evaluation has printed."""
        self.log.add(trial, text)

    def wants_weights(self, trial: int, loss: float) -> bool:
        """Return whether weights of this loss are to be kept, of an evaluation that confirms the best."""
        self._take_news()
        return cast("ConfirmedWeights", self.weights).wants(trial, loss)

    def weights_wanted(self, trial: int) -> list[str]:
        """Return the files that are to hold the weights of an evaluation which is complete."""
        self._take_news()
        return [str(path) for path in self.weights.wanted(trial)] if self.weights else []

    def place_weights(self, trial: int) -> None:
        """Put weights that a leader has written in their place, if they are still wanted there."""
        if self.weights:
            self.commit()  # the best on disk has its weights, also after a death in between
            self.weights.place(trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return any(one.curve for one in self.record.evaluations())

    def is_first(self, text: str) -> bool:
        """Return whether no worker has asked this about the same text before."""
        is_first = text not in self._texts
        self._texts.add(text)
        return is_first

    def losses_before(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that a trial repeats; none if it repeats none."""
        evaluations = self.record.evaluations()
        earlier = evaluations[trial].retry_of
        if earlier is None:
            return [], 0.0
        curve, seconds = evaluations[earlier].curve, evaluations[earlier].seconds
        return [curve[step] for step in sorted(curve)], 0.0 if math.isnan(seconds) else seconds

    def checkpoint_step(self, trial: int) -> int:
        """Return after how many losses an evaluation was saved last."""
        return self.record.evaluations()[trial].checkpoint_step

    def bequeaths(self, trial: int, loss: float) -> bool:
        """Tell whether others may inherit from an evaluation that ends with this loss."""
        return self.heirs is not None and self.heirs.may_leave(trial, loss)

    def make_room(self, trial: int) -> None:
        """Forget the states of those of whom nobody will inherit any more, on the island of an evaluation."""
        if self.heirs:
            self._drop(self.heirs.superseded(trial))

    def promising(self) -> list[Promising]:
        """Return the evaluations that others may help."""
        return promising(self.halving, self.record.evaluations(), time.time()) if self.halving else []

    def losses_left(self, losses: int) -> int:
        """Return how many losses an evaluation will still have after so many."""
        return losses_left(self.record.evaluations(), losses)

    def _drop(self, roots: Sequence[int]) -> None:
        if roots:
            self.commit()  # nobody goes on from them any more, also after a death in between
        for root in roots:
            self.states.drop(root)

    def _take_news(self) -> None:
        for one in self._news.of(self.record.trials()):
            self._told.append(pickle.dumps(tuple(getattr(one, name) for name in TOLD)))
            self._unsettled.append(one)
            if self.weights:
                self.weights.learn(one)

    def _publish(self) -> None:
        self._settled.extend(self._unsettled)
        self._unsettled.clear()
