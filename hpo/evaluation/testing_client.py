"""Test a network with the search file's `test` function, in a separate trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.evaluation.trainer_client import TrainerClient, TrainerEnd


def run_test_in_trainer(
    fork: Callable[[], TrainerClient], params: Mapping[str, Any], weights: Path
) -> Iterator[Mapping[str, Any]]:
    """Yield the results of `hpo.trainer.final_test.run_test` in a new trainer; a trainer that ends is a failure."""
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
