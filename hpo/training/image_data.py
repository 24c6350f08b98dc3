"""Image data sets by name, split into training, validation and test.

A search uses the training and the validation part. The test part is for one evaluation of the winner of the search.
Images stay uint8, which needs a quarter of the memory of float32. Normalising a batch takes little time compared with
training on it.
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
    """Images and their labels. ``len`` returns the number of images."""

    images: npt.NDArray[np.uint8]
    """The images, uint8 of shape (N, channels, height, width)."""
    labels: npt.NDArray[np.int64]
    """The labels, int64 of shape (N,)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageDataset:
    """The training and the validation part of an image data set.

    Example:
        ::

            data = load_data("digits")
            train, validation = data.splits(torch.device("cpu"))
            images, labels = train.get_batch(torch.arange(64))
    """

    train: LabelledImages
    """The training part."""
    validation: LabelledImages
    """The validation part."""
    class_names: tuple[str, ...]
    """The names of the classes, in the order of the labels."""
    mean: npt.NDArray[np.float32]
    """The mean of each channel of the training images, 0 to 255, float32 of shape (channels,)."""
    std: npt.NDArray[np.float32]
    """The standard deviation of each channel of the training images, float32 of shape (channels,)."""

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The number of channels, the height and the width of an image, in pixels."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    def splits(self, device: torch.device) -> tuple[ImagesOnDevice, ImagesOnDevice]:
        """Return the training and the validation part on a device.

        Args:
            device: The device that batches are returned on.

        Returns:
            The training part and the validation part.
        """
        return ImagesOnDevice(self.train, self, device), ImagesOnDevice(self.validation, self, device)


class ImagesOnDevice:
    """Images on a device, which get_batch normalises. ``len`` returns the number of images.

    On a CPU, they share the memory of `split`; a GPU gets a copy.

    Args:
        split: The images and labels, such as the training part of `data`.
        data: The data set, for the mean and the standard deviation.
        device: The device that batches are returned on.
    """

    def __init__(self, split: LabelledImages, data: ImageDataset, device: torch.device) -> None:
        self.device = device
        self._images = torch.from_numpy(split.images).to(device)
        self._labels = torch.from_numpy(split.labels).to(device)
        self._mean = torch.from_numpy(data.mean).to(device).view(1, -1, 1, 1)
        self._scale = 1 / torch.from_numpy(data.std).to(device).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return len(self._labels)

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels as a batch.

        Args:
            indices: Indices of the images, int64 of shape (N,), on any device.

        Returns:
            Normalised images, float32 of shape (N, channels, height, width) in channels-last format, and labels, int64
            of shape (N,).
        """
        indices = indices.to(self.device)
        images = self._images[indices].to(torch.float32).sub_(self._mean).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last), self._labels[indices]


def load_data(
    name: str, data_dir: str | Path = "data", *, train_samples: int = 0, validation_samples: int = 0
) -> ImageDataset:
    """Load the training and the validation part of an image data set, and download it if it is missing.

    The validation part is split off the published training set by a fixed shuffle, which is the same in every run. It
    has 360 images of digits, and 10,000 of the other data sets.

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".
        data_dir: Directory of the files. scikit-learn provides the digits, which need no directory.
        train_samples: Number of training samples to use, the first of the shuffle; 0 uses all.
        validation_samples: Number of validation samples to use, the first of the shuffle; 0 uses all.

    Returns:
        The data set.

    Raises:
        ValueError: The name is unknown, a part has fewer samples than requested, or a file is damaged.
        FileNotFoundError: The files are missing and cannot be downloaded. The message lists the names and directories.

    Example:
        ::

            def prepare(settings):
                return load_data("fashion-mnist", settings.data_dir)
    """
    source = _find_source(name)
    development = source.read_development(_resolve_folder(data_dir))
    if len(development[1]) <= source.validation_samples:
        raise ValueError(
            f"{name} must have more than {source.validation_samples} training samples, of which that many are for "
            f"validation, got {len(development[1])}"
        )
    validation, train = np.split(_shuffle_indices(development), [source.validation_samples])
    train = _take_first(train, train_samples, "train_samples", name)
    validation = _take_first(validation, validation_samples, "validation_samples", name)
    mean, std = _compute_statistics(development[0][train])
    return ImageDataset(
        _select_samples(development, train), _select_samples(development, validation), source.class_names, mean, std
    )


def load_test_data(name: str, data_dir: str | Path = "data") -> LabelledImages:
    """Load the test part of an image data set, which is only for the winner of a search.

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".
        data_dir: Directory of the files, as for `load_data`.

    Returns:
        The test images in the order of the files, or every fifth image of the digits.

    Raises:
        ValueError: The name is unknown, or a file is damaged.
        FileNotFoundError: The files are missing and cannot be downloaded.

    Example:
        ::

            def test(params, weights, settings):
                network = make_network(params)
                network.load_state_dict(weights)
                return evaluate_classifier(network, load_data("cifar10"), load_test_data("cifar10"))
    """
    images, labels = _find_source(name).read_test(_resolve_folder(data_dir))
    # Arrays made from bytes are read-only, and torch warns of read-only arrays.
    return LabelledImages(images.copy(), labels.copy())


def _find_source(name: str) -> ImageSource:
    if name not in SOURCES:
        raise ValueError(f"dataset must be one of {', '.join(SOURCES)}, got {name}")
    return SOURCES[name]


def _resolve_folder(data_dir: str | Path) -> Path:
    return Path(data_dir).expanduser().absolute()


def _shuffle_indices(arrays: Arrays) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).permutation(len(arrays[1]))


def _take_first(indices: npt.NDArray[np.int64], count: int, setting: str, name: str) -> npt.NDArray[np.int64]:
    if not 0 <= count <= len(indices):
        raise ValueError(
            f"{setting} must be at most {len(indices)}, the number of such samples of {name}, or 0 for all of them, "
            f"got {count}"
        )
    return indices[: count or None]


def _select_samples(arrays: Arrays, indices: npt.NDArray[np.int64]) -> LabelledImages:
    images, labels = arrays
    return LabelledImages(images[indices], labels[indices])


def _compute_statistics(images: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the mean and standard deviation (at least 1) of each channel, in units of the values 0 to 255."""
    values = np.arange(256)
    counts = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)])
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    variance = weights @ values**2 - mean**2
    return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1.0)).astype(np.float32)
