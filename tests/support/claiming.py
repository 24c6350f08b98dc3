"""Claims of a test's own process, from a record that no other process claims from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.store.claims import Claims
from hpo.store.record import Assignment, Record

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LOCK = Path(tempfile.gettempdir()) / f"claims-of-{os.getpid()}"


def claim(
    record: Record,
    params: Mapping[str, Any] | None,
    distributions: Mapping[str, BaseDistribution],
    budget: int,
    **attributes: Any,
) -> Assignment:
    """Claim these hyperparameters, or, without any, what waits; there is something to claim."""
    claims = Claims(record, LOCK, distributions, budget)
    attributes = {"island": 0, "worker": 0, "generation": 0, **attributes}
    assignment = claims.claim(params, **attributes) if params is not None else claims.claim_waiting(**attributes)
    assert assignment is not None
    return assignment
