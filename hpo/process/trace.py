"""The trace of one evaluation: numbers and names that its trainer has recorded, and that JSON can hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HASH_BYTES = 8  # length of the hash of a sample

# For each parameter, its norm and its product with a fixed vector. Parameters that agree in both are equal.
Fingerprint = tuple[tuple[float, float], ...]


@dataclass
class Trace:
    """The trace of one evaluation on one rank."""

    steps: int = 0
    """Number of optimizer steps."""
    steps_at_losses: list[int] = field(default_factory=list)
    """Number of optimizer steps before each loss."""
    weights: dict[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of each optimizer's parameters before its first step, by the number of the optimizer."""
    networks: dict[tuple[int, int, bool], Fingerprint] = field(default_factory=dict)
    """Fingerprints of the parameters that each network trains.

    The key is the number of the network, the number of steps, and whether the network is called to train. They are
    taken before the first step, after 1, 2, 4, 8... steps, at any step in validation, and at losses. An optimizer may
    have other parameters, such as a rank's part of one flat tensor.
    """
    network_shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the networks' parameters."""
    at_loss: list[Fingerprint] = field(default_factory=list)
    """Fingerprints of the optimizers' parameters at each loss."""
    gradients: dict[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of each optimizer's gradients in its first step, by the number of the optimizer."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the optimizers' parameters."""
    sharded: bool = False
    """Whether some of these parameters are parts of larger ones."""
    without_gradient: list[str] = field(default_factory=list)
    """Names of parameters that had no gradient in any step."""
    random_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that draw random numbers in training, by type."""
    normalization_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that normalise by a rank's share of a batch, by type."""
    synchronized_layers: Counter[str] = field(default_factory=Counter)
    """Number of layers that normalise by the samples of all ranks, by type."""
    samples: list[tuple[int, list[bytes]]] = field(default_factory=list)
    """Hashes of the network's training samples, each batch with the number of steps before it."""
    seconds: float = 0.0
    """Duration of the evaluation."""
    memory: int = 0
    """Peak memory of this rank, in bytes."""
    failures: list[str] = field(default_factory=list)
    """Messages of the exception that has ended the objective, and of its causes; empty without an exception."""
    place: str = ""
    """Line of the objective at which it was raised; empty without an exception."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that a program has read."""
    has_children: bool = False
    """Whether processes were left when a program ended."""
    was_cut: bool = False
    """Whether a program was ended before it had finished."""

    def to_data(self) -> dict[str, Any]:
        """Return data that JSON can hold; `from_data` makes an equal object from them."""
        return {
            **vars(self),
            "weights": list(self.weights.items()),
            "networks": [[*key, weights] for key, weights in self.networks.items()],
            "gradients": list(self.gradients.items()),
            "samples": [(steps, b"".join(hashes).hex()) for steps, hashes in self.samples],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Trace:
        """Return the trace in `data`; an empty one if `data` are empty, as for a trainer that has crashed."""
        if not data:
            return Trace()
        return Trace(
            **{
                **data,
                "weights": {number: _make_fingerprint(weights) for number, weights in data["weights"]},
                "networks": {
                    (number, steps, trains): _make_fingerprint(weights)
                    for number, steps, trains, weights in data["networks"]
                },
                "network_shapes": [tuple(shape) for shape in data["network_shapes"]],
                "at_loss": [_make_fingerprint(weights) for weights in data["at_loss"]],
                "gradients": {number: _make_fingerprint(gradients) for number, gradients in data["gradients"]},
                "shapes": [tuple(shape) for shape in data["shapes"]],
                "random_layers": Counter(data["random_layers"]),
                "normalization_layers": Counter(data["normalization_layers"]),
                "synchronized_layers": Counter(data["synchronized_layers"]),
                "samples": [(steps, _split_hashes(bytes.fromhex(hashes))) for steps, hashes in data["samples"]],
            }
        )


def _make_fingerprint(pairs: Any) -> Fingerprint:
    return tuple((norm, product) for norm, product in pairs)


def _split_hashes(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def compute_distance(first: Fingerprint, second: Fingerprint) -> float:
    """Return the distance of two fingerprints of equally many parameters, relative to the norm of all parameters."""
    scale = max(sum(norm**2 for norm, _ in first), sum(norm**2 for norm, _ in second)) ** 0.5
    distance = sum((a - c) ** 2 + (b - d) ** 2 for (a, b), (c, d) in zip(first, second, strict=True)) ** 0.5
    return distance / scale if scale else 0.0


def compute_norm(fingerprint: Fingerprint) -> float:
    """Return the norm of all parameters of a fingerprint."""
    return float(sum(norm**2 for norm, _ in fingerprint) ** 0.5)
