"""How the ranks of a worker judge together what became of an evaluation's last step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpo.evaluation.program_reports import Report

# Losses of one network differ a little between devices; those of different shards of a validation set differ by more
# than this unless there are millions of samples in each.
_TOLERANCE = 1e-3
TIMEOUT_PREFIX = "timeout: "  # begins what is said of an evaluation that has taken too long


@dataclass(frozen=True)
class Step:
    """What one rank says of its last step: a loss, its end (no loss and no failure), or a failure.

    A failure is the rank's `own` if the evaluation had not been called off before; `echo` if it came from a connection
    that a peer had ended; a `timeout` if the rank had waited for others for as long as it may; `diverged` if the loss
    was not finite. `at` is the time of the failure, in seconds since the epoch. `place` is the line of the objective
    that the rank was at, with or without a failure.

    `offers` and `has_saved` say that the objective has offered weights, or saved a state, with this loss; `gathers` and
    `saves` that all ranks have to gather them. `went_on` says that it has asked for the state that it continues from,
    and `inherited` for its parent's; `ended` that it has returned with this loss.

    `suspended` says that the process was stopped while it waited, `stopped` that the whole run stops, `orphaned` that
    the template has died, and its trainer with it. `printed` is what the objective has printed in this step;
    `called_off` says that the evaluation had been called off when the rank came: another one may have waited in vain.
    `reports` are all that a program has reported on this rank. `aborted` is how it was aborted while it exited, which
    is a failure only if no rank has reported a loss; `remark` is a warning about it.
    """

    rank: int
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    gathers: bool = False
    saves: bool = False
    failure: str | None = None
    own: bool = True
    echo: bool = False
    timeout: bool = False
    diverged: bool = False
    suspended: bool = False
    orphaned: bool = False
    stopped: bool = False
    at: float = math.inf
    place: str = ""
    traceback: str = ""
    printed: str = ""
    offers: bool = False
    has_saved: bool = False
    went_on: bool = False
    inherited: bool = False
    called_off: bool = False
    ended: bool = False
    reports: tuple[Report, ...] = ()
    aborted: str = ""
    remark: str = ""


@dataclass(frozen=True)
class Verdict:
    """What becomes of an evaluation, the same on all ranks.

    `state` is going, complete, pruned, paused, failed or stopped, or one of three after which the individual is
    evaluated again: "again", if a trainer has ended with its template, or connections were closed that no rank has
    closed in this evaluation, "suspended", if a rank has waited in vain because the job was suspended, and "regrouped",
    if it goes on where it is on the ranks of other `workers`, of which the first is its own. `keep` says that the
    weights of this loss, the best of the run, are to be kept, and `save` that what was saved with it is to be copied;
    `inherited` that a rank has asked for what it inherits, `is_last` that the objective has returned with this loss on
    all ranks, and `diverged` that the evaluation has failed since the loss was not finite.
    """

    state: str
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    keep: bool = False
    save: bool = False
    inherited: bool = False
    is_last: bool = False
    diverged: bool = False
    workers: tuple[int, ...] = ()


GOING_VERDICT = Verdict("going")


def judge_steps(steps: Sequence[Step]) -> Verdict:
    """Return the verdict on the steps of a worker's ranks, one step for each, in the order of the ranks."""
    return replace(_compute_verdict(steps), inherited=any(step.inherited for step in steps))


def _compute_verdict(steps: Sequence[Step]) -> Verdict:
    if any(step.stopped for step in steps):
        return Verdict("stopped")
    if any(step.orphaned for step in steps):
        return Verdict("again", failure="the template has died")
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
        what = "saved a function, or sharded tensors, which all of them have to gather"
        return _make_partial_verdict(what, steps, [step.saves for step in steps])
    return Verdict("going", losses[0], steps[0].metrics, is_last=all(step.ended for step in steps))


def _make_difference_verdict(what: str, steps: Sequence[Step], advice: str = "") -> Verdict:
    shown = ", ".join(
        f"rank {step.rank} {'ended' if step.loss is None else step.loss}{_describe_position(step)}" for step in steps
    )
    return Verdict("failed", failure=f"{what}: {shown}{advice}")


def _make_partial_verdict(what: str, steps: Sequence[Step], did: Sequence[bool]) -> Verdict:
    pairs = zip(steps, did, strict=True)
    shown = ", ".join(
        f"rank {step.rank} {'did' if it_did else 'did not'}{_describe_position(step)}" for step, it_did in pairs
    )
    return Verdict("failed", failure=f"not all ranks {what}: {shown}")


def _make_failure_verdict(steps: Sequence[Step]) -> Verdict:
    """Return the verdict on the failure that came first and caused the others."""
    failures = [step for step in steps if step.failure is not None]
    first = min(failures, key=lambda step: (not step.own, step.echo, step.at))
    if first.suspended:
        return Verdict("suspended")
    if first.timeout:
        return _make_timeout_verdict(first, [step for step in steps if step is not first])
    if first.own:
        where = f", {first.place}" if first.place else ""
        failure = f"rank {first.rank}{where}: {first.failure}"
        is_echo = len(steps) > 1 and all(step.echo or not step.own for step in failures)
        ended = [step.rank for step in steps if step.ended and step.failure is None]
        if is_echo and ended:  # of a program: its process is gone, and peers may wait for it
            failure += f"; rank {ended[0]} had ended before"
        state = "again" if is_echo and not ended else "failed"
        return Verdict(state, failure=failure, traceback=first.traceback, diverged=first.diverged)
    places = ", ".join(f"rank {step.rank} was{_describe_position(step) or ' at an unknown place'}" for step in failures)
    return Verdict("failed", failure=f"{first.failure}; {places}", traceback=_join_tracebacks(failures))


def _make_timeout_verdict(waiting: Step, others: Sequence[Step]) -> Verdict:
    """Return a verdict that says where a rank waited, and where those ranks were that did not wait themselves."""
    busy = [step for step in others if step.failure is not None and not step.own and not step.echo]
    cut = [step for step in others if step.failure is not None and not step.own]
    late = busy or cut or list(others)
    whom = ", ".join(f"rank {step.rank}, which {_describe_progress(step)}" for step in late)
    position = _describe_position(waiting) or " at its end"
    failure = f"{TIMEOUT_PREFIX}rank {waiting.rank} {waiting.failure}{position} for {whom}"
    return Verdict("failed", failure=failure, traceback=_join_tracebacks([*late, waiting]))


def _describe_progress(step: Step) -> str:
    if step.failure is not None and not (step.timeout and not step.place):  # it waited for others at its end
        return f"was{_describe_position(step) or ' at an unknown place'}"
    return f"had yielded{_describe_position(step)}" if step.loss is not None else "had ended"


def _describe_position(step: Step) -> str:
    return f" at {step.place}" if step.place else ""


def _join_tracebacks(steps: Sequence[Step]) -> str:
    return "\n\n".join(f"Rank {step.rank}:\n{step.traceback.rstrip()}" for step in steps if step.traceback)
