"""Import modules only when they are used, since imports take most of the time of a start."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A stand-in for a module, which is imported when an attribute of the stand-in is used.

    LazyLoader of the standard library loads too early. The `import` statement itself reads the
    module's `__spec__`, which makes LazyLoader load (Python 3.10 to 3.12).
    """

    def __getattr__(self, name: str) -> Any:
        # Debuggers and test runners read special names of all modules; only a package's path means
        # that it is used.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        try:
            return getattr(importlib.import_module(self.__name__), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}. This project does not install it. Use pip install {error.name}"
            ) from error


def import_lazily(name: str) -> None:
    """Register a stand-in for a module, unless the module is imported already.

    An `import` statement then returns the stand-in.
    """
    sys.modules.setdefault(name, LazyModule(name))
