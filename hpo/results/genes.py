"""The hyperparameters of evaluations as numbers that a model can learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hpo.breeding.encoding import UnitCubeEncoding
from hpo.breeding.gaussian_process import Vector
from hpo.parameter_parsing import parse_parameter
from hpo.parameters import Categorical
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation


def read_space(described: Mapping[str, str]) -> SearchSpace:
    """Return the search space that run.json describes by a text for each parameter; it has no constraints.

    Raises ValueError if a text describes no parameter.
    """
    return SearchSpace(**{name: parse_parameter(text) for name, text in described.items()})


def select_complete(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the complete evaluations with a finite loss that follows from their hyperparameters alone.

    The loss of an evaluation that inherits does not.
    """
    founders = [one for one in evaluations if one.inherits is None]
    return [one for one in founders if one.state == "complete" and math.isfinite(one.loss)]


def compute_genes(params: Sequence[Mapping[str, Any]], space: SearchSpace) -> tuple[Vector, npt.NDArray[np.bool_]]:
    """Return the genes of individuals, and which are active, both of shape (individuals, parameters).

    The gene of an inactive parameter is 0.
    """
    genes = [
        [float(parameter.encode(each[name])) if name in each else 0.0 for name, parameter in space.parameters.items()]
        for each in params
    ]
    return np.array(genes), np.array([[name in each for name in space.parameters] for each in params])


def make_cube(space: SearchSpace) -> UnitCubeEncoding:
    """Return the cube of all genes of a search space."""
    low, high = np.array(list(space.list_gene_limits().values()), float).T
    return UnitCubeEncoding(low, high, np.array([isinstance(each, Categorical) for each in space.parameters.values()]))
