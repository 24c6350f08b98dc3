"""Which collectives the ranks were in, if torch's check of collectives has failed an evaluation.

The check (`hpo.trainer.collective_check`) is stricter than collectives are: it compares shapes, though only the number
of elements matters, and numbers of calls, which include each send and recv (torch 2.15), as between the stages of a
pipeline.
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
    """An evaluation that torch's check has failed: a `text` for a user, and whether the collectives are right."""

    text: str
    is_false_alarm: bool


def find_mismatch(failure: str, seen: Sequence[Trace]) -> CollectiveMismatch | None:
    """Return what is known if torch's check of collectives has failed an evaluation; None if something else has.

    `failure` is what the record has of it, and `seen` what each rank has seen.
    """
    if _MISMATCH not in failure:
        return None
    called = [_find_collective(one.failures) for one in seen]
    shown = ", ".join(
        f"rank {rank} {collective}{f' at {seen[rank].place}' if seen[rank].place else ''}"
        for rank, collective in enumerate(called)
        if collective
    )
    essences = {_compute_signature(collective) for collective in called if collective}
    return CollectiveMismatch(f"the ranks are in different collectives: {shown}", len(essences) == 1)


def _find_collective(messages: Sequence[str]) -> str:
    """Return the collective that a rank was in, from the messages of its exceptions; empty if they do not say it."""
    for message in messages:
        called = _COLLECTIVE_PATTERN.search(message) if _MISMATCH in message else None
        if called is not None:
            kind, shape, dtype = called.groups()
            # Only a barrier takes no tensor.
            return f"{kind.lower()} of {dtype.lower()} {shape}" if shape and dtype else "barrier"
    return ""


def _compute_signature(collective: str) -> tuple[str, int]:
    """Return the kind and type of a collective, and its number of elements."""
    kind, _, shape = collective.rpartition(" [")
    return kind or collective, math.prod(map(int, re.findall(r"\d+", shape))) if kind else 0
