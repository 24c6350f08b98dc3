"""What an objective has printed, as far as it is kept: the last lines of a file that may be long, or written to now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MOST_LINES = 200
_MOST_BYTES = 1 << 20  # of those lines
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Printed:
    """The last `lines` of a file, how many there are `before` them, and why it cannot be read, if it cannot."""

    path: Path
    lines: list[str]
    before: int = 0
    problem: str = ""


def read_printed(path: Path) -> Printed | None:
    """Read the end of a file, of which the last line may be a part; None where there is no file, or nothing in it."""
    if not path.exists():
        return None
    if not path.is_file():
        return Printed(path, [], problem="it is no file")
    ended, end = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                ended += chunk.count(b"\n")
                end = (end + chunk)[-_MOST_BYTES:]
    except OSError as error:
        return Printed(path, [], problem=error.strerror or str(error))
    if not end:
        return None
    count = ended + (not end.endswith(b"\n"))
    lines = end.decode("utf-8", "replace").removesuffix("\n").split("\n")[-_MOST_LINES:]
    return Printed(path, lines, count - len(lines))
