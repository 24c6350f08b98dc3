"""How the ranks of a worker share the training of a network, as options of a search space."""

from __future__ import annotations

from dataclasses import dataclass

from hpo.training.setting_checks import check_choice, check_positive

PARALLEL = ("replicate", "shard", "pipeline")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ParallelSettings:
    """Options that say how the ranks of a worker share the training of a network; a Settings may inherit them.

    Raises ValueError for a value that is none of these.
    """

    parallel: str = "replicate"
    """replicate (DDP), shard (FSDP2) or pipeline: what the ranks of a worker share of the network"""
    precision: str = "float32"
    """float32, bfloat16 or float16, in which most of the network is computed; parameters stay float32"""
    accumulate: int = 1
    """In how many parts a global batch is computed, one after the other."""
    microbatches: int = 1
    """In how many microbatches each part goes through the stages of parallel=pipeline; 1: one stage at a time"""

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, PARALLEL)
        check_choice("precision", self.precision, PRECISIONS)
        check_positive(self, "accumulate", "microbatches")
        if self.microbatches > 1 and self.parallel != "pipeline":
            raise ValueError(f"microbatches={self.microbatches} is for parallel=pipeline, not for {self.parallel}")
