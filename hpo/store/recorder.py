"""A leader's end of the record: it asks and tells the writer, and hears from it what is new in the run."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.store.evaluations import TOLD, Assignment, Evaluation

if TYPE_CHECKING:
    from hpo.store.growth import Promising
    from hpo.store.pruning import Judgement
    from hpo.store.writer import Writer


class Line(Protocol):
    """What connects a leader to the writer."""

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something, without waiting for it."""

    def ask(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:
        """Let the writer do something after all that it was told, and return its answer.

        Raises TimeoutError after `limit` seconds.
        """


class Direct:
    """The line to a writer in the same thread; all that it is told is durable at once."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Let the writer do something."""
        self._writer(name, *arguments, **options)
        self._writer.commit()

    def ask(self, name: str, *arguments: Any, limit: float = math.inf, **options: Any) -> Any:  # noqa: ARG002 - at once
        """Let the writer do something, and return its answer."""
        answer = self._writer(name, *arguments, **options)
        self._writer.commit()
        return answer


class Recorder:
    """Records the evaluations of one worker; `objectives` are the run's.

    Nothing new is claimed once `is_stopping()` is true. ``listeners`` are called with each evaluation that has started
    or ended, when its news are asked for. Of these, only what breeding needs is known (`hpo.store.evaluations.TOLD`).
    """

    def __init__(
        self,
        line: Line,
        objectives: Objectives = ONLY_LOSS,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._line = line
        self.objectives = objectives
        self.is_stopping = is_stopping
        self._known = 0
        self.listeners: list[Callable[[Evaluation], None]] = []

    def news(self) -> list[Evaluation]:
        """Return the evaluations that have started, ended, or been promoted since the last call; at first, all."""
        content, self._known = self._line.ask("news", self._known)
        stream, news = io.BytesIO(content), []
        while stream.tell() < len(content):
            news.append(Evaluation(**dict(zip(TOLD, pickle.load(stream), strict=True))))
        for one in news:
            for listener in self.listeners:
                listener(one)
        return news

    def claim(self, params: Mapping[str, Any], **attributes: Any) -> Assignment | None:
        """Start an evaluation as `hpo.store.claims.Claims.claim` does."""
        if self.is_stopping():
            return None
        return cast("Assignment | None", self._line.ask("claim", params, **attributes))

    def claim_waiting(self, **attributes: Any) -> Assignment | None:
        """Start an evaluation as `hpo.store.claims.Claims.claim_waiting` does."""
        return None if self.is_stopping() else cast("Assignment | None", self._line.ask("claim_waiting", **attributes))

    def settle(self, limit: float = math.inf) -> None:
        """Wait until all that was told is durable; raises TimeoutError after `limit` seconds."""
        self._line.ask("commit", limit=limit)

    # Of one evaluation, as the record's own methods of these names

    def report(self, assignment: Assignment, step: int, loss: float) -> None:
        """Record an intermediate value."""
        self._line.tell("report", assignment, step, loss)

    def went_on(self, assignment: Assignment, losses: Sequence[float], seconds: float) -> None:
        """Record the losses that an evaluation had when it went on."""
        self._line.tell("went_on", assignment, losses, seconds)

    def saved(self, assignment: Assignment, losses: int) -> None:
        """Record that an evaluation goes on after so many losses if it is interrupted now."""
        self._line.tell("saved", assignment, losses)

    def grew(self, assignment: Assignment, losses: int, workers: Sequence[int]) -> None:
        """Record that an evaluation goes on with these workers."""
        self._line.tell("grew", assignment, losses, workers)

    def disinherit(self, assignment: Assignment) -> None:
        """Record that an evaluation has begun without what it was to inherit."""
        self._line.tell("disinherit", assignment)

    def complete(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation succeeded."""
        self._line.tell("complete", assignment, loss, seconds, dict(metrics), **attributes)

    def prune(
        self, assignment: Assignment, loss: float, seconds: float, metrics: Mapping[str, float], **attributes: int
    ) -> None:
        """Record that an evaluation was pruned, or paused."""
        self._line.tell("prune", assignment, loss, seconds, dict(metrics), **attributes)

    def fail(self, assignment: Assignment, reason: str, traceback: str, seconds: float) -> None:
        """Record that an evaluation failed."""
        self._line.tell("fail", assignment, reason, traceback, seconds)

    def interrupt(self, assignment: Assignment) -> None:
        """End an evaluation that could not end by itself, and let it wait to be evaluated again."""
        self._line.tell("interrupt", assignment)

    def printed(self, trial: int, text: str) -> None:
        """Keep what an evaluation has printed."""
        if text:
            self._line.tell("printed", trial, text)

    # What the writer knows, as its own methods of these names

    def judge(self, assignment: Assignment, losses: int, loss: float, metrics: Mapping[str, float]) -> Judgement:
        """Let the pruner judge an evaluation after so many losses, by its lowest loss and the metrics of that."""
        values = (loss, *self.objectives.of(metrics)) if self.objectives.are_several else ()
        return cast("Judgement", self._line.ask("judge", assignment, losses, values))

    def failures_before_any_success(self) -> int:
        """Return how many evaluations of this session have failed, where none has ever succeeded."""
        return int(self._line.ask("failures_before_any_success"))

    def wants_weights(self, trial: int, loss: float) -> bool:
        """Return whether weights of this loss are to be kept, of an evaluation that confirms the best."""
        return bool(self._line.ask("wants_weights", trial, loss))

    def weights_wanted(self, trial: int) -> list[str]:
        """Return the files that are to hold the weights of an evaluation which is complete."""
        return list(self._line.ask("weights_wanted", trial))

    def place_weights(self, trial: int) -> None:
        """Let weights that were written be put in their place."""
        self._line.tell("place_weights", trial)

    def has_losses(self) -> bool:
        """Return whether any evaluation of the run has reported a loss."""
        return bool(self._line.ask("has_losses"))

    def is_first(self, text: str) -> bool:
        """Return whether no worker has asked this about the same text before."""
        return bool(self._line.ask("is_first", text))

    def losses_before(self, trial: int) -> tuple[list[float], float]:
        """Return the losses and the seconds of the trial that a trial repeats; none if it repeats none."""
        losses, seconds = self._line.ask("losses_before", trial)
        return list(losses), float(seconds)

    def checkpoint_step(self, trial: int) -> int:
        """Return after how many losses an evaluation was saved last."""
        return int(self._line.ask("checkpoint_step", trial))

    def bequeaths(self, trial: int, loss: float) -> bool:
        """Tell whether others may inherit from an evaluation that ends with this loss."""
        return bool(self._line.ask("bequeaths", trial, loss))

    def make_room(self, trial: int) -> None:
        """Let the states of those be forgotten of whom nobody will inherit any more."""
        self._line.tell("make_room", trial)

    def promising(self) -> list[Promising]:
        """Return the evaluations that others may help."""
        return list(self._line.ask("promising"))

    def losses_left(self, losses: int) -> int:
        """Return how many losses an evaluation will still have after so many."""
        return int(self._line.ask("losses_left", losses))
