"""Checks of the values of settings."""

from __future__ import annotations


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
