"""The verdict on an evaluation, made from the ends of the objective on all ranks of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from hpo.process.messages import ObjectiveEnd, Report

NOT_JOINED = (
    "the ranks cannot connect to each other: NCCL or gloo does not answer. NCCL_DEBUG=INFO shows "
    "what it does; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select the network interface"
)
TIMEOUT_PREFIX = "timeout: "  # in failures of evaluations that have taken too long


class FailureKind(Enum):
    """Why the objective has failed on a rank."""

    OWN = "own"
    """The failure is not an effect of any of the following."""
    TIMEOUT = "timeout"
    """The rank has waited for its peers for the maximum time."""
    SUSPENDED = "suspended"
    """As TIMEOUT, but this process was stopped in the meantime, for example by a scheduler."""
    CANCELLED = "cancelled"
    """The evaluation was cancelled."""
    ORPHANED = "orphaned"
    """The trainer has ended because its template crashed."""
    STOPPED = "stopped"
    """The whole run stops."""


@dataclass(frozen=True)
class RankEnd(ObjectiveEnd):
    """The end of the objective on one rank, with what its supervisor knows, for the other ranks."""

    rank: int
    kind: FailureKind = FailureKind.OWN
    """Why it has failed, if it has."""
    has_begun: bool = True
    """Whether the trainer has joined the process group. If not, the objective is not the cause."""
    printed: str = ""
    """Lines that the rank has printed since its latest news."""
    news_count: int = 0
    """Number of messages with news that the rank has sent to the leader."""
    reports: tuple[Report, ...] = ()
    """All reports of a program on this rank."""
    aborted: str = ""
    """How the program aborted while it exited, or empty. A failure if no rank reported a loss."""
    remark: str = ""
    """A warning about the evaluation; empty if there is none."""


class State(Enum):
    """The state of an evaluation after a verdict."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    PAUSED = "paused"
    FAILED = "failed"
    STOPPED = "stopped"
    """The whole run stops."""
    REPEATED = "repeated"
    """The objective did not cause the failure, so the individual is evaluated again.

    A template has crashed, connections broke although no rank of this evaluation has closed them,
    or the evaluation cannot start from its checkpoint. Without a failure, the job was suspended for
    so long that a rank has timed out.
    """


@dataclass(frozen=True)
class Verdict:
    """The leader's decision on a report, or on the end of an evaluation."""

    state: State
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    keep: bool = False
    """Whether the weights of this loss must be kept, since they may be the best of the run."""
    save: bool = False
    """Whether the checkpoint of this loss must be copied."""
    is_last: bool = False
    """Whether the objective has returned with this loss on all ranks."""
    diverged: bool = False
    """Whether the evaluation has failed because the loss was not finite."""

    @property
    def ends_evaluation(self) -> bool:
        """Whether the objective must end, or has returned with this loss."""
        return self.state != State.RUNNING or self.is_last

    def conclude(self) -> Verdict:
        """Return the verdict on an evaluation that has ended with this loss."""
        has_returned = self.is_last and self.state == State.RUNNING
        state = State.COMPLETE if has_returned else self.state
        save = self.save and state == State.PAUSED
        return replace(self, state=state, loss=None, keep=False, save=save)


RUNNING_VERDICT = Verdict(State.RUNNING)


def judge_ends(ends: Sequence[RankEnd]) -> Verdict:
    """Return the verdict on the ends of the objective on all ranks, in the order of the ranks."""
    kinds = {end.kind for end in ends}
    if FailureKind.STOPPED in kinds:
        return Verdict(State.STOPPED)
    if FailureKind.ORPHANED in kinds:
        return Verdict(State.REPEATED, failure="the template has crashed")
    failures = [end for end in ends if end.failure is not None]
    if not failures:
        return Verdict(State.COMPLETE)
    # Later failures are effects of the first one.
    first = min(failures, key=lambda end: (_rank_as_effect(end), end.at))
    if first.kind == FailureKind.SUSPENDED:
        return Verdict(State.REPEATED)
    if first.kind == FailureKind.TIMEOUT:
        return _make_timeout_verdict(first, [end for end in ends if end is not first])
    if first.kind == FailureKind.CANCELLED:
        # The line at which each rank was.
        cause = first.failure or ""
        if not any(end.has_begun for end in failures):
            return Verdict(State.REPEATED, failure=cause)
        positions = ", ".join(f"rank {end.rank} was{_describe_place(end)}" for end in failures)
        traceback = _join_tracebacks(failures)
        return Verdict(State.FAILED, failure=f"{cause}; {positions}", traceback=traceback)
    return _make_failure_verdict(first, failures, ends)


def _rank_as_effect(end: RankEnd) -> int:
    """Return how likely a failure is only the effect of another failure: the higher, the more.

    A rank that is cancelled after a timeout may close its connections before its peers are
    cancelled. So their broken connections are effects of the timeout.
    """
    is_cancelled = end.kind == FailureKind.CANCELLED
    if is_cancelled and (end.failure or "").startswith(TIMEOUT_PREFIX):
        return 1
    return 3 if is_cancelled else 2 * end.echo


def _make_failure_verdict(
    first: RankEnd, failures: Sequence[RankEnd], ends: Sequence[RankEnd]
) -> Verdict:
    """Return the verdict on an objective that has failed by itself on rank `first`."""
    position = f", {first.place}" if first.place else ""
    failure = f"rank {first.rank}{position}: {first.failure}"
    is_echo = len(ends) > 1 and all(
        end.echo or end.kind == FailureKind.CANCELLED for end in failures
    )
    ended = [end.rank for end in ends if end.failure is None]
    # The process of a program has ended, while peers still communicate with it.
    if is_echo and ended:
        failure += f"; rank {ended[0]} had ended before"
    is_repeated = not first.has_begun or (is_echo and not ended)
    state = State.REPEATED if is_repeated else State.FAILED
    return Verdict(state, failure=failure, traceback=first.traceback, diverged=first.diverged)


def _make_timeout_verdict(waiting: RankEnd, others: Sequence[RankEnd]) -> Verdict:
    """Return the verdict on a timeout, with the lines of `waiting` and of its late peers."""
    cut = [end for end in others if end.kind == FailureKind.CANCELLED]
    busy = [end for end in cut if not end.echo and not end.has_reported]
    late = busy or cut or list(others)
    awaited = ", ".join(f"rank {end.rank}, which {_describe_progress(end)}" for end in late)
    position = _describe_position(waiting) or " at its end"
    failure = f"{TIMEOUT_PREFIX}rank {waiting.rank} {waiting.failure}{position} for {awaited}"
    return Verdict(State.FAILED, failure=failure, traceback=_join_tracebacks([*late, waiting]))


def _describe_progress(end: RankEnd) -> str:
    if end.failure is None or (end.has_reported and not end.place):
        return "had ended"
    if end.has_reported:
        return f"had yielded{_describe_position(end)}"
    return f"was{_describe_place(end)}"


def _describe_place(end: RankEnd) -> str:
    return _describe_position(end) or " at an unknown place"


def _describe_position(end: RankEnd) -> str:
    return f" at {end.place}" if end.place else ""


def _join_tracebacks(ends: Sequence[RankEnd]) -> str:
    return "\n\n".join(
        f"Rank {end.rank}:\n{end.traceback.rstrip()}" for end in ends if end.traceback
    )
