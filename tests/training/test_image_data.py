from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hpo.training import load_data, load_test_data
from hpo.training.image_data import read_cifar10
from tests.support.cifar import make_cifar10_patterns, write_cifar10
from tests.support.launch import FASHION_MNIST, needs_fashion_mnist

SAMPLES = 10_300


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    return (
        b"\0\0\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_idx_files(
    folder: Path, compress: bool
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Write images that contain their own index, so that mixed up images and labels show."""
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


def test_digits_parts_are_disjoint_and_complete() -> None:
    data, test = load_data("digits"), load_test_data("digits")
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
def test_idx_files_are_read_from_both_folder_layouts(
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
    assert len(load_test_data("mnist", tmp_path)) == 20


def test_load_data_limits_take_the_first_of_the_split(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=False)
    whole, part = (
        load_data("mnist", tmp_path),
        load_data("mnist", tmp_path, train_samples=50, validation_samples=7),
    )
    assert (part.train.images == whole.train.images[:50]).all()
    assert (part.validation.labels == whole.validation.labels[:7]).all()
    with pytest.raises(
        ValueError, match=r"train_samples must be at most 300, .* samples of mnist, .*, got 301"
    ):
        load_data("mnist", tmp_path, train_samples=301)
    with pytest.raises(ValueError, match=r"validation_samples must be at most .*, got -1"):
        load_data("mnist", tmp_path, validation_samples=-1)


def test_load_data_with_too_few_samples_raises(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((10_000, 3, 4), np.uint8)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(10_000, np.uint8)))
    with pytest.raises(
        ValueError, match=r"mnist must have more than 10000 training samples, .*, got 10000"
    ):
        load_data("mnist", tmp_path)


@pytest.mark.slow
def test_load_data_without_files_names_the_folders(
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
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-bin"):
        load_data("cifar10", tmp_path / "data")
    assert list(tmp_path.iterdir()) == [], "a download that failed leaves nothing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the URL of a folder that an HTTP server on this machine serves, and the folder."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_cifar10_download_is_complete_or_removed(
    tmp_path: Path, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url, folder = served
    random = np.random.default_rng(3)
    records = {
        f"data_batch_{n}.bin": random.integers(0, 10, (20 + n, 3073), dtype=np.uint8)
        for n in range(1, 6)
    }
    records["test_batch.bin"] = random.integers(0, 10, (7, 3073), dtype=np.uint8)
    with tarfile.open(folder / "cifar.tar.gz", "w:gz") as archive:
        for name, batch in records.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = batch.nbytes
            archive.addfile(member, io.BytesIO(batch.tobytes()))
    md5 = hashlib.md5((folder / "cifar.tar.gz").read_bytes()).hexdigest()
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        read_cifar10(tmp_path / "data", "train", url=f"{url}/cifar.tar.gz", md5="0" * 32)
    assert not (tmp_path / "data").exists()
    read_part = partial(read_cifar10, tmp_path / "data", url=f"{url}/cifar.tar.gz", md5=md5)
    images, labels = read_part("train")
    (folder / "cifar.tar.gz").unlink()
    test_images, test_labels = read_part("test")
    assert (images.shape, test_images.shape) == ((115, 3, 32, 32), (7, 3, 32, 32))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-bin"]
    np.testing.assert_array_equal(labels[21:43], records["data_batch_2.bin"][:, 0])
    np.testing.assert_array_equal(images[21, 2, 31], records["data_batch_2.bin"][0, -32:])
    np.testing.assert_array_equal(test_labels, records["test_batch.bin"][:, 0])
    place = tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_3.bin"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"data_batch_3.bin must hold records of 3073 bytes, got 70678 bytes"
    ):
        read_part("train")
    place.write_bytes(b"\x0b" * 3073)
    with pytest.raises(
        ValueError, match=r"data_batch_3.bin must be less than 10, the number of classes, got 11"
    ):
        read_part("train")


def test_cifar10_is_read_from_its_binary_files(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    data = load_data("cifar10", tmp_path, validation_samples=500)
    test = load_test_data("cifar10", tmp_path)
    assert (len(data.train), len(data.validation), len(test)) == (5, 500, 100)
    assert data.image_shape == (3, 32, 32)
    assert data.class_names[3] == "cat"
    patterns = make_cifar10_patterns().astype(np.float32).reshape(10, -1)
    patterns -= patterns.mean(axis=1, keepdims=True)
    for split in (data.train, data.validation, test):
        alike = (
            split.images.reshape(len(split), -1).astype(np.float32)
            @ (patterns / np.linalg.norm(patterns, axis=1)[:, None]).T
        )
        assert (alike.argmax(axis=1) == split.labels).all(), (
            "each image is of its class, and all bytes are in their places"
        )
    assert set(data.validation.labels) == set(range(10))


@dataclass
class Code:
    """An object that makes a folder when it is unpickled."""

    path: Path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return os.mkdir, (self.path,)


@pytest.mark.slow
def test_cifar10_pickles_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    code = pickle.dumps(Code(tmp_path / "ran"))
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (place / name).write_bytes(code)
    pickle.loads(code)
    (tmp_path / "ran").rmdir()
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        load_data("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_load_data_with_an_unknown_name_lists_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"dataset must be one of digits, mnist, fashion-mnist, cifar10, got mnst"
    ):
        load_data("mnst")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (idx(np.zeros((SAMPLES, 3, 4), np.uint8))[:-5], "got 123595"),
        (idx(np.zeros((SAMPLES, 3, 4), np.uint8)) + b"x", "got 123601"),
        (b"\0\0\x08\x03\0\0", "cut off"),
        (b"<html>", "must be an IDX file"),
        (b"", "must be an IDX file"),
        (idx(np.zeros((SAMPLES - 1, 3, 4), np.uint8)), "two-dimensional images and as many labels"),
    ],
)
def test_load_data_names_a_damaged_file(tmp_path: Path, content: bytes, reason: str) -> None:
    write_idx_files(tmp_path, compress=False)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte") as raised:
        load_data("mnist", tmp_path)
    assert reason in str(raised.value)


def test_load_data_names_a_damaged_archive(tmp_path: Path) -> None:
    write_idx_files(tmp_path, compress=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is damaged"):
        load_data("mnist", tmp_path)


@needs_fashion_mnist
@pytest.mark.slow
def test_fashion_mnist_is_read_as_debian_ships_it() -> None:
    data, test = (
        load_data("fashion-mnist", FASHION_MNIST),
        load_test_data("fashion-mnist", FASHION_MNIST),
    )
    assert (len(data.train), len(data.validation), len(test)) == (50_000, 10_000, 10_000)
    assert data.image_shape == (1, 28, 28)
    labels = np.concatenate([data.train.labels, data.validation.labels])
    assert np.bincount(labels).tolist() == [6000] * 10
    # The published mean and deviation of the 60,000 training images are 0.2860 and 0.3530.
    assert data.mean / 255 == pytest.approx(0.2860, abs=2e-3)
    assert data.std / 255 == pytest.approx(0.3530, abs=2e-3)
