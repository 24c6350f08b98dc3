"""Check settings of search files, and choose by settings how ranks share a network."""

from __future__ import annotations

from dataclasses import dataclass


def check_positive(settings: object, *names: str) -> None:
    """Check that each of the named settings is at least 1.

    Args:
        settings: An object with these attributes, such as a ``Settings`` dataclass.
        names: The names of the attributes to check.

    Raises:
        ValueError: A setting is less than 1.

    Example:
        ::

            check_positive(settings, "epochs", "batch_size")
    """
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a setting has one of the allowed values.

    Args:
        name: The name of the setting, for the message.
        value: The value of the setting.
        choices: The allowed values.

    Raises:
        ValueError: The value is not among `choices`.

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
    works.

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
    """The type of most computations, "float32", "bfloat16" or "float16".

    Parameters stay float32.
    """
    accumulate: int = 1
    """The number of parts of a global batch.

    They are computed one after the other, and their gradients are added.
    """
    microbatches: int = 1
    """The number of microbatches into which a pipeline divides each part.

    With 1, one stage computes at a time.
    """

    def __post_init__(self) -> None:
        check_choice("parallel", self.parallel, ("replicate", "shard", "pipeline"))
        check_choice("precision", self.precision, ("float32", "bfloat16", "float16"))
        check_positive(self, "accumulate", "microbatches")
        if self.microbatches > 1 and self.parallel != "pipeline":
            raise ValueError(
                f"microbatches must be 1 unless parallel=pipeline, got {self.microbatches}"
            )
