"""Strategies by which the ranks of a worker share the training of a network."""

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
    """Prepare a network for training on the worker's ranks. Collective: call on all ranks.

    The network is moved to the worker's device. With "shard" and "pipeline", each rank keeps only a part of it. Do not
    use the network afterwards. Dropout and batch normalisation are replaced by layers whose results do not depend on
    the number of ranks. A pipeline replaces only dropout.

    Args:
        network: The network, in memory of the CPU. For a pipeline, an ``nn.Sequential``.
        worker: The worker that the objective gets.
        settings: How the ranks share the training.
        stage_costs: Costs of the blocks of a pipeline (layers of the ``nn.Sequential``) by name, in any unit. Blocks
            without an entry cost 0. By default, the cost of a block is its number of parameters.

    Returns:
        The strategy, which computes losses and gradients, and gathers the state dict.

    Raises:
        ValueError: The network has no parameter to train, or does not fit `settings`.

    Example:
        ::

            strategy = parallelize(network, worker, ParallelSettings(parallel="shard"))
            worker.offer_weights(strategy.state_dict)
    """
    if not any(p.requires_grad for p in network.parameters()):
        raise ValueError(
            "the network must have a parameter to train, got none. Set requires_grad of its parameters to True"
        )
    # The modules of torch for shards and stages take a second to import.
    if settings.parallel == "shard" and worker.size > 1:
        from hpo.training.parallel.shard import ShardStrategy

        return ShardStrategy(network, worker, settings)
    if settings.parallel == "pipeline" and (worker.size > 1 or len(worker.devices) > 1):
        from hpo.training.parallel.pipeline import PipelineStrategy

        return PipelineStrategy(network, worker, settings, stage_costs)
    from hpo.training.parallel.replicate import ReplicateStrategy

    return ReplicateStrategy(network, worker, settings)


__all__ = ["ParallelSettings", "parallelize"]
