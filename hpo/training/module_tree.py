"""Operations on the tree of modules of a network: replace modules, and list children."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def replace_modules(network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace modules of a network in place, and return the network or its replacement.

    `replacement` is called once for each module, in the order of `modules()`, and returns None to keep it. A module
    that occurs several times has one replacement.
    """
    replacements = {module: replacement(module) for module in network.modules()}
    for parent in list(network.modules()):
        for name, child in list_children(parent):
            new_child = replacements[child]
            if new_child is not None:
                setattr(parent, name, new_child.train(child.training))
    return replacements[network] or network


def list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children with their names. A child with several names is listed with each, unlike in torch."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def convert_to_channels_last(network: nn.Module) -> nn.Module:
    """Convert the weights of two-dimensional convolutions to channels-last format, which is faster.

    `Module.to(memory_format=...)` fails for networks with three-dimensional convolutions.
    """
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network
