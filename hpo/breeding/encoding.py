"""Encode the hyperparameters of many individuals as genes, and as points of the unit cube.

Arrays of genes have the shape `(individuals, genes)`, unless it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress

import numpy as np
import numpy.typing as npt

from hpo.space import Categorical, Gene, Int, SearchSpace, Value
from hpo.space.constraints import iterate_batches

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_LARGEST_GENE_ERROR = 1e-9  # Genes of logarithmic integers up to a billion differ by more.


class GeneEncoding:
    """Encodes the hyperparameters of a search space as arrays.

    The unit cube has the points between which a Gaussian process measures distances. A numerical
    gene has one coordinate. A categorical gene has one coordinate for each choice, so that the
    distance of any two choices is 1.

    Attributes:
        low, high: The limits of the genes, shape `(genes,)`, as the other attributes.
        width: The ranges of the genes. They are 1 if a gene has a single value.
        unordered: Whether each gene belongs to a categorical parameter.
        mutable: Whether each gene of an heir may differ from its parent's.
        continuous: Whether each gene may have any value between its limits, or is an integer.
        gene_indices: The gene that each coordinate of the cube encodes, shape `(coordinates,)`.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        parameters = list(space.parameters.values())
        self.low: Vector = np.array([parameter.limits[0] for parameter in parameters], float)
        self.high: Vector = np.array([parameter.limits[1] for parameter in parameters], float)
        self.width: Vector = np.where(self.high > self.low, self.high - self.low, 1.0)
        self.unordered = np.array([isinstance(one, Categorical) for one in parameters])
        self.mutable = np.array([parameter.mutable for parameter in parameters])
        self.continuous = np.array([parameter.is_continuous for parameter in parameters])
        self._logarithmic_ints = [
            (gene, one) for gene, one in enumerate(parameters) if isinstance(one, Int) and one.log
        ]
        # A gene, another gene, and the values of the other gene, one of which makes the gene
        # active. If a gene has several conditions, all must hold.
        self._conditions: list[tuple[int, int, Vector]] = []
        indices = {name: index for index, name in enumerate(space.parameters)}
        for name, condition in space.conditions.items():
            for parent, values in condition.items():
                genes = np.array(sorted(map(space.parameters[parent].encode, values)), float)
                self._conditions.append((indices[name], indices[parent], genes))
        choices = np.where(self.unordered, self.high - self.low + 1, 1).astype(int)
        self.gene_indices = np.repeat(np.arange(len(choices)), choices)
        self._levels = np.concatenate([np.arange(count) for count in choices])
        self._is_level = self.unordered[self.gene_indices]
        self._first = self.low[self.gene_indices]
        self._width = self.width[self.gene_indices]

    def encode_params(self, params: Mapping[str, Value]) -> Vector:
        """Return the genes of hyperparameters, shape `(genes,)`."""
        return np.array(list(self.space.encode(params).values()), float)

    def decode_genes(self, genes: Vector) -> dict[str, Value]:
        """Return the hyperparameters that genes encode."""
        return self.space.decode(dict(zip(self.space.parameters, genes.tolist(), strict=True)))

    def name_genes(self, genes: Vector) -> dict[str, Gene]:
        """Return the genes of the nearest valid values, by parameter."""
        return self.space.round_genes(dict(zip(self.space.parameters, genes.tolist(), strict=True)))

    def encode_points(self, genes: Vector, active: Mask) -> Vector:
        """Return the points of individuals in the unit cube, shape `(individuals, coordinates)`.

        An inactive gene has the same coordinates in all individuals, whatever its value.
        """
        own = genes.take(self.gene_indices, axis=1)
        numbers = (own - self._first) / self._width
        levels = (own == self._levels) * math.sqrt(0.5)
        if not active.all():
            is_active = active.take(self.gene_indices, axis=1)
            numbers = np.where(is_active, numbers, 0.5)
            levels = levels * is_active
        return np.where(self._is_level, levels, numbers)

    def round_genes(self, genes: Vector) -> Vector:
        """Return the genes of the nearest valid values."""
        nearest = genes.copy()
        for gene, parameter in self._logarithmic_ints:
            values = np.clip(np.rint(np.exp(genes[:, gene])), parameter.low, parameter.high)
            nearest[:, gene] = np.log(values)
        return nearest

    def find_active(self, genes: Vector) -> Mask:
        """Return whether each gene, as `round_genes` returns it, is active."""
        active = np.ones(genes.shape, bool)
        for gene, parent, values in self._conditions:
            first = np.searchsorted(values, genes[:, parent] - _LARGEST_GENE_ERROR)
            end = np.searchsorted(values, genes[:, parent] + _LARGEST_GENE_ERROR)
            # Between both is the gene's value, if it is one of the values.
            active[:, gene] &= active[:, parent] & (first < end)
        return active

    def iterate_allowed(
        self, genes: Vector, indices: Iterable[int], first_size: int = 1
    ) -> Iterator[int]:
        """Yield those of the indices whose individuals satisfy the constraints, in this order.

        Constraints are checked in batches, each only when it is needed. Each batch is twice as
        large as the previous one.
        """
        if not self.space.constraint_texts:
            yield from indices
            return
        for batch in iterate_batches(indices, first_size):
            params = [self.decode_genes(genes[index]) for index in batch]
            yield from compress(batch, self.space.are_allowed(params))
