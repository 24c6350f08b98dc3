"""Ways for the ranks of a worker to share the training of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpo.training.parallel.settings import ParallelSettings

if TYPE_CHECKING:
    from torch import nn

    from hpo.trainer.worker import Worker
    from hpo.training.parallel.strategy import ParallelStrategy


def parallelize(
    network: nn.Module, worker: Worker, settings: ParallelSettings, stage_costs: Mapping[str, float] | None = None
) -> ParallelStrategy:
    """Let a worker's ranks share a network, in the way that `settings` says; called by all of them together.

    The network is taken over: it moves to the worker's device, and each rank may keep a part of it alone. Its layers of
    dropout and batch normalisation are replaced by ones that do the same on any number of ranks. `stage_costs` says
    what the blocks of a pipeline cost, by their names; without it, they cost what they have of parameters.

    Raises ValueError where no parameter is to be trained.
    """
    if not any(p.requires_grad for p in network.parameters()):
        raise ValueError(
            "the network has no parameter to train: requires_grad is False for all of them, or it has none"
        )
    # Imported here: what shards and stages need takes a second to import.
    if settings.parallel == "shard" and worker.size > 1:
        from hpo.training.parallel.shard import ShardStrategy

        return ShardStrategy(network, worker, settings)
    if settings.parallel == "pipeline" and (worker.size > 1 or len(worker.devices) > 1):
        from hpo.training.parallel.pipeline import PipelineStrategy

        return PipelineStrategy(network, worker, settings, stage_costs)
    from hpo.training.parallel.replicate import ReplicateStrategy

    return ReplicateStrategy(network, worker, settings)


__all__ = ["ParallelSettings", "parallelize"]
