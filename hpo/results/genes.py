"""Convert the hyperparameters of evaluations to numbers that a model can learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpo.breeding.encoding import GeneEncoding, Mask, Vector
from hpo.space import SearchSpace, Value
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
    """Return the complete evaluations with a finite loss that depends on hyperparameters alone.

    Evaluations that started from a parent's checkpoint are left out.
    """
    complete = [e for e in evaluations if e.state == "complete" and e.inherits is None]
    return [evaluation for evaluation in complete if math.isfinite(evaluation.loss)]


def compute_genes(
    params: Sequence[Mapping[str, Value]], encoding: GeneEncoding
) -> tuple[Vector, Mask]:
    """Return the genes of individuals, and whether each gene is active.

    Both have the shape `(individuals, genes)`. The gene of an inactive parameter is 0. Values are
    not checked, so that a run whose run.json was edited is still described.
    """
    parameters = encoding.space.parameters.items()
    genes = [
        [
            float(one.encode(individual[name])) if name in individual else 0.0
            for name, one in parameters
        ]
        for individual in params
    ]
    active = [[name in individual for name, _ in parameters] for individual in params]
    return np.array(genes), np.array(active)
