"""Image data sets by name, split into training, validation and test, and their augmentation.

A search uses the training and the validation part. The test part is for one evaluation of the
winner of the search. Images stay uint8, which needs a quarter of the memory of float32. Normalising
a batch takes little time compared with training on it. Sources are a package, existing files, or a
download through torchvision.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from hpo.training.loop import check_choice, check_count

# Images, uint8 of shape (N, channels, height, width), and labels, int64 of shape (N,).
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
Part = Literal["train", "test"]

_DIGITS = tuple("0123456789")
_CLOTHES = (
    *("T-shirt", "trousers", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
_OBJECTS = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


def read_digits(folder: Path, part: Part) -> Arrays:  # noqa: ARG001 - no files are needed
    """Read the UCI handwritten digits of scikit-learn: 1,797 images of 8x8 pixels.

    They have no published test part, so every fifth image is a test image.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = (np.arange(len(digits.target)) % 5 == 4) == (part == "test")
    images = digits.images.astype(np.uint8)[:, None]
    return images[chosen], digits.target.astype(np.int64)[chosen]


def read_idx_files(torchvision_name: str, folder: Path, part: Part) -> Arrays:
    """Read MNIST (LeCun, Cortes and Burges 1998) or a data set in its format: four IDX files.

    The files may be gzipped. They are read from the data directory, or from its subfolder
    `torchvision_name`/raw, which torchvision uses. If both lack the files, they are downloaded to
    the subfolder.
    """
    prefix = "t10k" if part == "test" else "train"

    def fetch_files(root: Path) -> None:
        # The import takes 1.4 s of CPU time, and only a download needs it.
        import torchvision.datasets

        getattr(torchvision.datasets, torchvision_name)(root=str(root), download=True)

    images_path, labels_path = _find_files(
        torchvision_name,
        [folder, folder / torchvision_name / "raw"],
        [f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"],
        ("", ".gz"),
        fetch_files,
    )
    images = _read_idx(images_path)
    labels = _read_idx(labels_path)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{images_path} and {labels_path} must hold two-dimensional images and as many "
            f"labels, got images of shape {images.shape} and labels of shape {labels.shape}"
        )
    _check_labels(labels, labels_path)
    return images[:, None], labels.astype(np.int64)


def read_cifar10(
    folder: Path,
    part: Part,
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5: str = "c32a1d4ab5d03f1284b67883e8d87530",
) -> Arrays:
    """Read CIFAR-10 (Krizhevsky 2009) in its binary version, which is downloaded if it is missing.

    torchvision reads the Python version, which is pickled: reading it would execute code in the
    files. A record has a label of one byte and an image of 3 x 32 x 32 bytes.
    """
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    if part == "test":
        names = ["test_batch.bin"]

    def fetch_files(root: Path) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        download_and_extract_archive(url, str(root), md5=md5, remove_finished=True)

    folders = [folder, folder / "cifar-10-batches-bin"]
    parts = []
    for path in _find_files("CIFAR10 (binary version)", folders, names, [""], fetch_files):
        content = np.fromfile(path, np.uint8)
        if len(content) == 0 or len(content) % 3073:
            raise ValueError(
                f"{path} must hold records of 3073 bytes, got {len(content)} bytes. "
                "The file is damaged"
            )
        parts.append(content.reshape(-1, 3073))
        _check_labels(parts[-1][:, 0], path)
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


# The function that reads a part, the names of the classes, and the number of validation samples.
SOURCES: dict[str, tuple[Callable[[Path, Part], Arrays], tuple[str, ...], int]] = {
    "digits": (read_digits, _DIGITS, 360),
    "mnist": (partial(read_idx_files, "MNIST"), _DIGITS, 10_000),
    "fashion-mnist": (partial(read_idx_files, "FashionMNIST"), _CLOTHES, 10_000),
    "cifar10": (read_cifar10, _OBJECTS, 10_000),
}
_CLASSES = 10  # Each of them has 10 classes.


