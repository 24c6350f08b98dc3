"""CIFAR-10's binary files, made up: small enough to write in a test, and with something to learn in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

_LEAST_RECORDS = 2001  # in each of five batches, of which 10,000 are kept to validate


def make_cifar10_patterns() -> npt.NDArray[np.uint8]:
    """Return the image that those of each class are like, uint8 of shape (10, 3, 32, 32): stripes of a colour."""
    wave = np.arange(32)
    patterns = np.zeros((10, 3, 32, 32))
    for label in range(10):
        across = wave if label % 2 else wave[:, None]
        stripes = np.sin(across * 2 * np.pi / (4 + 3 * (label // 2)))
        colour = np.array([label & 1, label >> 1 & 1, label >> 2 & 1]) + 0.5
        patterns[label] = 128 + 40 * colour[:, None, None] * stripes
    return patterns.round().astype(np.uint8)


def write_cifar10(folder: Path, batch: int = _LEAST_RECORDS, test: int = 100) -> None:
    """Write the six files of CIFAR-10's binary version: five batches of `batch` records, and one of `test`.

    Each image is its class's pattern and noise, of values from 0 to 63. They are 31 MB: there have to be more than the
    10,000 images that are kept to validate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance, patterns = np.random.default_rng(0), make_cifar10_patterns().reshape(10, -1)
    for name, count in [*((f"data_batch_{number}.bin", batch) for number in range(1, 6)), ("test_batch.bin", test)]:
        labels = chance.integers(0, 10, count, np.uint8)
        images = patterns[labels] // 4 * 3 + chance.integers(0, 64, (count, patterns.shape[1]), np.uint8)
        np.column_stack([labels, images]).tofile(folder / name)
