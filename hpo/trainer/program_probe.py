"""Observations of a program for `hpo check`: its training, and the environment variables that it reads."""

from __future__ import annotations

import os
from typing import Any

import torch

from hpo.process.linux import has_children
from hpo.process.trace import Trace
from hpo.trainer.probe import Probe


class ProgramProbe:
    """Sees what a program does in this process, from now on until `end`."""

    def __init__(self) -> None:
        self._variables = set[str]()
        variables, look_up = self._variables, os._Environ.__getitem__

        def look_up_and_note(environment: Any, name: Any) -> Any:
            variables.add(str(name))
            return look_up(environment, name)

        # Of this process alone, which ends with the program.
        os._Environ.__getitem__ = look_up_and_note  # type: ignore[method-assign]
        self._probe = Probe(torch.device("cpu"))
        self._probe.__enter__()

    def stop_probe(self, is_cut: bool) -> Trace:
        """Return what was seen of a program, which may have been cut off before its end."""
        self._probe.__exit__(None, None, None)
        seen = self._probe.trace
        seen.variables, seen.has_children = sorted(self._variables), has_children()
        seen.was_cut = is_cut
        return seen
