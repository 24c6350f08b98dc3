"""The settings that select how the ranks of a worker share the training of a network."""

from __future__ import annotations

from dataclasses import dataclass

from hpo.training.setting_checks import check_choice, check_positive

PARALLEL = ("replicate", "shard", "pipeline")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ParallelSettings:
    """Settings that select how the ranks of a worker share the training of a network.

    The ``Settings`` of a search file may inherit from this class, so that ``--set parallel=shard`` works.

    Raises:
        ValueError: A field has a value that is not allowed.

    Example:
        ::

            @dataclass(frozen=True)
            class Settings(ParallelSettings):
                epochs: int = 10
    """

    parallel: str = "replicate"
    """The strategy, "replicate" (DDP), "shard" (FSDP2) or "pipeline"."""
    precision: str = "float32"
    """The type of most computations, "float32", "bfloat16" or "float16". Parameters stay float32."""
    accumulate: int = 1
    """The number of parts of a global batch. They are computed one after the other, and their gradients are added."""
    microbatches: int = 1
    """The number of microbatches into which a pipeline divides each part. With 1, one stage computes at a time."""

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, PARALLEL)
        check_choice("precision", self.precision, PRECISIONS)
        check_positive(self, "accumulate", "microbatches")
        if self.microbatches > 1 and self.parallel != "pipeline":
            raise ValueError(f"microbatches must be 1 unless parallel=pipeline, got {self.microbatches}")
