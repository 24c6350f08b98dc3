"""Observe a training program for `hpo check`: its training, and the environment variables that it reads."""

from __future__ import annotations

import os
from typing import Any

from hpo.process.linux import has_children
from hpo.process.trace import Trace
from hpo.trainer.probe import Probe


class ProgramProbe:
    """Observes a program in this process, from construction to `stop_probe`."""

    def __init__(self) -> None:
        self._variables = set[str]()
        variables, look_up = self._variables, os._Environ.__getitem__

        def look_up_and_record(environment: Any, name: Any) -> Any:
            variables.add(str(name))
            return look_up(environment, name)

        # The change need not be undone, since this process ends with the program.
        os._Environ.__getitem__ = look_up_and_record  # type: ignore[method-assign]
        self._probe = Probe()
        self._probe.__enter__()

    def stop_probe(self, is_cut: bool) -> Trace:
        """Stop observing, and return the trace of the program. `is_cut` is whether the program was cancelled."""
        self._probe.__exit__(None, None, None)
        trace = self._probe.trace
        trace.variables, trace.has_children = sorted(self._variables), has_children()
        trace.was_cut = is_cut
        return trace
