"""Test the text for language models, which is split alike on all machines."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hpo.training.text_data import Pieces, TextDataset, TextOnDevice, load_test_text, load_text

CONTEXT = 64

Walked = Iterator[tuple[str, list[str], list[str]]]


@pytest.fixture(scope="module")
def text() -> TextDataset:
    return load_text(CONTEXT)


def write_library(folder: Path, names: list[str]) -> None:
    """Write a library of these files, in this order. Each file contains its own name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n", "utf-8")


def use_library(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sysconfig, "get_path", {"stdlib": str(folder)}.__getitem__)


NAMES = [
    f"{folder}module_{number}.py"
    for folder in ("", "package/", "package/inner/")
    for number in range(40)
]


def walk_shuffled(walk: Callable[[str], Walked], seed: int, top: str) -> Walked:
    """Walk through a folder in a random order, as file systems may."""
    for folder, folders, files in walk(top):
        random.Random(seed).shuffle(folders)
        random.Random(seed).shuffle(files)
        yield folder, folders, files


def unshuffled(pieces: Pieces) -> Pieces:
    whole = np.empty_like(pieces)
    whole[np.random.default_rng(0).permutation(len(pieces))] = pieces
    return whole


def names_in(pieces: Pieces, text: TextDataset) -> set[str]:
    """Return the names of the files in consecutive pieces of text."""
    whole = "".join(text.decode(piece[:-1]) for piece in pieces) + text.decode(pieces[-1][-1:])
    return {line.removeprefix("# ") for line in whole.splitlines()}


def test_load_text_has_three_parts_of_the_library(text: TextDataset) -> None:
    test = load_test_text(CONTEXT)
    assert text.context == CONTEXT
    for pieces in (text.train, text.validation, test):
        assert pieces.dtype == np.uint8
        assert pieces.shape[1] == CONTEXT + 1
        assert pieces.flags.c_contiguous
        assert pieces.flags.writeable
        assert pieces.max() < text.vocabulary_size == 97
    sizes = [len(pieces) for pieces in (text.train, text.validation, test)]
    assert sizes[0] * CONTEXT > 4_000_000, "some MB on every Python that this runs on"
    assert min(sizes[1:]) > 0.05 * sum(sizes)
    written = text.decode(text.train[:2000].ravel())
    assert written.count("self") > 100
    assert (text.train == 96).mean() < 1e-3, "nearly all of it is ASCII"


def test_load_text_pieces_predict_each_symbol_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_library(tmp_path, NAMES)
    use_library(monkeypatch, tmp_path)
    test, every = load_test_text(10), load_test_text(1)
    assert (test[1:, 0] == test[:-1, -1]).all(), (
        "a piece begins with the last symbol of the one before"
    )
    joined = np.concatenate([every[:1, 0], every[:, 1]])
    assert (
        np.concatenate([test[:1, 0], test[:, 1:].ravel()]).tolist()
        == joined[: 10 * len(test) + 1].tolist()
    )
    assert len(joined) - 10 < 10 * len(test) + 1 <= len(joined), (
        "what is left out is shorter than a piece"
    )


def test_load_text_split_ignores_the_order_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for folder, seed in (("one", 1), ("other", 2)):
        random.Random(seed).shuffle(names := NAMES.copy())
        write_library(tmp_path / folder, names)
        use_library(monkeypatch, tmp_path / folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, "walk", partial(walk_shuffled, os.walk, seed))
            parts.append((load_text(1), load_test_text(1)))
    (text, test), (again, test_again) = parts
    np.testing.assert_array_equal(text.train, again.train)
    np.testing.assert_array_equal(text.validation, again.validation)
    np.testing.assert_array_equal(test, test_again)
    found = [
        names_in(pieces, text)
        for pieces in (unshuffled(text.train), unshuffled(text.validation), test)
    ]
    assert sum(map(len, found)) == len(set().union(*found)) == len(NAMES)
    assert set().union(*found) == set(NAMES)
    assert [len(names) for names in found] == [86, 21, 13], (
        "by a hash of the name alone: the same on every machine"
    )


