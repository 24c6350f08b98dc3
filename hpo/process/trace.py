"""The trace of one evaluation: numbers and names that its trainer has recorded, in a form that JSON can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HASH_BYTES = 8  # length of the hash of a sample

# For each parameter, its norm and its product with a fixed vector. Parameters that agree in both
# are equal.
Fingerprint = tuple[tuple[float, float], ...]


@dataclass
class Trace:
    """The trace of one evaluation on one rank.

    Parameters are tensors that an optimizer trains, not hyperparameters. A fingerprint is a short
    description of parameters or of their gradients. Equal parameters have equal fingerprints, and
    different parameters almost always have different ones.
    """

    steps: int = 0
    """Number of optimizer steps."""
    steps_at_losses: list[int] = field(default_factory=list)
    """Number of optimizer steps before each loss."""
    weights: dict[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of each optimizer's parameters before its first step, by the number of the optimizer."""
    networks: dict[tuple[int, int, bool], Fingerprint] = field(default_factory=dict)
    """Fingerprints of the parameters that each network trains, at several times.

    The key is the number of the network, the number of optimizer steps before, and whether the
    network is in training mode. The fingerprints are taken before the first step, after 1, 2, 4,
    8... steps, at any step in validation, and at losses. They may differ from `weights`, since an
    optimizer may have other parameters, such as a rank's part of one flat tensor.
    """
    network_shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the parameters that the networks train."""
    at_loss: list[Fingerprint] = field(default_factory=list)
    """Fingerprints of the optimizers' parameters at each loss."""
    gradients: dict[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of each optimizer's gradients in its first step, by the number of the optimizer."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the optimizers' parameters."""
    sharded: bool = False
    """Whether some of the recorded parameters are only parts of larger parameters."""
    without_gradient: list[str] = field(default_factory=list)
    """Names of parameters that had no gradient in any step."""
    random_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that draw random numbers in training, by type."""
    normalization_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that normalise each rank's part of a batch separately, by type."""
    synchronized_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that normalise over the samples of all ranks, by type."""
    samples: list[tuple[int, list[bytes]]] = field(default_factory=list)
    """For each batch, the number of steps before it, and the hashes of the training samples in it."""
    seconds: float = 0.0
    """Duration of the evaluation in seconds."""
    memory: int = 0
    """Peak memory of this rank, in bytes."""
    failures: list[str] = field(default_factory=list)
    """Messages of the exception that has ended the objective, and of its causes; empty if there was none."""
    place: str = ""
    """Line of the objective that raised this exception; empty if there was none."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that a program has read."""
    has_children: bool = False
    """Whether a program had child processes left when it ended."""
    was_cut: bool = False
    """Whether a program was ended from outside before it had finished."""

    def to_data(self) -> dict[str, Any]:
        """Return the trace as data that JSON can hold. `from_data` restores the trace from them."""
        return {
            **vars(self),
            "weights": list(self.weights.items()),
            "networks": [[*key, weights] for key, weights in self.networks.items()],
            "gradients": list(self.gradients.items()),
            "samples": [(steps, b"".join(hashes).hex()) for steps, hashes in self.samples],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Trace:
        """Return the trace in `data`. If `data` are empty, as after a crash of the trainer, the trace is empty."""
        if not data:
            return Trace()
        return Trace(
            **{
                **data,
                "weights": {
                    number: _make_fingerprint(weights) for number, weights in data["weights"]
                },
                "networks": {
                    (number, steps, trains): _make_fingerprint(weights)
                    for number, steps, trains, weights in data["networks"]
                },
                "network_shapes": [tuple(shape) for shape in data["network_shapes"]],
                "at_loss": [_make_fingerprint(weights) for weights in data["at_loss"]],
                "gradients": {
                    number: _make_fingerprint(gradients) for number, gradients in data["gradients"]
                },
                "shapes": [tuple(shape) for shape in data["shapes"]],
                "random_layers": Counter(data["random_layers"]),
                "normalization_layers": Counter(data["normalization_layers"]),
                "synchronized_layers": Counter(data["synchronized_layers"]),
                "samples": [
                    (steps, _split_hashes(bytes.fromhex(hashes)))
                    for steps, hashes in data["samples"]
                ],
            }
        )


def _make_fingerprint(pairs: Any) -> Fingerprint:
    return tuple((norm, product) for norm, product in pairs)


def _split_hashes(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def compute_distance(first: Fingerprint, second: Fingerprint) -> float:
    """Return the distance between two fingerprints, relative to the larger norm (see `compute_norm`).

    Both fingerprints must describe the same number of parameters. The distance is 0 if the
    fingerprints are equal.
    """
    scale = max(sum(norm**2 for norm, _ in first), sum(norm**2 for norm, _ in second)) ** 0.5
    distance = (
        sum((a - c) ** 2 + (b - d) ** 2 for (a, b), (c, d) in zip(first, second, strict=True))
        ** 0.5
    )
    return distance / scale if scale else 0.0


def compute_norm(fingerprint: Fingerprint) -> float:
    """Return the norm of all parameters that a fingerprint describes."""
    return float(sum(norm**2 for norm, _ in fingerprint) ** 0.5)
