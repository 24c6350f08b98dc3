"""Image data sets by name, split into training, validation and test.

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
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

# Images, uint8 of shape (N, channels, height, width), and labels, int64 of shape (N,).
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


@dataclass(frozen=True)
class Digits:
    """The UCI handwritten digits of scikit-learn: 1,797 images of 8x8 pixels, no download.

    They have no published test part, so every fifth image is a test image.
    """

    class_names: tuple[str, ...] = _DIGITS
    validation_samples: int = 360

    def read_development(self, folder: Path) -> Arrays:  # noqa: ARG002 - scikit-learn has the data.
        """Read four fifths of the images."""
        images, labels, is_test = self._read_digits()
        return images[~is_test], labels[~is_test]

    def read_test(self, folder: Path) -> Arrays:  # noqa: ARG002 - scikit-learn has the data.
        """Read every fifth image."""
        images, labels, is_test = self._read_digits()
        return images[is_test], labels[is_test]

    def _read_digits(
        self,
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images.astype(np.uint8)[:, None]
        return images, digits.target.astype(np.int64), np.arange(len(images)) % 5 == 4


@dataclass(frozen=True)
class IdxFiles:
    """MNIST (LeCun et al. 1998) or a data set in its format: four IDX files, gzipped or not.

    The files are read from the data directory, or from its subfolder `torchvision_name`/raw, which
    torchvision uses. If both lack the files, they are downloaded to the subfolder.
    """

    torchvision_name: str
    class_names: tuple[str, ...] = _DIGITS
    validation_samples: int = 10_000

    def read_development(self, folder: Path) -> Arrays:
        """Read the training files."""
        return self._read_part(folder, "train")

    def read_test(self, folder: Path) -> Arrays:
        """Read the test files."""
        return self._read_part(folder, "t10k")

    def _read_part(self, folder: Path, part: str) -> Arrays:
        names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        folders = [folder, folder / self.torchvision_name / "raw"]
        if not all(_find_file(name, folders) for name in names):
            _download_dataset(
                self.torchvision_name,
                folder,
                [f"{name}[.gz]" for name in names],
                folders,
                self._fetch_files,
            )
        images, labels = (_read_idx(_find_downloaded_file(name, folders)) for name in names)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{_find_file(names[0], folders)} and {_find_file(names[1], folders)} must hold "
                f"two-dimensional images and as many labels, got images of shape {images.shape} "
                f"and labels of shape {labels.shape}"
            )
        if labels.max(initial=0) >= len(self.class_names):
            raise ValueError(
                f"labels in {_find_file(names[1], folders)} must be less than "
                f"{len(self.class_names)}, the number of classes, got {labels.max()}"
            )
        return images[:, None], labels.astype(np.int64)

    def _fetch_files(self, root: Path) -> None:
        # The import takes 1.4 s of CPU time, and only a download needs it.
        import torchvision.datasets

        getattr(torchvision.datasets, self.torchvision_name)(root=str(root), download=True)


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 (Krizhevsky 2009) in its binary version, downloaded if it is missing.

    torchvision reads the Python version, which is pickled: reading it would execute code in the
    files.
    """

    class_names: tuple[str, ...] = (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    )
    validation_samples: int = 10_000
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5: str = "c32a1d4ab5d03f1284b67883e8d87530"

    def read_development(self, folder: Path) -> Arrays:
        """Read the training batches."""
        return self._read_batches(folder, [f"data_batch_{number}.bin" for number in range(1, 6)])

    def read_test(self, folder: Path) -> Arrays:
        """Read the test batch."""
        return self._read_batches(folder, ["test_batch.bin"])

    def _read_batches(self, folder: Path, names: Sequence[str]) -> Arrays:
        folders = [folder, folder / "cifar-10-batches-bin"]
        if not all(_find_file(name, folders) for name in names):
            _download_dataset("CIFAR10 (binary version)", folder, names, folders, self._fetch_files)
        batches = [self._read_batch(_find_downloaded_file(name, folders)) for name in names]
        return np.concatenate([images for images, _ in batches]), np.concatenate(
            [labels for _, labels in batches]
        )

    def _fetch_files(self, root: Path) -> None:
        from torchvision.datasets.utils import download_and_extract_archive

        download_and_extract_archive(self.url, str(root), md5=self.md5, remove_finished=True)

    def _read_batch(self, path: Path) -> Arrays:
        """Read a file of records: a label of one byte, and an image of 3 x 32 x 32 bytes."""
        content = np.fromfile(path, np.uint8)
        if len(content) == 0 or len(content) % 3073:
            raise ValueError(
                f"{path} must hold records of 3073 bytes, got {len(content)} bytes. The file is "
                "damaged"
            )
        records = content.reshape(-1, 3073)
        if records[:, 0].max() >= len(self.class_names):
            raise ValueError(
                f"labels in {path} must be less than {len(self.class_names)}, the number of "
                f"classes, got {records[:, 0].max()}"
            )
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


SOURCES: dict[str, Digits | IdxFiles | Cifar10] = {
    "digits": Digits(),
    "mnist": IdxFiles("MNIST"),
    "fashion-mnist": IdxFiles("FashionMNIST", _CLOTHES),
    "cifar10": Cifar10(),
}


