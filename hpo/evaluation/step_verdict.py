"""The verdict (decision) on a step of an evaluation, made from the steps of all ranks of the worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpo.evaluation.program_reports import Report

# Relative difference. Losses of one network differ less between devices. Losses on different shards of a validation
# set differ more, unless each has millions of samples.
_TOLERANCE = 1e-3
NOT_JOINED = (
    "the ranks cannot connect to each other: NCCL or gloo does not answer. NCCL_DEBUG=INFO shows what it does; "
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select the network interface"
)
TIMEOUT_PREFIX = "timeout: "  # in failures of evaluations that have taken too long


@dataclass(frozen=True)
class Step:
    """A step of the objective on one rank: a loss, the end of the objective (no loss and no failure), or a failure."""

    rank: int
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    gathers: bool = False
    """Whether all ranks must work together to gather the weights that the objective has offered."""
    saves: bool = False
    """Whether all ranks must work together to gather the checkpoint that the objective has saved."""
    failure: str | None = None
    """Description of the failure; None if there is none."""
    own: bool = True
    """Whether the failure has a cause of its own; false if it is the effect of a cancelled evaluation."""
    echo: bool = False
    """Whether the failure is a broken connection, as after the end of a peer."""
    timeout: bool = False
    """Whether the rank has waited for its peers for the maximum time."""
    diverged: bool = False
    """Whether the loss was not finite."""
    suspended: bool = False
    """Whether this process was stopped, for example by a scheduler, while the rank waited for its peers."""
    orphaned: bool = False
    """Whether the trainer has ended because its template crashed."""
    stopped: bool = False
    """Whether the step failed because the whole run stops."""
    at: float = math.inf
    """Time of the failure, in seconds since the epoch."""
    place: str = ""
    """Line of the objective that the rank had reached, with or without a failure."""
    traceback: str = ""
    printed: str = ""
    """Lines that the objective has printed in this step."""
    offers: bool = False
    """Whether the objective has offered weights with this loss."""
    has_saved: bool = False
    """Whether the objective has saved a checkpoint with this loss."""
    went_on: bool = False
    """Whether the objective has read its own checkpoint."""
    inherited: bool = False
    """Whether the objective has read its parent checkpoint."""
    called_off: bool = False
    """Whether the evaluation was already cancelled when the rank sent this step, as after a timeout of a peer."""
    ended: bool = False
    """Whether the objective has returned with this loss."""
    has_begun: bool = True
    """Whether the trainer has joined the process group. Otherwise the objective did not cause the failure."""
    reports: tuple[Report, ...] = ()
    """All reports (losses with metrics) of a program on this rank."""
    aborted: str = ""
    """How the program aborted while it exited, or empty. It is a failure only if no rank has reported a loss."""
    remark: str = ""
    """A warning about the step; empty if there is none."""


@dataclass(frozen=True)
class Verdict:
    """The decision on an evaluation after a step, the same on all ranks."""

    state: str
    """One of going, complete, pruned, paused, failed, stopped, again and suspended.

    After the last two of these, the individual is evaluated again:

    - again: a trainer has ended because its template crashed, or connections broke although no rank
      of this evaluation has closed them.
    - suspended: a rank has timed out because the job was suspended.
    """
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    keep: bool = False
    """Whether the weights of this loss must be kept, since they may be the best of the run."""
    save: bool = False
    """Whether the checkpoint of this loss must be copied."""
    inherited: bool = False
    """Whether a rank has read the parent checkpoint."""
    is_last: bool = False
    """Whether the objective has returned with this loss on all ranks."""
    diverged: bool = False
    """Whether the evaluation has failed because the loss was not finite."""


GOING_VERDICT = Verdict("going")


def judge_steps(steps: Sequence[Step]) -> Verdict:
    """Return the verdict on the steps of a worker's ranks, one step per rank, in the order of the ranks."""
    return replace(_compute_verdict(steps), inherited=any(step.inherited for step in steps))


