"""One individual, one loss: the objective run on all ranks of a worker, and recorded."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

from hpo.search_file import SearchFile
from hpo.worker import Worker

if TYPE_CHECKING:
    from hpo.record import Assignment, Record


@dataclass
class _Attempt:
    """How an evaluation went on one rank: the lowest loss and its metrics, or why and when it failed."""

    loss: float = math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    traceback: str = ""
    failed_at: float = math.inf


class Evaluator:
    """Evaluates individuals on one worker; made and called by all of the worker's ranks at the same time.

    `record` is needed on the leader alone; `budget` is the number of evaluations in the whole run.
    """

    def __init__(self, search: SearchFile, settings: Any, worker: Worker, record: Record | None, budget: int) -> None:
        self._search = search
        self._settings = settings
        self._worker = worker
        self._record = record
        self._budget = budget
        self._distributions = search.space.distributions() if record else {}

    def __call__(self, params: Mapping[str, Any], **attributes: int) -> tuple[dict[str, Any], float] | None:
        """Evaluate these hyperparameters, or others that have waited for longer; None where the budget is spent.

        Returns what was evaluated and its loss: the lowest that the objective yielded or returned, infinite if the
        evaluation failed on any rank.
        """
        assignment = None
        if self._record:
            assignment = self._record.start(params, self._distributions, self._budget, **attributes)
        assigned = self._worker.comm.bcast(assignment.params if assignment else None)
        if assigned is None:
            return None
        self._worker.connect()
        started = time.monotonic()
        attempt = self._agree(self._attempt(assigned, assignment))
        if self._record and assignment:
            _finish(self._record, assignment, attempt, time.monotonic() - started)
        return assigned, attempt.loss

    def _attempt(self, params: dict[str, Any], assignment: Assignment | None) -> _Attempt:
        """Run the objective on this rank; what it raises ends the attempt and closes this rank's connections."""
        attempt = _Attempt()
        steps = self._steps(dict(params))
        for step in range(1, 2**63):
            try:
                loss, metrics = next(steps)
            except StopIteration:
                break
            except (Exception, SystemExit) as error:
                return self._failed(error)
            if self._record and assignment:
                self._record.report(assignment, step, loss)
            if loss < attempt.loss:
                attempt.loss, attempt.metrics = loss, metrics
        return attempt

    def _steps(self, params: dict[str, Any]) -> Iterator[tuple[float, dict[str, float]]]:
        """Yield each validation loss of the objective, with its metrics."""
        self._worker.seed_everything()
        result = self._search.call(self._search.objective, params, self._worker, settings=self._settings)
        if not inspect.isgenerator(result):
            yield _checked(result)
            return
        empty = True
        for value in result:
            empty = False
            yield _checked(value)
        if empty:
            raise ValueError("the objective yielded no loss")

    def _failed(self, error: BaseException) -> _Attempt:
        failed_at = time.time()
        reason = " ".join(str(error).split()) or "no message"
        text = "".join(traceback.format_exception(error))
        # The frames hold the model, whose reducer holds the process group: peers that wait in a collective learn of the
        # failure when this rank's connections close.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        self._worker.disconnect()
        return _Attempt(
            failure=f"rank {self._worker.rank}: {type(error).__name__}: {reason}", traceback=text, failed_at=failed_at
        )

    def _agree(self, attempt: _Attempt) -> _Attempt:
        """Give all ranks of the worker the same outcome: the first failure, if there was one."""
        attempts: list[_Attempt] = self._worker.comm.allgather(attempt)
        first = min(attempts, key=lambda attempt: attempt.failed_at)
        if first.failure is None:
            return attempts[0]
        self._worker.disconnect()
        return first


def _finish(record: Record, assignment: Assignment, attempt: _Attempt, seconds: float) -> None:
    if attempt.failure is None:
        record.complete(assignment, attempt.loss, seconds, attempt.metrics)
    else:
        record.fail(assignment, attempt.failure, attempt.traceback, seconds)


def _checked(value: Any) -> tuple[float, dict[str, float]]:
    """Take apart what an objective yielded: a loss, or a loss and a dict of metrics."""
    loss, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if hasattr(loss, "item"):  # a tensor or a numpy scalar
        loss = loss.item()
    if not isinstance(loss, Real):
        raise TypeError(f"an objective yields its validation loss, a number, not {value!r}")
    if not math.isfinite(loss):
        raise ValueError(f"the validation loss is {float(loss)}")
    return float(loss), {str(name): float(metric) for name, metric in dict(metrics).items()}
