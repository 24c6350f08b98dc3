"""A network as a tree of modules: replacing some of them, and naming those that are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn


def replace_modules(network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Return the network with each module for which `replacement` returns one replaced; it is changed in place.

    A module that stands in several places is replaced by one. They are asked for in the order of `modules()`.
    """
    new = {module: replacement(module) for module in network.modules()}
    for parent in list(network.modules()):
        for name, child in list_children(parent):
            other = new[child]
            if other is not None:
                setattr(parent, name, other.train(child.training))
    return new[network] or network


def list_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a module's children with their names: one that stands in several places in each, as torch does not."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def convert_to_channels_last(network: nn.Module) -> nn.Module:
    """Return the network with the weights of its two-dimensional convolutions in the format that is computed fastest.

    (`Module.to(memory_format=...)` fails for those of three dimensions.)
    """
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network


def find_shard_units(network: nn.Module) -> list[nn.Module]:
    """Return the modules of a network that are sharded each by itself, with the memory of one at a time.

    They are the elements of its nn.Sequentials and nn.ModuleLists, the innermost that are no such lists; where there
    are none, its children.
    """
    lists = (nn.Sequential, nn.ModuleList)

    def iterate_units(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if type(child) in lists:
                yield from iterate_units(child)
            elif type(module) in lists or not any(type(inner) in lists for inner in child.modules()):
                yield child
            else:
                yield from iterate_units(child)

    return [module for module in iterate_units(network) if any(True for _ in module.parameters())]