def _compute_verdict(steps: Sequence[Step]) -> Verdict:
    if any(step.stopped for step in steps):
        return Verdict("stopped")
    if any(step.orphaned for step in steps):
        return Verdict("again", failure="the template has crashed")
    if any(step.failure is not None for step in steps):
        return _make_failure_verdict(steps)
    losses = [step.loss for step in steps if step.loss is not None]
    if not losses:
        return Verdict("complete")
    if len(losses) < len(steps):
        return _make_difference_verdict("the ranks do not yield equally many losses", steps)
    if not all(math.isclose(loss, losses[0], rel_tol=_TOLERANCE, abs_tol=1e-12) for loss in losses):
        return _make_difference_verdict("the ranks yielded different losses", steps, "; all_reduce it, for example")
    if len({step.gathers for step in steps}) > 1:
        return _make_partial_verdict(
            "offered a function, which all of them have to call", steps, [step.gathers for step in steps]
        )
    if len({step.saves for step in steps}) > 1:
        action = "saved a function, or sharded tensors, which all of them have to gather"
        return _make_partial_verdict(action, steps, [step.saves for step in steps])
    return Verdict("going", losses[0], steps[0].metrics, is_last=all(step.ended for step in steps))


def _make_difference_verdict(difference: str, steps: Sequence[Step], advice: str = "") -> Verdict:
    shown = ", ".join(
        f"rank {step.rank} {'ended' if step.loss is None else step.loss}{_describe_position(step)}" for step in steps
    )
    return Verdict("failed", failure=f"{difference}: {shown}{advice}")


def _make_partial_verdict(action: str, steps: Sequence[Step], did: Sequence[bool]) -> Verdict:
    pairs = zip(steps, did, strict=True)
    shown = ", ".join(
        f"rank {step.rank} {'did' if it_did else 'did not'}{_describe_position(step)}" for step, it_did in pairs
    )
    return Verdict("failed", failure=f"not all ranks {action}: {shown}")


def _make_failure_verdict(steps: Sequence[Step]) -> Verdict:
    """Return the verdict on the first failure. Later failures are its effects."""
    failures = [step for step in steps if step.failure is not None]
    first = min(failures, key=lambda step: (not step.own, step.echo, step.at))
    if first.suspended:
        return Verdict("suspended")
    if first.timeout:
        return _make_timeout_verdict(first, [step for step in steps if step is not first])
    if first.own:
        position = f", {first.place}" if first.place else ""
        failure = f"rank {first.rank}{position}: {first.failure}"
        is_echo = len(steps) > 1 and all(step.echo or not step.own for step in failures)
        ended = [step.rank for step in steps if step.ended and step.failure is None]
        if is_echo and ended:  # The process of a program has ended, while peers still communicate with it.
            failure += f"; rank {ended[0]} had ended before"
        state = "again" if not first.has_begun or (is_echo and not ended) else "failed"
        return Verdict(state, failure=failure, traceback=first.traceback, diverged=first.diverged)
    if not any(step.has_begun for step in failures):
        return Verdict("again", failure=first.failure or "")
    positions = ", ".join(
        f"rank {step.rank} was{_describe_position(step) or ' at an unknown place'}" for step in failures
    )
    return Verdict("failed", failure=f"{first.failure}; {positions}", traceback=_join_tracebacks(failures))


def _make_timeout_verdict(waiting: Step, others: Sequence[Step]) -> Verdict:
    """Return the verdict on a timeout, with the line at which `waiting` waited and the lines of its late peers."""
    busy = [step for step in others if step.failure is not None and not step.own and not step.echo]
    cut = [step for step in others if step.failure is not None and not step.own]
    late = busy or cut or list(others)
    awaited = ", ".join(f"rank {step.rank}, which {_describe_progress(step)}" for step in late)
    position = _describe_position(waiting) or " at its end"
    failure = f"{TIMEOUT_PREFIX}rank {waiting.rank} {waiting.failure}{position} for {awaited}"
    return Verdict("failed", failure=failure, traceback=_join_tracebacks([*late, waiting]))


def _describe_progress(step: Step) -> str:
    # A rank that timed out without a position had ended its objective.
    if step.failure is not None and not (step.timeout and not step.place):
        return f"was{_describe_position(step) or ' at an unknown place'}"
    return f"had yielded{_describe_position(step)}" if step.loss is not None else "had ended"


def _describe_position(step: Step) -> str:
    return f" at {step.place}" if step.place else ""


def _join_tracebacks(steps: Sequence[Step]) -> str:
    return "\n\n".join(f"Rank {step.rank}:\n{step.traceback.rstrip()}" for step in steps if step.traceback)
