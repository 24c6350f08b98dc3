"""A script for tyro, as its documentation shows it."""

from dataclasses import dataclass

import tyro


@dataclass
class Args:
    lr: float = 0.1
    """Learning rate."""
    layers: int = 2


args = tyro.cli(Args)
for epoch in range(3):
    print(f"val_loss={abs(args.lr - 0.01) + args.layers / (epoch + 1):.4f}")
