"""Text for character language models: the source files of Python's own standard library, on every machine.

The files are split into a training, a validation and a test part by a hash of their names, so that neither the machine
nor the order of its file system changes which file is in which part. Left out is what not every distribution installs
(tests, IDLE, tkinter...), and what programs have written (code pages, the build's settings...).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

_EXCLUDED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
_OPTIONAL_MODULES = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle.py", "turtledemo"}
_GENERATED_MODULES = {"encodings", "pydoc_data", "sitecustomize.py", "usercustomize.py"}
_EXCLUDED_NAMES = _EXCLUDED_FOLDERS | _OPTIONAL_MODULES | _GENERATED_MODULES
_BUILD_PREFIXES = ("_sysconfigdata", "config-")  # with the platform's name behind

# From which to which place among all hashes, from 0 to 1, a part goes.
_TRAIN_RANGE, _VALIDATION_RANGE, _TEST_RANGE = (0.0, 0.8), (0.8, 0.9), (0.9, 1.0)

_CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"  # the last stands for all others
_CODES = np.array([ord(character) for character in _CHARACTERS], "<u4")
_OTHER_SYMBOL = len(_CHARACTERS) - 1
_SYMBOL_OF_CODE = np.full(128, _OTHER_SYMBOL, np.uint8)
_SYMBOL_OF_CODE[_CODES[:-1]] = np.arange(_OTHER_SYMBOL)

Pieces = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TextDataset:
    """The training and the validation part of a text, in pieces of equal length that do not overlap.

    `train` and `validation` are uint8 of shape (N, context + 1): a network reads the first `context` symbols of a piece
    and predicts, at each, the next one. A piece begins with the last symbol of the one before it in the text, so that
    each symbol is predicted once.

    ::

        text = load_text(context=128)
        text.decode(text.train[0])  # 129 characters
    """

    train: Pieces
    validation: Pieces

    @property
    def context(self) -> int:
        """The number of symbols that a network reads."""
        return int(self.train.shape[1]) - 1

    @property
    def vocabulary_size(self) -> int:
        """The number of symbols: newline, the 95 printable characters of ASCII, and one for all others."""
        return len(_CHARACTERS)

    def encode(self, text: str) -> Pieces:
        """Return the symbols of a text, uint8 of shape (characters,).

        A tab becomes four spaces, a carriage return a newline, or nothing before one.
        """
        return _encode_text(text)

    def decode(self, symbols: npt.ArrayLike) -> str:
        """Return symbols, of shape (characters,), as text: the one for all other characters as U+FFFD.

        Raises ValueError for what is no symbol.
        """
        given = np.asarray(symbols, np.int64)
        if given.size and not 0 <= given.min() <= given.max() <= _OTHER_SYMBOL:
            raise ValueError(f"symbols go from 0 to {_OTHER_SYMBOL}, and these from {given.min()} to {given.max()}")
        codes: npt.NDArray[np.uint32] = _CODES[given]
        return codes.tobytes().decode("utf-32-le")

    def splits(self, device: torch.device) -> tuple[TextOnDevice, TextOnDevice]:
        """Return the training and the validation part on a device."""
        return TextOnDevice(self.train, device), TextOnDevice(self.validation, device)


class TextOnDevice:
    """Pieces of text, of shape (N, context + 1), on a device: of a CPU, the host's one copy; on each GPU, a copy."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self.device = device
        self._pieces = torch.from_numpy(pieces).to(device)

    def __len__(self) -> int:
        return len(self._pieces)

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a network reads at `indices`, and what comes next at each place: int64, both (N, context)."""
        pieces = self._pieces[indices.to(self.device)]
        return pieces[:, :-1].long(), pieces[:, 1:].long()


def load_text(context: int, *, train_samples: int = 0, validation_samples: int = 0) -> TextDataset:
    """Return the training and the validation part of the standard library's source, in pieces of `context` characters.

    `train_samples` and `validation_samples` limit each part to its first pieces; 0 takes all. The order is a fixed
    shuffle, the same in every run.

    Raises ValueError for a context or a number of samples that the text is too short for, and FileNotFoundError where
    Python was installed without its library's source.
    """
    train = _shuffle_pieces(_load_pieces("training", _TRAIN_RANGE, context))
    validation = _shuffle_pieces(_load_pieces("validation", _VALIDATION_RANGE, context))
    return TextDataset(
        _take_first(train, train_samples, f"train_samples={train_samples}", context),
        _take_first(validation, validation_samples, f"validation_samples={validation_samples}", context),
    )


def load_test_text(context: int) -> Pieces:
    """Return the pieces of the test part, which no search uses, in their order; raises as `load_text` does."""
    return _load_pieces("test", _TEST_RANGE, context).copy()


def _load_pieces(name: str, part: tuple[float, float], context: int) -> Pieces:
    """Return the pieces of a part as a view of its text."""
    if context < 1:
        raise ValueError(f"context must be at least 1, not {context}")
    symbols = _encode_text("".join(_read_texts(*part)))
    if len(symbols) <= context:
        raise ValueError(
            f"context={context}: the {name} part of the text has {len(symbols)} characters, and a piece {context + 1}"
        )
    return np.lib.stride_tricks.sliding_window_view(symbols, context + 1)[::context]


def _read_texts(start: float, end: float) -> Iterator[str]:
    """Yield the files of a part, in the order of their hashes, but for those that cannot be read or are not UTF-8."""
    library = sysconfig.get_path("stdlib")
    names = _list_files(library)
    if not names:
        raise FileNotFoundError(
            f"no text to learn from: {library} holds no *.py, Python's standard library as source. An installation "
            "without it, with .pyc files or a zip file in its place, cannot do this"
        )
    hashes = sorted((int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48, name) for name in names)
    for place, name in hashes:
        if start <= place < end:
            try:
                yield Path(library, name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _list_files(library: str) -> list[str]:
    """Return the names of the files, relative to the library, in any order."""
    names = []
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if _is_included(name)]
        inside = Path(folder).relative_to(library)
        names += [(inside / name).as_posix() for name in files if name.endswith(".py") and _is_included(name)]
    return names


def _is_included(name: str) -> bool:
    return name not in _EXCLUDED_NAMES and not name.startswith(_BUILD_PREFIXES)


def _encode_text(text: str) -> Pieces:
    plain = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), "<u4")
    symbols: Pieces = _SYMBOL_OF_CODE[np.minimum(codes, len(_SYMBOL_OF_CODE) - 1)]
    return symbols


def _shuffle_pieces(pieces: Pieces) -> Pieces:
    shuffled: Pieces = pieces[np.random.default_rng(0).permutation(len(pieces))]
    return shuffled


def _take_first(pieces: Pieces, wanted: int, setting: str, context: int) -> Pieces:
    if not 0 <= wanted <= len(pieces):
        raise ValueError(
            f"{setting}: the text has {len(pieces)} such samples of {context} characters; 0 takes all of them"
        )
    return pieces[: wanted or None]
