"""The contents of messages about an evaluation, among a rank and the trainers of a worker.

Both sides share these classes, so that neither has to import the other's code. The fields of an
instance are the JSON content of the message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GroupTicket:
    """The parameters with which a trainer joins the process group of its worker."""

    name: str
    """Name of the group, which is new for each group."""
    rank: int
    size: int
    index: int
    """Index of the worker in the run."""
    backend: str
    devices: Sequence[int]
    """Indices of this rank's GPUs, among the GPUs that its trainer sees."""
    file: str
    """Path of the file through which the ranks connect; empty if they connect through `address`."""
    address: Sequence[Any]
    """Host and port of torch's store on the leader."""
    timeout: float
    """Maximum seconds for which a rank waits for its peers."""
    environment: Mapping[str, str]
    """Environment variables of torchrun, and the network interface."""


@dataclass(frozen=True)
class EvaluationRequest:
    """The message "evaluate": run the objective once."""

    params: Mapping[str, Any]
    seed: int
    trial: int
    folder: str
    ticket: GroupTicket | None
    """The process group to join first; None if the trainer is still in the worker's group."""
    free_memory: int
    """Bytes of the GPU that must be free before the objective begins."""
    checkpoint: str | None
    """File of the evaluation's own checkpoint."""
    parent_checkpoint: str | None
    is_traced: bool
    is_compared: bool
    """Whether the ranks compare their collectives before each one begins."""

    def encode(self) -> dict[str, Any]:
        """Return the request as JSON data."""
        return {**vars(self), "ticket": self.ticket and vars(self.ticket)}

    @classmethod
    def decode(cls, content: Mapping[str, Any]) -> EvaluationRequest:
        """Return the request that `encode` has made JSON data of."""
        ticket = content["ticket"]
        return cls(**{**content, "ticket": ticket and GroupTicket(**ticket)})


@dataclass(frozen=True)
class Report:
    """The message "report": a loss with its metrics, or a mistake in a report."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    mistake: str = ""
    """Description of the mistake, which fails the evaluation; empty if there is none."""
    is_last: bool = False
    """Whether the objective has returned with this loss on all ranks."""
    offers_weights: bool = False
    has_saved: bool = False
    """Whether a checkpoint was saved with this loss."""
    has_resumed: bool = False
    """Whether the evaluation has read its own checkpoint."""
    has_read_parent: bool = False
    """Whether the evaluation has read the parent checkpoint."""
    checkpoint: str = ""
    """Name of the draft of a script's checkpoint; empty if there is none."""
    weights: str = ""
    """Name of the draft of a script's weights; empty if there is none."""
    epoch: int | None = None
    """Number of the epoch in a script's lines, by ``--step``; None if it is not known."""


@dataclass(frozen=True)
class ReportAnswer:
    """The message "answer": the leader's decision on a report, for all trainers of the worker."""

    continues: bool
    keeps_weights: bool = False
    saves_checkpoint: bool = False


@dataclass(frozen=True, kw_only=True)
class ObjectiveEnd:
    """The message "end": the objective or the program has returned, or it has failed."""

    failure: str | None = None
    """Description of the failure; None if there is none."""
    is_cancelled: bool = False
    """Whether the failure is the effect of a cancellation."""
    echo: bool = False
    """Whether it only shows that a peer has ended or is late, as a broken connection does."""
    gave_up: bool = False
    """Whether the failure ended a wait for other ranks, which had taken `seconds`."""
    seconds: float = 0.0
    diverged: bool = False
    """Whether the loss was not finite."""
    at: float = math.inf
    """Time of the failure, in seconds since the epoch."""
    place: str = ""
    """Line of the objective at the failure."""
    has_reported: bool = False
    """Whether it ended a wait for the reports of other ranks, or for the leader's answer."""
    is_offer: bool = False
    """Whether a function that the objective has offered with its loss has failed."""
    traceback: str = ""
    has_resumed: bool = False
    """Whether the objective has read its own checkpoint."""
    has_read_parent: bool = False
    """Whether the objective has read its parent checkpoint."""
    is_status: bool = False
    """Whether the failure is the exit status of a program, so that its last line may explain it."""
    is_abort: bool = False
    """Whether a program has ended by SIGABRT."""
    earlier_files: Mapping[str, bool] = field(default_factory=dict)
    """Files that a program has read, and an earlier evaluation has probably written, by path. The
    value is whether they have changed since."""
    ends_trainer: bool = False
    """Whether the process of the trainer ends with it, as for a program."""