def _find_file(name: str, folders: Sequence[Path]) -> Path | None:
    paths = (folder / (name + suffix) for folder in folders for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _find_downloaded_file(name: str, folders: Sequence[Path]) -> Path:
    path = _find_file(name, folders)
    if path is None:
        raise FileNotFoundError(f"no {name} in {' or '.join(map(str, folders))} after the download")
    return path


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
            f"{path} must have a header of {start} bytes, got {len(content)} bytes. The file is "
            "cut off"
        )
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} values, as its header has the shape {shape}, got "
            f"{len(content) - start}. The file is damaged"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _download_dataset(
    name: str,
    folder: Path,
    files: Sequence[str],
    folders: Sequence[Path],
    fetch: Callable[[Path], object],
) -> None:
    """Download a data set with `fetch`, and move the complete files to `folder`.

    Raises FileNotFoundError if the download fails. Its message has the missing `files` and the
    searched `folders`.
    """
    has_existed = folder.exists()
    try:
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
        raise FileNotFoundError(
            f"{name} is missing and could not be downloaded. Searched for {' and '.join(files)} "
            f"in {' and in '.join(map(str, folders))}; the download into {folder} failed: "
            f"{type(error).__name__}: {reason}. Set --set data_dir=FOLDER to a folder that has "
            "the files"
        ) from error


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
    """The standard deviation of each channel of the training images, float32, (channels,)."""

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
        return ImagesOnDevice(self.train, self, device), ImagesOnDevice(
            self.validation, self, device
        )


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
            Normalised images, float32 of shape (N, channels, height, width) in channels-last
            format, and labels, int64 of shape (N,).
        """
        indices = indices.to(self.device)
        images = self._images[indices].to(torch.float32).sub_(self._mean).mul_(self._scale)
        return images.contiguous(memory_format=torch.channels_last), self._labels[indices]


def load_data(
    name: str, data_dir: str | Path = "data", *, train_samples: int = 0, validation_samples: int = 0
) -> ImageDataset:
    """Load the training and the validation part of an image data set; download it if missing.

    The validation part is split off the published training set by a fixed shuffle, which is the
    same in every run. It has 360 images of digits, and 10,000 of the other data sets.

    Args:
        name: "digits", "mnist", "fashion-mnist" or "cifar10".
        data_dir: Directory of the files. scikit-learn provides the digits, which need no directory.
        train_samples: Number of training samples to use, the first of the shuffle; 0 uses all.
        validation_samples: Number of validation samples to use, the first of the shuffle; 0 uses
            all.

    Returns:
        The data set.

    Raises:
        ValueError: The name is unknown, a part has fewer samples than requested, or a file is
            damaged.
        FileNotFoundError: The files are missing and cannot be downloaded. The message lists the
            names and directories.

    Example:
        ::

            def prepare(settings): return load_data("fashion-mnist", settings.data_dir)
    """
    source = _find_source(name)
    development = source.read_development(_resolve_folder(data_dir))
    if len(development[1]) <= source.validation_samples:
        raise ValueError(
            f"{name} must have more than {source.validation_samples} training samples, of which "
            f"that many are for validation, got {len(development[1])}"
        )
    validation, train = np.split(_shuffle_indices(development), [source.validation_samples])
    train = _take_first(train, train_samples, "train_samples", name)
    validation = _take_first(validation, validation_samples, "validation_samples", name)
    mean, std = _compute_statistics(development[0][train])
    return ImageDataset(
        _select_samples(development, train),
        _select_samples(development, validation),
        source.class_names,
        mean,
        std,
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
                pictures = load_test_data("cifar10")
                images = ImagesOnDevice(pictures, load_data("cifar10"), device)
                inputs, labels = images.get_batch(torch.arange(100))
    """
    images, labels = _find_source(name).read_test(_resolve_folder(data_dir))
    # Arrays made from bytes are read-only, and torch warns of read-only arrays.
    return LabelledImages(images.copy(), labels.copy())


def _find_source(name: str) -> Digits | IdxFiles | Cifar10:
    if name not in SOURCES:
        raise ValueError(f"dataset must be one of {', '.join(SOURCES)}, got {name}")
    return SOURCES[name]


def _resolve_folder(data_dir: str | Path) -> Path:
    return Path(data_dir).expanduser().absolute()


def _shuffle_indices(arrays: Arrays) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).permutation(len(arrays[1]))


def _take_first(
    indices: npt.NDArray[np.int64], count: int, setting: str, name: str
) -> npt.NDArray[np.int64]:
    if not 0 <= count <= len(indices):
        raise ValueError(
            f"{setting} must be at most {len(indices)}, the number of such samples of {name}, or "
            f"0 for all of them, got {count}"
        )
    return indices[: count or None]


def _select_samples(arrays: Arrays, indices: npt.NDArray[np.int64]) -> LabelledImages:
    images, labels = arrays
    return LabelledImages(images[indices], labels[indices])


def _compute_statistics(
    images: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the mean and standard deviation (at least 1) of each channel, of values 0 to 255."""
    values = np.arange(256)
    counts = np.stack(
        [np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)]
    )
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    variance = weights @ values**2 - mean**2
    return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1.0)).astype(np.float32)
