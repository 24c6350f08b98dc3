"""Cutting a network into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from torch import nn

from hpo.training.parallel.module_tree import list_children

Blocks = list[tuple[str, nn.Module]]


def list_blocks(network: nn.Module) -> Blocks:
    """Return a network's blocks by their names, in the order in which they are computed.

    The blocks of an nn.Sequential are its children, and theirs where they are nn.Sequentials too. Raises ValueError
    for any other network, whose order is not known.
    """
    if type(network) is not nn.Sequential:
        raise ValueError(
            f"parallel=pipeline cuts an nn.Sequential into stages, and the network is a {type(network).__name__}: make "
            "it an nn.Sequential of its layers, or use parallel=shard"
        )
    return list(_iterate_blocks(network, ""))


def _iterate_blocks(sequence: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in list_children(sequence):
        if type(child) is nn.Sequential:
            yield from _iterate_blocks(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def partition_stages(blocks: Blocks, count: int, stage_costs: Mapping[str, float] | None = None) -> list[Blocks]:
    """Return the blocks in `count` stages, of which the most costly costs as little as possible.

    A block costs what `costs` says for its name, or else as much as it has parameters. Raises ValueError where there
    are not enough blocks with parameters, where `costs` names other blocks, or where stages would share parameters.
    """
    units = _group_blocks(blocks)
    if len(units) < count:
        raise ValueError(
            f"parallel=pipeline: the network has {len(units)} blocks with parameters, too few for {count} stages, one "
            f"for each rank (or each of a rank's GPUs); give workers {len(units)} ranks at most (--ranks-per-worker), "
            "or use parallel=shard"
        )
    unknown = [name for name in stage_costs or () if all(name != block for block, _ in blocks)]
    if unknown:
        raise ValueError(f"costs are for the blocks {', '.join(name for name, _ in blocks)}, not for {unknown[0]}")
    ends = _balance_costs([sum(_get_cost(name, block, stage_costs) for name, block in unit) for unit in units], count)
    stages = [
        [block for unit in units[start:end] for block in unit] for start, end in zip([0, *ends], ends, strict=False)
    ]
    _check_no_shared_parameters(stages)
    return stages


def _group_blocks(blocks: Blocks) -> list[Blocks]:
    """Return the blocks in groups that begin with one that has parameters, but for the first."""
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
    """Return where each of `count` parts of a sequence ends, such that the largest sum of a part is the smallest."""

    @cache
    def find_best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sum(costs[:end]), (end,)
        tried = ((start, find_best(start, parts - 1)) for start in range(parts - 1, end))
        return min((max(worst, sum(costs[start:end])), (*ends, end)) for start, (worst, ends) in tried)

    return list(find_best(len(costs), count)[1])


def _check_no_shared_parameters(stages: Sequence[Blocks]) -> None:
    owners: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, block in stage:
            for inner, parameter in block.named_parameters():
                if owners.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        f"parallel=pipeline: {name}.{inner} is a parameter of two stages; stages cannot share any: "
                        "give each a parameter of its own, or use parallel=shard"
                    )
