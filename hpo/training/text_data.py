"""Text for character language models: the source files of Python's library.

Each file belongs to the training, the validation or the test part, depending on a hash of its name.
So the split does not depend on the host or its file system. Modules that some distributions do not
install (tests, IDLE, tkinter), and generated files (code pages, settings of the build) are left
out.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hpo.training.loop import check_count

_EXCLUDED_NAMES = {
    *("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"),
    # Optional modules.
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle.py", "turtledemo"),
    # Generated modules.
    *("encodings", "pydoc_data", "sitecustomize.py", "usercustomize.py"),
}
_BUILD_PREFIXES = ("_sysconfigdata", "config-")  # The name of the platform follows.

# The range of hashes, scaled to 0 to 1, of each part.
_RANGES = {"training": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}

# The last stands for all others.
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127))) + "\N{REPLACEMENT CHARACTER}"
_CODES = np.array([ord(character) for character in _CHARACTERS], "<u4")
_OTHER_SYMBOL = len(_CHARACTERS) - 1
_SYMBOL_OF_CODE = np.full(128, _OTHER_SYMBOL, np.uint8)
_SYMBOL_OF_CODE[_CODES[:-1]] = np.arange(_OTHER_SYMBOL)

Pieces = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TextDataset:
    """The training and the validation part of a text, in pieces of equal length.

    A network reads the first `context` symbols of a piece, and predicts the next symbol at each
    position. A piece begins with the last symbol of the previous piece, so that each symbol is
    predicted once.

    Example:
        ::

            text = load_text(context=128)
            text.decode(text.train[0])  # 129 characters
    """

    train: Pieces
    """The training part, uint8 of shape (N, context + 1)."""
    validation: Pieces
    """The validation part, uint8 of shape (N, context + 1)."""

    @property
    def context(self) -> int:
        """The number of symbols that a network reads."""
        return int(self.train.shape[1]) - 1

    @property
    def vocabulary_size(self) -> int:
        """The number of symbols, 97: newline, 95 printable ASCII characters, and all others."""
        return len(_CHARACTERS)

    def encode(self, text: str) -> Pieces:
        r"""Convert text to symbols, uint8 of shape (characters,).

        A tab becomes four spaces. Each end of a line (``\r\n``, ``\r`` or ``\n``) becomes one
        newline. Other characters that are not printable ASCII become the last symbol.
        """
        return _encode_text(text)

    def decode(self, symbols: npt.ArrayLike) -> str:
        """Convert symbols to text.

        The last symbol becomes U+FFFD. It stands for every character that is neither a newline nor
        printable ASCII.

        Raises:
            ValueError: A symbol is not from 0 to ``vocabulary_size - 1``.
        """
        numbers = np.asarray(symbols, np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() <= _OTHER_SYMBOL:
            raise ValueError(
                f"symbols must be from 0 to {_OTHER_SYMBOL}, got {numbers.min()} to {numbers.max()}"
            )
        codes: npt.NDArray[np.uint32] = _CODES[numbers]
        return codes.tobytes().decode("utf-32-le")

    def splits(self, device: torch.device) -> tuple[TextOnDevice, TextOnDevice]:
        """Return the training and the validation part on a device."""
        return TextOnDevice(self.train, device), TextOnDevice(self.validation, device)


class TextOnDevice:
    """Pieces of text on a device. ``len`` returns the number of pieces.

    On a CPU, they share the memory of `pieces`; a GPU gets a copy.

    Args:
        pieces: The pieces, uint8 of shape (N, context + 1).
        device: The device on which batches are returned.
    """

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self.device = device
        self._pieces = torch.from_numpy(pieces).to(device)

    def __len__(self) -> int:
        return len(self._pieces)

    def get_batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pieces as a batch.

        Args:
            indices: Indices of the pieces, int64 of shape (N,), on any device.

        Returns:
            The symbols that a network reads, and the next symbol at each position, both int64 of
            shape (N, context).
        """
        pieces = self._pieces[indices.to(self.device)]
        return pieces[:, :-1].long(), pieces[:, 1:].long()


def load_text(context: int, *, train_samples: int = 0, validation_samples: int = 0) -> TextDataset:
    """Load the training and the validation part of the source files of Python's standard library.

    The pieces are in the order of a fixed shuffle, which is the same in every run.

    Args:
        context: Number of characters that a network reads, at least 1.
        train_samples: Number of training pieces to use, the first of the shuffle; 0 uses all.
        validation_samples: Number of validation pieces to use, the first of the shuffle; 0 uses
            all.

    Raises:
        ValueError: `context` is less than 1, or the text is too short for it or for the numbers of
            samples.
        FileNotFoundError: Python was installed without the source files of its library.

    Example:
        ::

            def prepare(settings):
                return load_text(context=settings.context)
    """

    def load_shuffled(part: str, setting: str, count: int) -> Pieces:
        pieces = _load_pieces(part, context)
        count = check_count(setting, count, len(pieces), f"{context} characters")
        return pieces[np.random.default_rng(0).permutation(len(pieces))[:count]]

    train = load_shuffled("training", "train_samples", train_samples)
    return TextDataset(train, load_shuffled("validation", "validation_samples", validation_samples))


def load_test_text(context: int) -> Pieces:
    """Load the test part of the text, which is only for the winner of a search.

    Args:
        context: Number of characters that a network reads, at least 1.

    Returns:
        The pieces in the order of the text, uint8 of shape (N, context + 1).

    Raises:
        ValueError: `context` is less than 1, or the text is too short for it.
        FileNotFoundError: Python was installed without the source files of its library.

    Example:
        ::

            pieces = load_test_text(context=128)
    """
    return _load_pieces("test", context).copy()


def _load_pieces(part: str, context: int) -> Pieces:
    """Return the pieces of a part, as a view."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    symbols = _encode_text(_read_library(part))
    if len(symbols) <= context:
        raise ValueError(
            f"context must be less than {len(symbols)}, the number of characters of the {part} "
            f"part, got {context}"
        )
    return np.lib.stride_tricks.sliding_window_view(symbols, context + 1)[::context]


def _read_library(part: str) -> str:
    """Return the text of the files of a part, in the order of the hashes of their names.

    Files that are unreadable or not UTF-8 are left out.
    """
    library = Path(sysconfig.get_path("stdlib"))
    hashes: list[tuple[float, str]] = []
    for folder, folders, files in os.walk(str(library)):
        folders[:] = filter(_is_included, folders)
        for name in filter(_is_included, files):
            if name.endswith(".py"):
                path = Path(folder, name).relative_to(library).as_posix()
                digest = hashlib.sha256(path.encode()).digest()
                hashes.append((int.from_bytes(digest[:6], "big") / 2**48, path))
    if not hashes:
        raise FileNotFoundError(
            f"{library} must hold the *.py files of Python's standard library, got none. Use an "
            "installation of Python that has its library as source files, not as .pyc files or as "
            "a zip file"
        )
    start, end = _RANGES[part]
    texts = []
    for position, path in sorted(hashes):
        if start <= position < end:
            with suppress(OSError, UnicodeDecodeError):
                texts.append(Path(library, path).read_text(encoding="utf-8"))
    return "".join(texts)


def _is_included(name: str) -> bool:
    return name not in _EXCLUDED_NAMES and not name.startswith(_BUILD_PREFIXES)


def _encode_text(text: str) -> Pieces:
    plain = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    codes = np.frombuffer(plain.encode("utf-32-le", "surrogatepass"), "<u4")
    symbols: Pieces = _SYMBOL_OF_CODE[np.minimum(codes, len(_SYMBOL_OF_CODE) - 1)]
    return symbols
