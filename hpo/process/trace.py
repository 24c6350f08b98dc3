"""What a trainer has seen of one evaluation, as numbers and names that can be sent as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HASH_BYTES = 8  # of a sample

# Of each parameter of an optimizer, its norm and its product with a fixed vector: two that agree in both are the same.
Fingerprint = tuple[tuple[float, float], ...]


@dataclass
class Trace:
    """One evaluation on one rank, as its trainer has seen it.

    `steps` counts optimizer steps, and `until` those before each loss. `weights` are prints of each optimizer's
    parameters, by the optimizer's number, before its first step. `at_loss` are those at each loss. `gradients` are
    prints of each optimizer's gradients in its first step. `shapes` are the shapes of all these parameters; `sharded`
    says that some are parts of larger ones.

    `networks` are prints of the parameters that each network trains. Their keys are the network's number, the steps,
    and whether it is called to train. These are taken before the first step and after 1, 2, 4, 8... steps, and at any
    step in validation and at losses. An optimizer may have other parameters, such as a rank's part of one flat tensor.
    `network_shapes` are the shapes of the networks' parameters.

    `without_gradient` names parameters that had none in any step. `noisy` and `normal` count the layers, by type, that
    draw random numbers in training and that normalise by a rank's share of a batch, `shared` those that normalise by
    all ranks' samples. `samples` are hashes of what the network was given to train on, each with the steps before it.
    `seconds` is the evaluation's wall time, `memory` this rank's peak in bytes.

    `failures` are the messages of the exception that has ended the objective on this rank, and of those that it was
    raised from; `place` is the line of the objective where that was. Both are empty unless there was one.

    Of a program, `variables` are the environment variables that it has read, `has_children` says that processes were
    left at its end, and `is_cut` that it was ended before it had finished.
    """

    steps: int = 0
    steps_at_losses: list[int] = field(default_factory=list)
    weights: dict[int, Fingerprint] = field(default_factory=dict)
    networks: dict[tuple[int, int, bool], Fingerprint] = field(default_factory=dict)
    network_shapes: list[tuple[int, ...]] = field(default_factory=list)
    at_loss: list[Fingerprint] = field(default_factory=list)
    gradients: dict[int, Fingerprint] = field(default_factory=dict)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    sharded: bool = False
    without_gradient: list[str] = field(default_factory=list)
    random_layers: Counter[str] = field(default_factory=Counter)
    normalization_layers: Counter[str] = field(default_factory=Counter)
    synchronized_layers: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, list[bytes]]] = field(default_factory=list)
    seconds: float = 0.0
    memory: int = 0
    failures: list[str] = field(default_factory=list)
    place: str = ""
    variables: list[str] = field(default_factory=list)
    has_children: bool = False
    was_cut: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return this as data that JSON can hold, from which `from_data` makes an equal object."""
        return {
            **vars(self),
            "weights": list(self.weights.items()),
            "networks": [[*key, weights] for key, weights in self.networks.items()],
            "gradients": list(self.gradients.items()),
            "samples": [(steps, b"".join(hashes).hex()) for steps, hashes in self.samples],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Trace:
        """Return the object that data describe; empty data, of a trainer that has crashed, describe an empty one."""
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


def compute_distance(one: Fingerprint, other: Fingerprint) -> float:
    """Return how far two prints of as many parameters are from each other, relative to the norm of all parameters."""
    scale = max(sum(norm**2 for norm, _ in one), sum(norm**2 for norm, _ in other)) ** 0.5
    off = sum((a - c) ** 2 + (b - d) ** 2 for (a, b), (c, d) in zip(one, other, strict=True)) ** 0.5
    return off / scale if scale else 0.0


def compute_norm(one: Fingerprint) -> float:
    """Return the norm of all parameters of a print."""
    return float(sum(norm**2 for norm, _ in one) ** 0.5)
