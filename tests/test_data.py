from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hpo.training import load_data, load_test
from tests.conftest import FASHION_MNIST, needs_fashion_mnist

SAMPLES = 10_300


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx_files(folder: Path, compress: bool) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Write a data set of which each image holds its own number, so that a mix-up of images and labels shows."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.arange(SAMPLES)
    images = np.zeros((SAMPLES, 3, 4), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = numbers % 256, numbers // 256
    labels = (numbers % 7).astype(np.uint8)
    for part, count in (("train", SAMPLES), ("t10k", 20)):
        for name, content in (
            (f"{part}-images-idx3-ubyte", idx(images[:count])),
            (f"{part}-labels-idx1-ubyte", idx(labels[:count])),
        ):
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
            else:
                (folder / name).write_bytes(content)
    return images, labels


def numbers_of(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return images[:, 0, 0, 0].astype(np.int64) + 256 * images[:, 0, 0, 1].astype(np.int64)


def test_the_parts_of_digits_are_disjoint_and_complete() -> None:
    data, test = load_data("digits"), load_test("digits")
    assert (len(data.train), len(data.validation), len(test)) == (1078, 360, 359)
    assert data.image_shape == (1, 8, 8)
    parts = (data.train, data.validation, test)
    rows = {part: {image.tobytes() for image in split.images} for part, split in enumerate(parts)}
    assert sum(map(len, rows.values())) == len(set().union(*rows.values())) == 1797
    assert all(set(split.labels) == set(range(10)) for split in parts)
    assert data.mean == pytest.approx(data.train.images.mean(), rel=1e-6)
    assert data.std == pytest.approx(data.train.images.std(), rel=1e-6)


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_are_read_from_a_plain_folder_and_from_a_torchvision_root(
    tmp_path: Path, place: str, compress: bool
) -> None:
    write_idx_files(tmp_path / place, compress)
    data = load_data("mnist", tmp_path)
    assert (len(data.train), len(data.validation)) == (SAMPLES - 10_000, 10_000)
    train, validation = numbers_of(data.train.images), numbers_of(data.validation.images)
    assert sorted([*train, *validation]) == list(range(SAMPLES))
    assert (data.train.labels == train % 7).all()
    assert (data.validation.labels == validation % 7).all()
    assert not (np.diff(validation) > 0).all()
    assert len(load_test("mnist", tmp_path)) == 20


def test_the_first_samples_of_the_same_split_are_taken(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=False)
    whole, part = load_data("mnist", tmp_path), load_data("mnist", tmp_path, train_samples=50, validation_samples=7)
    assert (part.train.images == whole.train.images[:50]).all()
    assert (part.validation.labels == whole.validation.labels[:7]).all()
    with pytest.raises(ValueError, match=r"train_samples=301: mnist has 300"):
        load_data("mnist", tmp_path, train_samples=301)
    with pytest.raises(ValueError, match="validation_samples=-1"):
        load_data("mnist", tmp_path, validation_samples=-1)


def test_too_few_samples_to_split_are_counted(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((10_000, 3, 4), np.uint8)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(10_000, np.uint8)))
    with pytest.raises(ValueError, match="mnist has 10000 samples: too few"):
        load_data("mnist", tmp_path)


def test_data_that_is_nowhere_is_named_with_where_it_was_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network, wherever this runs
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError) as raised:
        load_data("fashion-mnist", tmp_path / "data")
    message = str(raised.value)
    for text in (
        "FashionMNIST",
        "train-images-idx3-ubyte[.gz]",
        f"{tmp_path}/data ",
        f"{tmp_path}/data/FashionMNIST/raw",
        "failed: ",
        "--set data_dir=",
    ):
        assert text in message
    assert "\n" not in message
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py"):
        load_data("cifar10", tmp_path)


def test_an_unknown_data_set_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"dataset=mnst: .* digits, mnist, fashion-mnist, cifar10"):
        load_data("mnst")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (idx(np.zeros((SAMPLES, 3, 4), np.uint8))[:-5], "123595 values"),
        (idx(np.zeros((SAMPLES, 3, 4), np.uint8)) + b"x", "123601 values"),
        (b"\0\0\x08\x03\0\0", "cut off"),
        (b"<html>", "not an IDX file"),
        (b"", "not an IDX file"),
        (idx(np.zeros((SAMPLES - 1, 3, 4), np.uint8)), "as many labels as images"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    write_idx_files(tmp_path, compress=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte") as raised:
        load_data("mnist", tmp_path)
    assert reason in str(raised.value)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is damaged"):
        load_data("mnist", tmp_path)


@needs_fashion_mnist
def test_fashion_mnist_is_read_as_debian_ships_it() -> None:
    data, test = load_data("fashion-mnist", FASHION_MNIST), load_test("fashion-mnist", FASHION_MNIST)
    assert (len(data.train), len(data.validation), len(test)) == (50_000, 10_000, 10_000)
    assert data.image_shape == (1, 28, 28)
    labels = np.concatenate([data.train.labels, data.validation.labels])
    assert np.bincount(labels).tolist() == [6000] * 10
    # The published mean and deviation of the 60,000 training images are 0.2860 and 0.3530.
    assert data.mean / 255 == pytest.approx(0.2860, abs=2e-3)
    assert data.std / 255 == pytest.approx(0.3530, abs=2e-3)
