"""What an exception of an objective says, in a way that can be kept and shown."""

from __future__ import annotations

import traceback
from pathlib import Path


def message(error: BaseException) -> str:
    """Give an exception's message in one line that any terminal can show; its own code may fail."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return showable(text) or "no message"


def showable(text: str) -> str:
    """Escape what UTF-8 has no bytes for, such as the parts of a file name in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()


def where(error: BaseException, path: Path) -> str:
    """Name the line of the search space file that an exception has come through, or the last line there is."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].name})" if own else "an unknown place"
