"""Divide a network into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from torch import nn

from hpo.training.parallel.module_tree import list_children

Blocks = list[tuple[str, nn.Module]]


def list_blocks(network: nn.Module) -> Blocks:
    """Return a network's blocks with their names, in the order of computation.

    The blocks of an nn.Sequential are its children, and recursively the children of nested nn.Sequentials. Raises
    ValueError for any other network, since its order of computation is unknown.
    """
    if type(network) is not nn.Sequential:
        raise ValueError(
            f"the network must be an nn.Sequential for parallel=pipeline, got {type(network).__name__}. Make it an "
            "nn.Sequential of its layers, or use parallel=shard"
        )
    return list(_iterate_blocks(network, ""))


def _iterate_blocks(sequence: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in list_children(sequence):
        if type(child) is nn.Sequential:
            yield from _iterate_blocks(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def partition_stages(blocks: Blocks, count: int, stage_costs: Mapping[str, float] | None = None) -> list[Blocks]:
    """Divide the blocks into `count` stages, such that the largest cost of a stage is as small as possible.

    The cost of a block is its entry in `stage_costs`, or by default its number of parameters. Raises ValueError if the
    network has too few blocks with parameters, if `stage_costs` names unknown blocks, or if stages share parameters.
    """
    units = _group_blocks(blocks)
    if len(units) < count:
        raise ValueError(
            f"the network must have at least {count} blocks with parameters for parallel=pipeline, one for each rank "
            f"or GPU, got {len(units)}. Set --ranks-per-worker to at most {len(units)}, or use parallel=shard"
        )
    unknown = [name for name in stage_costs or () if all(name != block for block, _ in blocks)]
    if unknown:
        names = ", ".join(name for name, _ in blocks)
        raise ValueError(f"stage_costs must be for the blocks {names}, got {unknown[0]}")
    ends = _balance_costs([sum(_get_cost(name, block, stage_costs) for name, block in unit) for unit in units], count)
    stages = [
        [block for unit in units[start:end] for block in unit] for start, end in zip([0, *ends], ends, strict=False)
    ]
    _check_no_shared_parameters(stages)
    return stages


def _group_blocks(blocks: Blocks) -> list[Blocks]:
    """Divide the blocks into groups, each with exactly one block that has parameters.

    A block without parameters belongs to the group of the previous block, or to the first group.
    """
    units: list[Blocks] = []
    for name, block in blocks:
        if not units or (_count_parameters(block) and any(_count_parameters(other) for _, other in units[-1])):
            units.append([])
        units[-1].append((name, block))
    return [unit for unit in units if any(_count_parameters(block) for _, block in unit)]


def _count_parameters(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters())


def _get_cost(name: str, block: nn.Module, costs: Mapping[str, float] | None) -> float:
    return _count_parameters(block) if costs is None else costs.get(name, 0.0)


def _balance_costs(costs: Sequence[float], count: int) -> list[int]:
    """Divide a sequence of costs into `count` parts, and return the end index of each part.

    The largest sum of a part is as small as possible.
    """

    @cache
    def find_best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sum(costs[:end]), (end,)
        candidates = ((start, find_best(start, parts - 1)) for start in range(parts - 1, end))
        return min((max(worst, sum(costs[start:end])), (*ends, end)) for start, (worst, ends) in candidates)

    return list(find_best(len(costs), count)[1])


def _check_no_shared_parameters(stages: Sequence[Blocks]) -> None:
    owners: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, block in stage:
            for inner, parameter in block.named_parameters():
                if owners.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        f"stages must not share parameters for parallel=pipeline, got {name}.{inner} in two stages. "
                        "Give each stage its own parameter, or use parallel=shard"
                    )
