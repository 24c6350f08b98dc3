"""Encode individuals as points of the unit cube, between which a Gaussian process measures distances."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hpo.breeding.gaussian_process import Vector


class UnitCubeEncoding:
    """Encodes genes (numbers that encode hyperparameters) as coordinates from 0 to 1.

    A numerical gene has one coordinate. A categorical gene has one coordinate for each choice, so that the distance of
    any two choices is 1.

    Args:
        low: The lower limits of the genes, shape `(genes,)`.
        high: The upper limits of the genes, shape `(genes,)`.
        unordered: Whether each gene is categorical, shape `(genes,)`.

    Attributes:
        gene_indices: For each coordinate, the index of the gene that it encodes, shape `(coordinates,)`.
    """

    def __init__(self, low: Vector, high: Vector, unordered: npt.NDArray[np.bool_]) -> None:
        choices = np.where(unordered, high - low + 1, 1).astype(int)
        self.gene_indices = np.repeat(np.arange(len(choices)), choices)
        self._levels = np.concatenate([np.arange(count) for count in choices])
        self._is_level = unordered[self.gene_indices]
        self._low = low[self.gene_indices]
        self._width = np.where(high > low, high - low, 1.0)[self.gene_indices]

    def encode_points(self, genes: Vector, active: npt.NDArray[np.bool_]) -> Vector:
        """Return the points of individuals, shape `(individuals, coordinates)`.

        An inactive gene has the same coordinates in all individuals, whatever its value.

        Args:
            genes: The genes of the individuals, shape `(individuals, genes)`.
            active: Whether each of these genes is active, same shape.
        """
        own = genes.take(self.gene_indices, axis=1)
        numbers, levels = (own - self._low) / self._width, (own == self._levels) * math.sqrt(0.5)
        if not active.all():
            is_active = active.take(self.gene_indices, axis=1)
            numbers, levels = np.where(is_active, numbers, 0.5), levels * is_active
        return np.where(self._is_level, levels, numbers)
