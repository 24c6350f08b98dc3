"""What is used of Propulate, imported without what is not."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = ["Individual", "Islands", "Propagator", "get_default_propagator"]


class _Deferred(ModuleType):
    """A module that is imported when something in it is first asked for.

    The standard library's LazyLoader does not wait for that: ``import`` itself looks at the module's ``__spec__``,
    which makes it load (Python 3.10 to 3.12).
    """

    def __getattr__(self, name: str) -> Any:
        # Debuggers and test runners look for special names in all modules; only a package's path means that it is used.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


# Only Propulate's surrogates, which are not used here, need GPy; it takes 0.8 s of CPU on every rank.
sys.modules.setdefault("GPy", _Deferred("GPy"))

from propulate import Individual, Islands, get_default_propagator  # noqa: E402
from propulate.propagators import Propagator  # noqa: E402
