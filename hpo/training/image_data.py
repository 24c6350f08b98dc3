"""Image data sets by name, split into training, validation and test.

The search sees the training and the validation part; the test part is for judging a search's winner, once. Images stay
bytes, as they are on disk: a quarter of the memory of floats, and normalising a batch costs nothing beside training on
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hpo.training.image_sources import SOURCES, Arrays, ImageSource


@dataclass(frozen=True)
class LabelledImages:
    """Images, uint8 of shape (N, channels, height, width), and their labels, int64 of shape (N,)."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageDataset:
    """The training and the validation part of a data set.

    `names` are the names of the classes, in the order of the labels; `mean` and `std` are the mean and the standard
    deviation of the training images' bytes, float32 of shape (channels,).
    """

    train: LabelledImages
    validation: LabelledImages
    class_names: tuple[str, ...]
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The channels, the height and the width of an image."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    def splits(self, device: torch.device) -> tuple[ImagesOnDevice, ImagesOnDevice]:
        """Return the training and the validation part on a device."""
        return ImagesOnDevice(self.train, self, device), ImagesOnDevice(self.validation, self, device)


class ImagesOnDevice:
    """Images on a device: views of the host's one copy on a CPU, a copy on each GPU."""

    def __init__(self, split: LabelledImages, data: ImageDataset, device: torch.device) -> None:
        self.device = device
        self._images = torch.from_numpy(split.images).to(device)
        self._labels = torch.from_numpy(split.labels).to(device)
        self._mean = torch.from_numpy(data.mean).to(device).view(1, -1, 1, 1)
        self._scale = 1 / torch.from_numpy(data.std).to(device).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised images (N, C, H, W) and the labels (N) at `indices`."""
        indices = indices.to(self.device)
        images = self._images[indices].to(torch.float32).sub_(self._mean).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last), self._labels[indices]


def load_data(
    name: str, data_dir: str | Path = "data", *, train_samples: int = 0, validation_samples: int = 0
) -> ImageDataset:
    """Return the training and the validation part of a data set.

    `train_samples` and `validation_samples` limit each part to its first samples; 0 takes all. The validation part is
    split off the published training set by a fixed shuffle, the same in every run.

    Raises ValueError for a name or a number of samples that does not exist or for a damaged file, and
    FileNotFoundError, saying what was looked for and where, for data that are not there and cannot be downloaded.
    """
    source = _find_source(name)
    development = source.read_development(_resolve_folder(data_dir))
    if len(development[1]) <= source.validation_samples:
        raise ValueError(
            f"{name} has {len(development[1])} samples: too few to keep {source.validation_samples} of them"
        )
    validation, train = np.split(_shuffle_indices(development), [source.validation_samples])
    train = _take_first(train, train_samples, f"train_samples={train_samples}", name)
    validation = _take_first(validation, validation_samples, f"validation_samples={validation_samples}", name)
    mean, std = _compute_statistics(development[0][train])
    return ImageDataset(
        _select_samples(development, train), _select_samples(development, validation), source.class_names, mean, std
    )


def load_test_data(name: str, data_dir: str | Path = "data") -> LabelledImages:
    """Return the test part of a data set, which no search uses; raises as `load_data` does."""
    images, labels = _find_source(name).read_test(_resolve_folder(data_dir))
    # Arrays that were made of bytes are not writable, and torch warns of such arrays.
    return LabelledImages(images.copy(), labels.copy())


def _find_source(name: str) -> ImageSource:
    if name not in SOURCES:
        raise ValueError(f"dataset={name}: there is no such data set; there are {', '.join(SOURCES)}")
    return SOURCES[name]


def _resolve_folder(data_dir: str | Path) -> Path:
    return Path(data_dir).expanduser().absolute()


def _shuffle_indices(arrays: Arrays) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).permutation(len(arrays[1]))


def _take_first(indices: npt.NDArray[np.int64], wanted: int, setting: str, name: str) -> npt.NDArray[np.int64]:
    if not 0 <= wanted <= len(indices):
        raise ValueError(f"{setting}: {name} has {len(indices)} such samples; 0 takes all of them")
    return indices[: wanted or None]


def _select_samples(arrays: Arrays, indices: npt.NDArray[np.int64]) -> LabelledImages:
    images, labels = arrays
    return LabelledImages(images[indices], labels[indices])


def _compute_statistics(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the mean and the standard deviation of each channel, exactly, from counts of the 256 values."""
    values = np.arange(256)
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)])
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    variance = weights @ values**2 - mean**2
    return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1.0)).astype(np.float32)
