"""What went wrong in an objective, and where, in a way that can be kept and shown."""

from __future__ import annotations

import sys
import threading
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


def stack_of(thread: threading.Thread) -> str:
    """Say where a thread is: the frames of the objective, and not those that lead to it."""
    frames = traceback.extract_stack(sys._current_frames()[thread.ident or 0])
    ours = [place for place, frame in enumerate(frames) if Path(frame.filename).parent == Path(__file__).parent]
    return "".join(traceback.format_list(frames[ours[-1] + 1 :] if ours else frames)).rstrip()
