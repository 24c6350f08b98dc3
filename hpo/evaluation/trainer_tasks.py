"""Call functions of the user in separate trainers: the constraints and `test`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.errors import RunError
from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd

_SECONDS_TO_ANSWER = 600.0  # enough for the thousands of draws that check the constraints


class ConstraintClient:
    """Sends requests about constraints to a trainer, which runs the user's constraint functions.

    The trainer is forked at the first request. If it ends, it is replaced once.

    Raises:
        RunError: The trainer does not answer in time, or has ended twice.
    """

    def __init__(self, fork: Callable[[], TrainerClient]) -> None:
        self._fork = fork
        self._trainer: TrainerClient | None = None
        self._end_count = 0

    def __call__(self, **content: Any) -> Mapping[str, Any]:
        """Send a request, and return the answer; `hpo.trainer.search_file` describes both."""
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
                limit = f"{_SECONDS_TO_ANSWER:g} s"
                raise RunError(f"the constraints of the search space must answer within {limit}")
            if self._end_count > 1:
                raise RunError(
                    f"the constraints of the search space cannot be evaluated: {found.text}"
                )

    def close(self) -> None:
        """End the trainer."""
        if self._trainer is not None:
            self._trainer.discard()
            self._trainer = None


def run_test_in_trainer(
    fork: Callable[[], TrainerClient], params: Mapping[str, Any], weights: Path
) -> Iterator[Mapping[str, Any]]:
    """Call the search file's `test` function in a new trainer, and yield the messages about it.

    `hpo.trainer.final_test.run_test` sends them. If the trainer ends before the test, the final
    message has the kind "failure".

    Args:
        params: Hyperparameters of the network.
        weights: File with the weights of the network.
    """
    trainer = fork()
    try:
        found = trainer.ask("test", "tested", params=dict(params), weights=str(weights.absolute()))
        while not isinstance(found, TrainerEnd) and found["kind"] != "end":
            yield found.content
            found = trainer.wait_for_kind("tested")
        if isinstance(found, TrainerEnd):
            yield {"kind": "failure", "text": found.text}
    finally:
        trainer.discard()
