"""How the ranks of a worker judge together what became of an evaluation's last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Losses of one network differ a little between devices; those of different shards of a validation set differ by more
# than this unless there are millions of samples in each.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Step:
    """What one rank says of its last step: a loss, its end (no loss and no failure), or a failure.

    A failure is the rank's `own` if nobody had called the evaluation off before; `echo` if it came from a connection
    that a peer had ended; `timeout` if the rank had waited for others for as long as it may. `at` is when, in seconds
    since the epoch, and `where` the objective was. `stopped` says that the whole run stops. `ending` is the
    state in which the leader ends the evaluation with this loss, and `reason` why it fails, if it does.
    """

    rank: int
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    own: bool = True
    echo: bool = False
    timeout: bool = False
    stopped: bool = False
    ending: str | None = None
    reason: str = ""
    at: float = math.inf
    where: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Verdict:
    """What becomes of an evaluation, the same on all ranks: `state` is going, complete, failed or stopped."""

    state: str
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""


def judge(steps: Sequence[Step]) -> Verdict:
    """Judge what the ranks of a worker say, one step each, in the order of the ranks."""
    if any(step.stopped for step in steps):
        return Verdict("stopped")
    failures = [step for step in steps if step.failure is not None]
    if failures:
        return _failed(failures)
    losses = [step.loss for step in steps if step.loss is not None]
    if not losses:
        return Verdict("complete")
    if len(losses) < len(steps):
        shown = ", ".join(f"rank {step.rank} {'ended' if step.loss is None else step.loss}" for step in steps)
        return Verdict("failed", failure=f"the ranks do not yield equally many losses: {shown}")
    if not all(math.isclose(loss, losses[0], rel_tol=_TOLERANCE, abs_tol=1e-12) for loss in losses):
        shown = ", ".join(f"rank {step.rank} {step.loss}" for step in steps)
        return Verdict("failed", failure=f"the ranks yielded different losses: {shown}; all_reduce it, for example")
    return Verdict(steps[0].ending or "going", losses[0], steps[0].metrics, failure=steps[0].reason)


def _failed(failures: Sequence[Step]) -> Verdict:
    """Find the failure that came first and caused the others, and who was waited for, if it was a timeout."""
    first = min(failures, key=lambda step: (not step.own, step.echo, step.at))
    late = [step for step in failures if not step.own and not step.echo]
    if first.timeout and late:
        failure = f"timeout: rank {late[0].rank} was at {late[0].where} when {_by(first)}"
        return Verdict("failed", failure=failure, traceback=late[0].traceback)
    failure = f"timeout: {_by(first)}" if first.timeout else _by(first)
    return Verdict("failed", failure=failure, traceback=first.traceback)


def _by(step: Step) -> str:
    return f"rank {step.rank}: {step.failure}" if step.own else f"{step.failure}; rank {step.rank} was at {step.where}"
