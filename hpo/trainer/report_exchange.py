"""Let the trainers of a worker agree on each report of an objective, over a process group of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions, GatherOptions
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroupGloo

from hpo.process import clock

# Relative difference. Losses of one network differ less between devices. Losses on different shards of a validation
# set differ more, unless each has millions of samples.
_TOLERANCE = 1e-3
_PART_BYTES = 1024
_MAX_POSITION = 200  # characters, so that a part fits into its bytes
# torch does not limit these collectives: `collect` has its own limit, and the leader may wait for a database.
_UNLIMITED = timedelta(days=365)
_SHORT_WAIT = timedelta(seconds=0.1)  # Python handles signals only between two waits.


@dataclass(frozen=True)
class ReportPart:
    """The contribution of one trainer to a report."""

    rank: int
    loss: float | None
    """None if the objective has ended without another loss."""
    position: str = ""
    """Line of the objective, such as "my_search.py:33"."""
    has_ended: bool = False
    """Whether the objective has returned with this loss, or without a loss."""
    gathers_weights: bool = False
    """Whether all ranks must work together to gather the weights that the objective has offered."""
    gathers_checkpoint: bool = False
    """Whether all ranks must work together to gather the checkpoint that the objective has saved."""


@dataclass(frozen=True)
class ReportAnswer:
    """The leader's answer to a report, for all trainers of the worker."""

    continues: bool
    keeps_weights: bool = False
    saves_checkpoint: bool = False


class ReportExchange:
    """Connects the trainers of a worker, so that they can agree. Collective: create it on all ranks.

    The objective's own process groups are not used, since the objective may replace or misuse them.

    Args:
        store: The store through which the ranks find each other.
        connect_timeout: Maximum time to connect.
        patience: Maximum seconds for which a rank waits for its peers to report.
    """

    def __init__(self, store: Store, rank: int, size: int, connect_timeout: timedelta, patience: float) -> None:
        self._rank, self._size = rank, size
        self._patience = patience
        self._group: Any = None
        if size > 1:
            self._group = ProcessGroupGloo(PrefixStore("reports", store), rank, size, timeout=connect_timeout)

    def collect(self, part: ReportPart) -> list[ReportPart] | None:
        """Return the parts of all ranks on rank 0, in the order of ranks; None on other ranks. Collective.

        Raises:
            RuntimeError: A peer has not reported within `patience` seconds, or its process has ended.
        """
        if self._group is None:
            return [part]
        sent = _pack_part(part)
        received = [[torch.empty_like(sent) for _ in range(self._size)]] if self._rank == 0 else []
        options = GatherOptions()
        options.rootRank = 0
        options.timeout = _UNLIMITED
        self._wait_for(self._group.gather(received, [sent], options), self._patience)
        return [_unpack_part(tensor) for tensor in received[0]] if received else None

    def broadcast(self, answer: ReportAnswer | None) -> ReportAnswer:
        """Return the `answer` of rank 0 on all ranks; the argument of other ranks is ignored. Collective.

        Raises:
            RuntimeError: The process of rank 0 has ended.
        """
        flags = [False] * 3 if answer is None else [answer.continues, answer.keeps_weights, answer.saves_checkpoint]
        if self._group is not None:
            tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")  # The objective may change the default.
            options = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = _UNLIMITED
            self._wait_for(self._group.broadcast([tensor], options), math.inf)
            flags = [bool(flag) for flag in tensor.tolist()]
        return ReportAnswer(*flags)

    def _wait_for(self, work: Any, patience: float) -> None:
        """Wait for a collective in short waits, so that a signal can raise an exception in between."""
        give_up_at = clock.now() + patience
        while not _wait_briefly(work):
            if clock.now() > give_up_at:
                raise RuntimeError(f"Timed out waiting {patience:g} s for the reports of other ranks")


def _wait_briefly(work: Any) -> bool:
    """Return whether a collective is complete after a short wait. Raises RuntimeError if it has failed."""
    try:
        work.wait(_SHORT_WAIT)
    except RuntimeError:
        if not work.is_completed():
            return False  # Only this short wait has failed.
        work.wait()
    return True


def find_difference(parts: Sequence[ReportPart]) -> str:
    """Return how the parts of a worker's ranks contradict each other; empty if they agree."""
    losses = [part.loss for part in parts if part.loss is not None]
    if not losses:
        return ""
    if len(losses) < len(parts):
        return f"the ranks do not yield equally many losses: {_describe_losses(parts)}"
    if not all(math.isclose(loss, losses[0], rel_tol=_TOLERANCE, abs_tol=1e-12) for loss in losses):
        return f"the ranks yielded different losses: {_describe_losses(parts)}; all_reduce it, for example"
    gathering = [part.gathers_weights for part in parts]
    if len(set(gathering)) > 1:
        action = "offered a function, which all of them have to call"
        return f"not all ranks {action}: {_describe_actions(parts, gathering)}"
    gathering = [part.gathers_checkpoint for part in parts]
    if len(set(gathering)) > 1:
        action = "saved a function, or sharded tensors, which all of them have to gather"
        return f"not all ranks {action}: {_describe_actions(parts, gathering)}"
    return ""


def _describe_losses(parts: Sequence[ReportPart]) -> str:
    return ", ".join(
        f"rank {part.rank} {'ended' if part.loss is None else part.loss}{_describe_position(part)}" for part in parts
    )


def _describe_actions(parts: Sequence[ReportPart], actions: Sequence[bool]) -> str:
    pairs = zip(parts, actions, strict=True)
    return ", ".join(
        f"rank {part.rank} {'did' if has_acted else 'did not'}{_describe_position(part)}" for part, has_acted in pairs
    )


def _describe_position(part: ReportPart) -> str:
    return f" at {part.position}" if part.position else ""


def _pack_part(part: ReportPart) -> torch.Tensor:
    """Return a part as a tensor of `_PART_BYTES` bytes, since gloo needs equal sizes on all ranks."""
    content = {**asdict(part), "position": part.position[-_MAX_POSITION:]}
    text = json.dumps(content, ensure_ascii=False).encode()
    return torch.frombuffer(bytearray(text.ljust(_PART_BYTES)), dtype=torch.uint8)


def _unpack_part(tensor: torch.Tensor) -> ReportPart:
    return ReportPart(**json.loads(tensor.numpy().tobytes()))