def _check_labels(labels: npt.NDArray[np.uint8], path: Path) -> None:
    if labels.max(initial=0) >= _CLASSES:
        raise ValueError(
            f"labels in {path} must be less than {_CLASSES}, the number of classes, "
            f"got {labels.max()}"
        )


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file: a magic number, a big-endian uint32 per dimension, then bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path} must be an IDX file of bytes, which begins with 0, 0, 8, got {content[:4]!r}"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(
            f"{path} must have a header of {start} bytes, got {len(content)} bytes. "
            "The file is cut off"
        )
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} values, as its header has the shape {shape}, "
            f"got {len(content) - start}. The file is damaged"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _find_files(
    dataset: str,
    folders: Sequence[Path],
    names: Sequence[str],
    suffixes: Sequence[str],
    fetch: Callable[[Path], object],
) -> list[Path]:
    """Return the paths of files. Download the data set if one is missing.

    The download goes into the first folder, by way of a temporary folder inside it. Raises
    FileNotFoundError if it fails. Its message has the names and the searched `folders`.
    """

    def find_file(name: str) -> Path | None:
        paths = (folder / (name + suffix) for folder in folders for suffix in suffixes)
        return next((path for path in paths if path.is_file()), None)

    folder = folders[0]
    has_existed = folder.exists()
    are_missing = not all(map(find_file, names))
    try:
        if are_missing:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as root:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    fetch(Path(root))
                for path in filter(Path.is_file, Path(root).rglob("*")):
                    target = folder / path.relative_to(root)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
    except (OSError, RuntimeError) as error:
        if not has_existed:
            with suppress(OSError):
                folder.rmdir()
        reason = " ".join(str(error).split())
        patterns = [f"{name}[.gz]" if ".gz" in suffixes else name for name in names]
        raise FileNotFoundError(
            f"{dataset} is missing and could not be downloaded. Searched for "
            f"{' and '.join(patterns)} in {' and in '.join(map(str, folders))}; the download into "
            f"{folder} failed: {type(error).__name__}: {reason}. Set --set data_dir=FOLDER to a "
            "folder that has the files"
        ) from error
    found = []
    for name in names:
        if (file := find_file(name)) is None:
            where = " or ".join(map(str, folders))
            raise FileNotFoundError(f"no {name} in {where} after the download")
        found.append(file)
    return found


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
    validation: LabelledImages
    class_names: tuple[str, ...]
    """The names of the classes, in the order of the labels."""
    mean: npt.NDArray[np.float32]
    """The mean of each channel of the training images, 0 to 255, shape (channels,)."""
    std: npt.NDArray[np.float32]
    """The standard deviation of each channel of the training images, shape (channels,)."""

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
        """Return the training and the validation part on a device."""
        train = ImagesOnDevice(self.train, self, device)
        return train, ImagesOnDevice(self.validation, self, device)


