"""Evaluate the constraints of a search space in a separate trainer, because their functions are the user's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpo.errors import RunError
from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd

_SECONDS_TO_ANSWER = 600.0  # enough for the thousands of draws that check the constraints


class ConstraintClient:
    """Sends requests about constraints to a trainer (here a process that runs the user's constraint functions).

    The trainer is forked at the first request. If it ends, it is replaced once.

    Raises:
        RunError: The trainer does not answer in time, or has ended twice.
    """

    def __init__(self, fork: Callable[[], TrainerClient]) -> None:
        self._fork = fork
        self._trainer: TrainerClient | None = None
        self._end_count = 0

    def __call__(self, **content: Any) -> Mapping[str, Any]:
        """Send a request to the trainer, and return the answer; `hpo.trainer.constraint_server` describes both."""
        while True:
            if self._trainer is None:
                self._trainer = self._fork()
            self._trainer.send("constraints", **content)
            while (found := self._trainer.wait(_SECONDS_TO_ANSWER)) is not None:
                if isinstance(found, TrainerEnd):
                    break
                if found.kind == "constraints":
                    return found.content
            self.close()
            self._end_count += 1
            if found is None:
                raise RunError(f"the constraints of the search space must answer within {_SECONDS_TO_ANSWER:g} s")
            if self._end_count > 1:
                raise RunError(f"the constraints of the search space cannot be evaluated: {found.text}")

    def close(self) -> None:
        """End the trainer."""
        if self._trainer is not None:
            self._trainer.kill()
            self._trainer.close()
            self._trainer = None
