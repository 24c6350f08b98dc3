"""Checks of settings that search spaces share."""

from __future__ import annotations


def check_positive(settings: object, *names: str) -> None:
    """Raise a ValueError unless these settings are at least 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(settings, name)}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless a setting has one of these values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value}")
