"""Where the data sets come from: a package, files that are there already, or a download through torchvision."""

from __future__ import annotations

import gzip
import io
import math
import struct
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Images, uint8 of shape (N, channels, height, width), and labels, int64 of shape (N,).
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class Source(Protocol):
    """A data set: its published training part, of which some samples are kept for validation, and its test part."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        ...

    @property
    def validation_samples(self) -> int:
        """The number of samples that are kept for validation."""
        ...

    def development(self, folder: Path) -> Arrays:
        """Read the part that training and validation samples are taken from."""
        ...

    def test(self, folder: Path) -> Arrays:
        """Read the test part."""
        ...


@dataclass(frozen=True)
class Digits:
    """The UCI handwritten digits that scikit-learn ships (1,797 images of 8x8): no file, no download.

    It has no published test part: every fifth image is taken for it.
    """

    classes: int = 10
    validation_samples: int = 360

    def development(self, folder: Path) -> Arrays:  # noqa: ARG002 - nothing is read from it
        """Read four fifths of the images."""
        images, labels, is_test = self._read()
        return images[~is_test], labels[~is_test]

    def test(self, folder: Path) -> Arrays:  # noqa: ARG002 - nothing is read from it
        """Read every fifth image."""
        images, labels, is_test = self._read()
        return images[is_test], labels[is_test]

    def _read(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images.astype(np.uint8)[:, None]
        return images, digits.target.astype(np.int64), np.arange(len(images)) % 5 == 4


@dataclass(frozen=True)
class IdxFiles:
    """MNIST (LeCun, Cortes and Burges 1998) or a data set in its format: four IDX files, gzipped or not.

    They are read from the folder itself or from a torchvision root, and else downloaded into the folder as one.
    """

    torchvision_name: str
    classes: int = 10
    validation_samples: int = 10_000

    def development(self, folder: Path) -> Arrays:
        """Read the training files."""
        return self._read(folder, "train")

    def test(self, folder: Path) -> Arrays:
        """Read the test files."""
        return self._read(folder, "t10k")

    def _read(self, folder: Path, part: str) -> Arrays:
        names = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
        places = [folder, folder / self.torchvision_name / "raw"]
        if not all(_find(name, places) for name in names):
            _download(self.torchvision_name, folder, [f"{name}[.gz]" for name in names], places)
        images, labels = (_read_idx(_found(name, places)) for name in names)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{_find(names[0], places)} holds images of shape {images.shape}, {_find(names[1], places)} labels of "
                f"shape {labels.shape}: expected as many labels as images of two dimensions"
            )
        return images[:, None], labels.astype(np.int64)


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10 (Krizhevsky 2009) in a torchvision root, downloaded into it where it is not there."""

    classes: int = 10
    validation_samples: int = 10_000

    def development(self, folder: Path) -> Arrays:
        """Read the training batches."""
        return self._read(folder, train=True)

    def test(self, folder: Path) -> Arrays:
        """Read the test batch."""
        return self._read(folder, train=False)

    def _read(self, folder: Path, train: bool) -> Arrays:
        place = folder / "cifar-10-batches-py"
        if not place.is_dir():
            _download("CIFAR10", folder, ["data_batch_1 to 5", "test_batch"], [place])
        # torchvision unpickles the batches, after it has compared their MD5 sums with the published ones.
        data = _torchvision("CIFAR10")(root=str(folder), train=train)
        return np.ascontiguousarray(data.data.transpose(0, 3, 1, 2)), np.asarray(data.targets, dtype=np.int64)


SOURCES: dict[str, Source] = {
    "digits": Digits(),
    "mnist": IdxFiles("MNIST"),
    "fashion-mnist": IdxFiles("FashionMNIST"),
    "cifar10": Cifar10(),
}


def _find(name: str, places: Sequence[Path]) -> Path | None:
    paths = (place / (name + suffix) for place in places for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _found(name: str, places: Sequence[Path]) -> Path:
    path = _find(name, places)
    if path is None:
        raise FileNotFoundError(f"no {name} in {' or '.join(map(str, places))} after the download")
    return path


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes: a magic number, one big-endian uint32 per dimension, then the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: it begins with {content[:4]!r}, not with 0, 0, 8")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} is cut off: it ends within its header, after {len(content)} bytes")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(content) - start} values; its header says {shape}: {math.prod(shape)}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _torchvision(name: str) -> Any:
    # Imported here because it takes 1.4 s of CPU, and where the files are there nothing of it is needed.
    import torchvision.datasets

    return getattr(torchvision.datasets, name)


def _download(name: str, folder: Path, files: Sequence[str], places: Sequence[Path]) -> None:
    """Download a data set into a torchvision root; what torchvision prints meanwhile is dropped."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _torchvision(name)(root=str(folder), download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{name} is not there and could not be downloaded. Looked for {' and '.join(files)} in "
            f"{' and in '.join(map(str, places))}; downloading into {folder} failed: {type(error).__name__}: {reason}. "
            f"Point --set data_dir=FOLDER to a torchvision root or to a folder with these files"
        ) from error
