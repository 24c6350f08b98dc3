"""Individuals as points of a cube, between which a Gaussian process takes distances."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hpo.breeding.gaussian_process import Vector


class UnitCubeEncoding:
    """The cube of genes between these limits, of which some are `unordered`; all of shape (genes,).

    A number has one coordinate, from 0 to 1, and a category one for each choice, so that any two choices are 1 apart.
    ``scale_of`` holds the number of the gene for each coordinate.
    """

    def __init__(self, low: Vector, high: Vector, unordered: npt.NDArray[np.bool_]) -> None:
        choices = np.where(unordered, high - low + 1, 1).astype(int)
        self.gene_indices = np.repeat(np.arange(len(choices)), choices)
        self._levels = np.concatenate([np.arange(number) for number in choices])
        self._is_level = unordered[self.gene_indices]
        self._low = low[self.gene_indices]
        self._width = np.where(high > low, high - low, 1.0)[self.gene_indices]

    def encode_points(self, genes: Vector, active: npt.NDArray[np.bool_]) -> Vector:
        """Return the points of individuals, shape (individuals, coordinates); `existing` says which genes they have.

        What does not exist is in the middle, whatever its gene: it tells no two individuals apart.
        """
        own = genes.take(self.gene_indices, axis=1)
        numbers, levels = (own - self._low) / self._width, (own == self._levels) * math.sqrt(0.5)
        if not active.all():
            exist = active.take(self.gene_indices, axis=1)
            numbers, levels = np.where(exist, numbers, 0.5), levels * exist
        return np.where(self._is_level, levels, numbers)
