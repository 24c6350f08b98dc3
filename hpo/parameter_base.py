"""The arguments that all kinds of hyperparameters have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from hpo.plain_values import normalize_condition

Value = Union[bool, int, float, str]
Gene = Union[int, float]
"""The number that encodes a value of a hyperparameter. Propulate breeds these numbers, not the values."""

# A resumed run must have the same search space, but these arguments may differ. So the `repr` omits them.
_CHANGEABLE = ("mutable", "prior", "confidence")


@dataclass(frozen=True, repr=False)
class BaseParameter:
    """Base class of all kinds of hyperparameters."""

    mutable: bool = field(default=False, kw_only=True)
    when: Mapping[str, Any] | None = field(default=None, kw_only=True, hash=False)
    prior: Any = field(default=None, kw_only=True)
    confidence: str = field(default="medium", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "when", normalize_condition(self.when))

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _CHANGEABLE}
        shown["when"] = shown.pop("when")  # moved to the end
        positional = shown.pop("choices") if "choices" in shown else (shown.pop("low"), shown.pop("high"))
        options = [f"{name}={v!r}" for name, v in shown.items() if v != self.__dataclass_fields__[name].default]
        return f"{type(self).__name__}({', '.join([*map(repr, positional), *options])})"
