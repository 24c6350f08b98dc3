"""A report of an evaluation: what `yield` and `worker.report` of an objective, and `hpo.report` of a script, send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """A loss with its metrics, or a mistake in a report."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    mistake: str = ""
    """Description of the mistake, which fails the evaluation; empty if there is none."""
    is_last: bool = False
    """Whether the objective has returned with this loss on all ranks."""
    offers_weights: bool = False
    """Whether weights were offered with this loss."""
    has_saved: bool = False
    """Whether a checkpoint was saved with this loss."""
    has_resumed: bool = False
    """Whether the evaluation has read its own checkpoint."""
    has_read_parent: bool = False
    """Whether the evaluation has read the parent checkpoint."""
    checkpoint: str = ""
    """Name of the draft (temporary file) of a script's checkpoint; empty if there is none."""
    weights: str = ""
    """Name of the draft of a script's weights; empty if there is none."""
