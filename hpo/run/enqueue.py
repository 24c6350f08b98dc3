"""Read the file of --enqueue: a JSON list of sets of hyperparameters, each complete or partial."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.space import SearchSpace, Value
from hpo.text_format import cut_text

LONGEST_MISTAKE = 300  # characters of a message about hyperparameters, which may be long


def read_enqueued(path: Path, space: SearchSpace, seed: int) -> list[dict[str, Value]]:
    """Return the sets of hyperparameters in a file, without duplicates. Missing values are drawn at random.

    Args:
        path: The JSON file.
        seed: Seed of the random numbers for missing values.

    Raises:
        UsageError: The file cannot be read, or an entry is not valid. The message has the number of
        the entry.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--enqueue {path}: cannot be read: {error}") from error
    if not isinstance(entries, list) or not entries:
        example = json.dumps([space.draw(random.Random(0))])
        raise UsageError(
            f"--enqueue {path}: the file must have a list of objects, such as {example}"
        )
    enqueued: list[dict[str, Value]] = []
    for number, entry in enumerate(entries, start=1):
        try:
            params = _complete_params(entry, space, random.Random(f"{seed}/{number}"))
        except ValueError as error:
            raise UsageError(
                f"--enqueue {path}: entry {number}: {cut_text(str(error), LONGEST_MISTAKE)}"
            ) from error
        if params not in enqueued:
            enqueued.append(params)
    return enqueued


def convert_params(params: Mapping[str, Any], space: SearchSpace) -> dict[str, Any]:
    """Convert values to the types of the parameters of a space, such as 1 to 1.0 for a Float.

    A float that differs from a valid value only by rounding becomes this value.
    """
    known = space.parameters
    return {
        name: known[name].convert(value) if name in known else value
        for name, value in params.items()
    }


def _complete_params(entry: Any, space: SearchSpace, rng: random.Random) -> dict[str, Value]:
    if not isinstance(entry, dict):
        raise ValueError(f"must be an object, got {entry!r}")
    return space.draw(rng, convert_params(entry, space))
