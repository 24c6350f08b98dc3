"""Read and write safetensors files.

Files are checked for completeness, flushed to disk, and never unpickled.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

_MAX_HEADER_BYTES = 100_000_000  # The same limit as in safetensors.
_CHUNK_SIZE = 16 << 20  # Bytes.


@dataclass(frozen=True)
class TensorSource:
    """Select the tensors to copy from a file: those whose names begin with `prefix`."""

    path: Path
    prefix: str = ""
    new_prefix: str = ""
    """Replacement of the prefix in the copy."""


@dataclass(frozen=True)
class TensorBytes:
    """The bytes of a tensor, with its type and shape as in the header of a file."""

    dtype: str
    shape: list[int]
    size: int
    """Number of bytes."""
    read_chunks: Callable[[], Iterable[Any]]
    """Returns the bytes in order. Raises ValueError if the file with the tensor is incomplete."""

    @property
    def alignment(self) -> int:
        """Number of bytes of an element."""
        return self.size // max(1, math.prod(self.shape))


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset of its tensors.

    Source: huggingface/safetensors, "Format".
    """
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")
    header = json.loads(file.read(length))
    return dict(header), 8 + length


def locate_tensors(file: BinaryIO, start: int, header: Mapping[str, Any]) -> dict[str, TensorBytes]:
    """Return the positions of the tensors in a file; raise ValueError if it is incomplete."""
    size = file.seek(0, 2) - start
    pieces = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size:
            raise ValueError("it is incomplete")
        read_chunks = partial(_read_slice, file, start + begin, end - begin)
        pieces[name] = TensorBytes(entry["dtype"], entry["shape"], end - begin, read_chunks)
    return pieces


def _read_slice(file: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    file.seek(begin)
    while size:
        part = file.read(min(size, _CHUNK_SIZE))
        if not part:
            raise ValueError("it is incomplete")
        size -= len(part)
        yield part


def compute_checksum(text: str, parts: Iterable[tuple[str, Iterable[Any]]]) -> str:
    """Return the CRC-32 of a text, and of the name and the bytes of each part, in order."""
    checksum = zlib.crc32(text.encode())
    for name, contents in parts:
        checksum = zlib.crc32(name.encode(), checksum)
        for content in contents:
            checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"


def copy_tensors(
    path: Path,
    sources: Sequence[TensorSource],
    texts: Mapping[str, str],
    checksummed_text: str = "",
) -> None:
    """Write a file with tensors of other files and with texts, and flush it to disk.

    Args:
        texts: Texts for the header, by name.
        checksummed_text: Name of a text in `texts`. The text "checksum" is added, with the checksum
            of this text and of all tensors. If the name is empty, no checksum is added.

    Raises:
        OSError: If a file cannot be read or written.
        ValueError: If a source is incomplete.
    """
    with ExitStack() as held:
        pieces: dict[str, TensorBytes] = {}
        for source in sources:
            file = held.enter_context(source.path.open("rb"))
            header, start = read_header(file)
            header.pop("__metadata__", None)
            for name, piece in locate_tensors(file, start, header).items():
                if name.startswith(source.prefix):
                    pieces[source.new_prefix + name.removeprefix(source.prefix)] = piece
        texts = dict(texts)
        if checksummed_text:
            parts = ((name, pieces[name].read_chunks()) for name in sorted(pieces))
            texts["checksum"] = compute_checksum(texts[checksummed_text], parts)
        write_file(path, pieces, texts)


def write_file(
    path: Path, pieces: Mapping[str, TensorBytes], texts: Mapping[str, str], is_flushed: bool = True
) -> None:
    """Write tensors and texts to a safetensors file.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If a file with a tensor is incomplete, or a name cannot be in a file.
    """
    if "__metadata__" in pieces:
        raise ValueError("a tensor cannot have the name __metadata__")
    # Tensors with the largest elements come first, so that each begins at a multiple of its element
    # size.
    names = sorted(pieces, key=lambda name: (-pieces[name].alignment, name))
    header: dict[str, Any] = {"__metadata__": texts}
    end = 0
    for name in names:
        piece = pieces[name]
        begin = end
        end += piece.size
        header[name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header, ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            for part in pieces[name].read_chunks():
                file.write(part)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())
