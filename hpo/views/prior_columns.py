"""Format the priors of hyperparameters as columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpo.text_format import format_value


def make_prior_columns(priors: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the columns of a table with one row per prior. Each column is a pair of its heading and its cells."""
    return [
        ("hyperparameter", [prior["name"] for prior in priors]),
        ("prior", [format_value(prior["value"]) for prior in priors]),
        ("confidence", [prior["confidence"] for prior in priors]),
        ("correlation", [f"{round(prior['correlation'], 2) + 0.0:.2f}" for prior in priors]),
        ("evaluations", [prior["verdict"] for prior in priors]),
    ]
