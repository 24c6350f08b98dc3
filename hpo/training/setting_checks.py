"""Settings of search files: checks of their values, and how ranks share a network."""

from __future__ import annotations

from dataclasses import dataclass


def check_positive(settings: object, *names: str) -> None:
    """Raise a ValueError if one of the named attributes of `settings` is less than 1.

    Example:
        ::

            check_positive(settings, "epochs", "batch_size")
    """
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError if the setting `name` has a value that is not among `choices`.

    Example:
        ::

            check_choice("optimizer", settings.optimizer, ("sgd", "adamw"))
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")


@dataclass(frozen=True)
class ParallelSettings:
    """Settings that select how the ranks of a worker share the training of a network.

    The ``Settings`` of a search file may inherit from this class, so that ``--set parallel=shard``
    works. A value that is not allowed raises a ValueError.

    Example:
        ::

            @dataclass(frozen=True)
            class Settings(ParallelSettings):
                epochs: int = 10
    """

    parallel: str = "replicate"
    """The strategy, "replicate" (DDP), "shard" (FSDP2) or "pipeline"."""
    precision: str = "float32"
    """The type of most computations, "float32", "bfloat16" or "float16". Parameters are float32."""
    accumulate: int = 1
    """The number of parts of a global batch, computed one after the other to save memory."""
    microbatches: int = 1
    """The number of microbatches of each part in a pipeline. With 1, one stage works at a time."""

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, ("replicate", "shard", "pipeline"))
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_positive(self, "accumulate", "microbatches")
        if self.microbatches > 1 and self.parallel != "pipeline":
            raise ValueError(
                f"microbatches must be 1 unless parallel=pipeline, got {self.microbatches}"
            )
