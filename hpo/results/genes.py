"""Convert the hyperparameters of evaluations to numbers that a model can learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.breeding.gaussian_process import Vector
from hpo.space import SearchSpace
from hpo.space.parsing import parse_parameter
from hpo.store.evaluations import Evaluation


def read_space(described: Mapping[str, str]) -> SearchSpace:
    """Return the search space that run.json describes, without its constraints.

    Args:
        described: The definition of each parameter by its name, as text such as `Float(0.0, 1.0)`.

    Raises:
        ValueError: If a definition is not valid.
    """
    return SearchSpace(**{name: parse_parameter(text) for name, text in described.items()})


def select_complete(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the complete evaluations that have a finite loss and did not start from a parent's checkpoint.

    The loss of an evaluation with a parent does not depend on its hyperparameters alone.
    """
    founders = [evaluation for evaluation in evaluations if evaluation.inherits is None]
    return [
        evaluation
        for evaluation in founders
        if evaluation.state == "complete" and math.isfinite(evaluation.loss)
    ]


def compute_genes(
    params: Sequence[Mapping[str, Any]], space: SearchSpace
) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """Return the genes (one number for each parameter) of individuals, and whether each parameter is active.

    Both have the shape `(individuals, parameters)`. The gene of an inactive parameter is 0.
    """
    genes = [
        [
            float(parameter.encode(individual[name])) if name in individual else 0.0
            for name, parameter in space.parameters.items()
        ]
        for individual in params
    ]
    return np.array(genes), np.array(
        [[name in individual for name in space.parameters] for individual in params]
    )
