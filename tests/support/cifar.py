"""Write artificial images in the binary format of CIFAR-10.

They are small enough for a test, and can be learned.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

_LEAST_RECORDS = 2001  # in each of five batches, since 10,000 images are reserved for validation


def make_cifar10_patterns() -> npt.NDArray[np.uint8]:
    """Return a pattern of coloured stripes for each class, uint8 of shape (10, 3, 32, 32).

    The images of a class are its pattern with noise.
    """
    wave = np.arange(32)
    patterns = np.zeros((10, 3, 32, 32))
    for label in range(10):
        across = wave if label % 2 else wave[:, None]
        stripes = np.sin(across * 2 * np.pi / (4 + 3 * (label // 2)))
        colour = np.array([label & 1, label >> 1 & 1, label >> 2 & 1]) + 0.5
        patterns[label] = 128 + 40 * colour[:, None, None] * stripes
    return patterns.round().astype(np.uint8)


def write_cifar10(folder: Path, batch: int = _LEAST_RECORDS, test: int = 100) -> None:
    """Write the six files of CIFAR-10: five with `batch` images each, and one with `test`.

    Each image is the darkened pattern of its class, plus noise from 0 to 63. By default, the files
    have 31 MB, because there must be more than the 10,000 images that are reserved for validation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance, patterns = np.random.default_rng(0), make_cifar10_patterns().reshape(10, -1)
    for name, count in [
        *((f"data_batch_{number}.bin", batch) for number in range(1, 6)),
        ("test_batch.bin", test),
    ]:
        labels = chance.integers(0, 10, count, np.uint8)
        images = patterns[labels] // 4 * 3 + chance.integers(
            0, 64, (count, patterns.shape[1]), np.uint8
        )
        np.column_stack([labels, images]).tofile(folder / name)