def test_load_text_omits_files_that_are_not_library_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_library(tmp_path, NAMES)
    use_library(monkeypatch, tmp_path)
    before = load_text(1)
    out = [
        "test/a.py",
        "site-packages/b/c.py",
        "unittest/test/d.py",
        "json/__pycache__/e.py",
        "encodings/f.py",
    ]
    write_library(
        tmp_path, [*out, "_sysconfigdata__linux_x86_64.py", "notes.txt", "idlelib/idle_test/g.py"]
    )
    (tmp_path / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "nothing.py")
    after = load_text(1)
    np.testing.assert_array_equal(before.train, after.train)
    np.testing.assert_array_equal(before.validation, after.validation)
    shutil.copy(tmp_path / "module_1.py", tmp_path / "module_2.py")
    assert load_text(1).train.tobytes() != before.train.tobytes()


def test_load_text_limits_take_the_first_of_the_shuffle(text: TextDataset) -> None:
    part = load_text(CONTEXT, train_samples=50, validation_samples=7)
    np.testing.assert_array_equal(part.train, text.train[:50])
    np.testing.assert_array_equal(part.validation, text.validation[:7])
    many = len(text.train) + 1
    limit = rf"train_samples must be at most {many - 1}, .* of 64 characters"
    message = rf"{limit}, or 0 for all of them, got {many}"
    with pytest.raises(ValueError, match=message):
        load_text(CONTEXT, train_samples=many)
    with pytest.raises(ValueError, match=r"validation_samples must be at most .*, got -1"):
        load_text(CONTEXT, validation_samples=-1)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("def f(x):\n\treturn x  # ~\n", "def f(x):\n    return x  # ~\n"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("é\0\x7f\x1b\U0001f600\udcff", "\ufffd" * 6),
        ("", ""),
    ],
)
def test_encode_and_decode_map_rare_characters_to_one_symbol(
    text: TextDataset, written: str, read: str
) -> None:
    symbols = text.encode(written)
    assert symbols.dtype == np.uint8
    assert text.decode(symbols) == read
    np.testing.assert_array_equal(text.encode(read), symbols)


def test_decode_of_an_unknown_symbol_raises(text: TextDataset) -> None:
    with pytest.raises(ValueError, match="symbols must be from 0 to 96, got 3 to 97"):
        text.decode([3, 97])


@pytest.mark.parametrize("context", [0, -3])
def test_load_text_with_a_context_below_one_raises(context: int) -> None:
    with pytest.raises(ValueError, match=f"context must be at least 1, got {context}"):
        load_text(context)


def test_load_text_with_a_too_long_context_raises() -> None:
    with pytest.raises(
        ValueError, match=r"context must be less than \d{7}, .* of the training part, got 90000000"
    ):
        load_text(90_000_000)


@pytest.mark.parametrize("name", ["nowhere", "stripped"])
def test_load_text_without_library_source_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "stripped").mkdir()
    (tmp_path / "stripped" / "os.pyc").write_bytes(b"")
    use_library(monkeypatch, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/{name} must hold the \*.py files"):
        load_test_text(CONTEXT)


def test_text_batch_has_symbols_and_next_symbols(text: TextDataset) -> None:
    train, validation = load_text(CONTEXT, train_samples=100, validation_samples=30).splits(
        torch.device("cpu")
    )
    assert (len(train), len(validation)) == (100, 30)
    inputs, targets = train.get_batch(torch.tensor([7, 3, 7]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (3, CONTEXT)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert inputs[1].tolist() == text.train[3, :-1].tolist()
    assert targets[1].tolist() == text.train[3, 1:].tolist()
    assert torch.equal(targets[:, :-1], inputs[:, 1:])


def test_text_on_a_cpu_shares_the_arrays(text: TextDataset) -> None:
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(text, protocol=5, buffer_callback=buffers.append)
    assert len(rest) < 1000, "the symbols themselves are not copied"
    again = pickle.loads(rest, buffers=buffers)
    assert np.shares_memory(again.train, text.train)
    on_device = TextOnDevice(again.train, torch.device("cpu"))
    assert on_device._pieces.numpy().ctypes.data == text.train.ctypes.data, "nor are they on a CPU"
