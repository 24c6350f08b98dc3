"""Find out which collective each rank has called if torch's check of collectives has failed an evaluation.

A collective is a call that all ranks must make together, such as all_reduce. The check (`hpo.trainer.trainer_group`)
also rejects some correct collectives. It compares shapes, though only the number of elements matters. It also counts
each send and recv as a collective (torch 2.15), as between the stages of a pipeline.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpo.process.trace import Trace

DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_MISMATCH = "mismatch between collectives"
# A message names the collective of its own rank first. The other rank's collective in it is wrong (torch 2.15).
_COLLECTIVE_PATTERN = re.compile(
    r"is running collective: CollectiveFingerPrint\(SequenceNumber=\d+,? ?OpType=(\w+)"
    r"(?:, TensorShape=(\[[^\]]*\]))?(?:, TensorDtypes=(\w+))?"
)


@dataclass(frozen=True)
class CollectiveMismatch:
    """The collectives of all ranks in an evaluation that torch's check of collectives has failed."""

    text: str
    """The message for a user."""
    is_false_alarm: bool
    """Whether the collectives are correct."""


def find_mismatch(failure: str, traces: Sequence[Trace]) -> CollectiveMismatch | None:
    """Return the collectives of the ranks if torch's check of collectives has failed an evaluation; None otherwise.

    `failure` is the recorded reason of the failure, and `traces` has the trace of each rank.
    """
    if _MISMATCH not in failure:
        return None
    collectives = [_find_collective(trace.failures) for trace in traces]
    descriptions = ", ".join(
        f"rank {rank} {collective}{f' at {traces[rank].place}' if traces[rank].place else ''}"
        for rank, collective in enumerate(collectives)
        if collective
    )
    signatures = {_compute_signature(collective) for collective in collectives if collective}
    return CollectiveMismatch(f"the ranks are in different collectives: {descriptions}", len(signatures) == 1)


def _find_collective(messages: Sequence[str]) -> str:
    """Return the collective that a rank has called, according to its exceptions; an empty text if none names it."""
    for message in messages:
        match = _COLLECTIVE_PATTERN.search(message) if _MISMATCH in message else None
        if match is not None:
            kind, shape, dtype = match.groups()
            # Only a barrier has no tensor.
            return f"{kind.lower()} of {dtype.lower()} {shape}" if shape and dtype else "barrier"
    return ""


def _compute_signature(collective: str) -> tuple[str, int]:
    """Return the kind and data type of a collective as a text, and its number of elements."""
    kind, _, shape = collective.rpartition(" [")
    return kind or collective, math.prod(map(int, re.findall(r"\d+", shape))) if kind else 0
