"""Test a network with the search file's `test` function, in a separate trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd


def run_test_in_trainer(
    fork: Callable[[], TrainerClient], params: Mapping[str, Any], weights: Path
) -> Iterator[Mapping[str, Any]]:
    """Call the search file's `test` function in a new trainer (separate process), and yield the messages about it.

    `hpo.trainer.final_test.run_test` sends them. If the trainer ends before the test, the final message has the kind
    "failure".

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
        trainer.kill()
        trainer.close()
