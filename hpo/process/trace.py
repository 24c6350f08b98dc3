"""The trace of one evaluation: numbers and names that its trainer records, as JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# For each parameter, its norm and its product with a fixed vector, in a list. Parameters that agree
# in both are equal.
Fingerprint = Sequence[Sequence[float]]


@dataclass
class Trace:
    """The trace of one evaluation on one rank. Its fields are JSON data: ``Trace(**vars(trace))``.

    Parameters are tensors that an optimizer trains, not hyperparameters. A fingerprint is a short
    description of parameters or of their gradients. Equal parameters have equal fingerprints, and
    different parameters almost always have different ones.
    """

    steps: int = 0
    """Number of optimizer steps."""
    steps_at_losses: list[int] = field(default_factory=list)
    """Number of optimizer steps before each loss."""
    weights: list[Fingerprint] = field(default_factory=list)
    """Fingerprint of each optimizer's parameters before its first step."""
    networks: list[list[Any]] = field(default_factory=list)
    """Fingerprints of the parameters that each network trains, at several times.

    An item has the number of the network, the number of earlier optimizer steps, whether the
    network is in training mode, and the fingerprint. The first three are unique. Fingerprints are
    taken before the first step, after 1, 2, 4, 8... steps, at any step in validation, and at
    losses. They may differ from `weights`, since an optimizer may have other parameters, such as a
    rank's part of one flat tensor.
    """
    network_shapes: list[list[int]] = field(default_factory=list)
    """Shapes of the parameters that the networks train."""
    at_loss: list[Fingerprint] = field(default_factory=list)
    """Fingerprints of the optimizers' parameters at each loss."""
    gradients: list[Fingerprint] = field(default_factory=list)
    """Fingerprint of each optimizer's gradients in its first step."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes of the optimizers' parameters."""
    sharded: bool = False
    """Whether some of the recorded parameters are only parts of larger parameters."""
    without_gradient: list[str] = field(default_factory=list)
    """Names of parameters that had no gradient in any step."""
    random_layers: dict[str, int] = field(default_factory=dict)
    """Number of layers that draw random numbers in training, by type."""
    normalization_layers: dict[str, int] = field(default_factory=dict)
    """Number of layers that normalise each rank's part of a batch separately, by type."""
    synchronized_layers: dict[str, int] = field(default_factory=dict)
    """Number of layers that normalise over the samples of all ranks, by type."""
    samples: list[list[Any]] = field(default_factory=list)
    """For each batch, the number of earlier steps, and the hashes of its training samples."""
    seconds: float = 0.0
    """Duration of the evaluation in seconds."""
    memory: int = 0
    """Peak memory of this rank, in bytes."""
    failures: list[str] = field(default_factory=list)
    """Messages of the exception that has ended the objective, and of its causes."""
    place: str = ""
    """Line of the objective that raised this exception; empty if there was none."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that a program has read."""
    has_children: bool = False
    """Whether a program had child processes left when it ended."""
    was_cut: bool = False
    """Whether a program was ended from outside before it had finished."""


def compute_distance(first: Fingerprint, second: Fingerprint) -> float:
    """Return the distance between two fingerprints, relative to the larger norm.

    Both fingerprints must describe the same number of parameters. The distance is 0 if they are
    equal.
    """
    scale = max(compute_norm(first), compute_norm(second))
    pairs = zip(first, second, strict=True)
    distance = sum((a - c) ** 2 + (b - d) ** 2 for (a, b), (c, d) in pairs) ** 0.5
    return float(distance / scale) if scale else 0.0


def compute_norm(fingerprint: Fingerprint) -> float:
    """Return the norm of all parameters that a fingerprint describes."""
    return float(sum(norm**2 for norm, _ in fingerprint) ** 0.5)