class ImagesOnDevice:
    """Images on a device, which get_batch normalises. ``len`` returns the number of images.

    On a CPU, they share the memory of `split`; a GPU gets a copy.

    Args:
        split: The images and labels, such as the training part of `data`.
        data: The data set, for the mean and the standard deviation.
        device: The device on which batches are returned.
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
        """Return normalised images and labels as a batch.

        Args:
            indices: Indices of the images, int64 of shape (N,), on any device.

        Returns:
            Images, float32 of shape (N, channels, height, width) in channels-last format, and
            labels, int64 of shape (N,).
        """
        indices = indices.to(self.device)
        images = self._images[indices].to(torch.float32).sub_(self._mean).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last), self._labels[indices]


def load_data(
    name: str, data_dir: str | Path = "data", *, train_samples: int = 0, validation_samples: int = 0
) -> ImageDataset:
    """Load the training and the validation part of an image data set. Missing files are downloaded.

    The validation part is split off the published training set by a fixed shuffle, which is the
    same in every run. It has 360 images of digits, and 10,000 of the other data sets.

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".
        data_dir: Directory of the files. The digits come with scikit-learn and need none.
        train_samples: Number of training samples, the first of the shuffle; 0 uses all.
        validation_samples: Number of validation samples, the first of the shuffle; 0 uses all.

    Raises:
        ValueError: The name is unknown, a part has fewer samples than requested, or a file is
            damaged.
        FileNotFoundError: The files are missing and cannot be downloaded. The message lists the
            names and directories.

    Example:
        ::

            def prepare(settings):
                return load_data("fashion-mnist", settings.data_dir)
    """
    images, labels = _read_part(name, data_dir, "train")
    _, class_names, reserved = SOURCES[name]
    if len(labels) <= reserved:
        raise ValueError(
            f"{name} must have more than {reserved} training samples, of which that many are for "
            f"validation, got {len(labels)}"
        )
    shuffled = np.random.default_rng(0).permutation(len(labels))
    validation, train = np.split(shuffled, [reserved])
    train = train[: check_count("train_samples", train_samples, len(train), name)]
    validation = validation[
        : check_count("validation_samples", validation_samples, len(validation), name)
    ]
    mean, std = _compute_statistics(images[train])
    return ImageDataset(
        LabelledImages(images[train], labels[train]),
        LabelledImages(images[validation], labels[validation]),
        class_names,
        mean,
        std,
    )


def load_test_data(name: str, data_dir: str | Path = "data") -> LabelledImages:
    """Load the test part of an image data set, which is only for the winner of a search.

    It has the published test images in the order of the files, or every fifth image of the digits.
    Arguments and errors are those of `load_data`.

    Example:
        ::

            def test(params, weights, settings):
                data, pictures = load_data("cifar10"), load_test_data("cifar10")
                images, labels = ImagesOnDevice(pictures, data, device).get_batch(torch.arange(100))
    """
    images, labels = _read_part(name, data_dir, "test")
    # Arrays made from bytes are read-only, and torch warns of read-only arrays.
    return LabelledImages(images.copy(), labels.copy())


def _read_part(name: str, data_dir: str | Path, part: Part) -> Arrays:
    check_choice("dataset", name, tuple(SOURCES))
    read, _, _ = SOURCES[name]
    return read(Path(data_dir).expanduser().absolute(), part)


def _compute_statistics(
    images: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the mean and the standard deviation (at least 1) of each channel, 0 to 255.

    They come from counts of the 256 values: images as floats would need eight times the memory.
    """
    values = np.arange(256)
    channels = [np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)]
    counts = np.stack(channels)
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    variance = weights @ values**2 - mean**2
    return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1.0)).astype(np.float32)


def augment_images(images: torch.Tensor, drawn: torch.Tensor, augmentation: str) -> torch.Tensor:
    """Shift images by up to an eighth of their size; "crop-and-flip" also mirrors half.

    He et al. 2016, section 4.2, shift by up to four of 32 pixels for CIFAR-10. The border is filled
    with zeros, the mean of normalised images.

    Args:
        images: Normalised images, shape (N, channels, height, width).
        drawn: Random numbers from 0 to 1, shape (N, 3), on the CPU: two for the shift, one for the
            mirror.
        augmentation: "none" (images are returned unchanged), "crop" or "crop-and-flip".

    Returns:
        Images of the same shape, in channels-last format if they were augmented.

    Raises:
        ValueError: `augmentation` has another value.
    """
    check_choice("augmentation", augmentation, ("none", "crop", "crop-and-flip"))
    if augmentation == "none":
        return images
    height, width = images.shape[2:]
    most = torch.tensor([height // 8, width // 8])
    moves = (drawn[:, :2] * (2 * most + 1)).long()
    is_flipped = drawn[:, 2] < (0.5 if augmentation == "crop-and-flip" else 0.0)
    rows = moves[:, 0, None] + torch.arange(height)
    columns = torch.arange(width).repeat(len(images), 1)
    columns[is_flipped] = columns[is_flipped].flip(1)
    columns += moves[:, 1, None]
    padded = F.pad(images, (width // 8, width // 8, height // 8, height // 8)).permute(0, 2, 3, 1)
    device = images.device
    samples = torch.arange(len(images), device=device)[:, None, None]
    # The indexed tensor has shape (N, height, width, channels), so its permutation has
    # channels-last format.
    chosen = padded[samples, rows.to(device)[:, :, None], columns.to(device)[:, None, :]]
    return chosen.permute(0, 3, 1, 2)
