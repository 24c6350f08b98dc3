"""Find the lines of the user's own code in stacks, among those of libraries and of this program."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_CALLER_FILES = [str(_PACKAGE / "trainer" / name) for name in ("objective_call.py", "program_runner.py")]
_TRAINING_FOLDER = _PACKAGE / "training"
_STANDARD_LIBRARY = Path(traceback.__file__).parent
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


class UserFrames:
    """Finds the lines of a search space file, and of modules next to it, in frames.

    A position is the innermost of these lines, such as `my_search.py:33`; empty if there is none.

    Args:
        path: Path of the search space file.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.absolute().parent

    def find_position(self, frames: Sequence[traceback.FrameSummary]) -> str:
        """Return the position in frames, outermost first; the innermost library line if none is the user's."""
        own = [frame for frame in frames if self._is_user_file(frame.filename)]
        others = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
        for frame in [*reversed(own), *reversed(others)]:
            path = Path(frame.filename)
            return f"{path.relative_to(self._folder) if own else path.name}:{frame.lineno}"
        return ""

    def _is_user_file(self, filename: str) -> bool:
        path = Path(filename)
        return (
            path.is_relative_to(self._folder)
            and not path.is_relative_to(_PACKAGE)
            and not path.is_relative_to(_STANDARD_LIBRARY)
            and not any(part in _LIBRARY_FOLDERS for part in path.relative_to(self._folder).parts)
        )


def extract_error_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception, without this program's frames around the objective."""
    return remove_program_frames(traceback.extract_tb(error.__traceback__))


def extract_current_frames() -> list[traceback.FrameSummary]:
    """Return the frames of the caller, without this program's frames around the objective."""
    outermost_first = reversed(list(traceback.walk_stack(sys._getframe())))
    return remove_program_frames(traceback.StackSummary.extract(outermost_first, lookup_lines=False))


def extract_generator_frames(generator: Generator[Any, Any, Any]) -> list[traceback.FrameSummary]:
    """Return the frames of a generator that waits at a yield; empty if it has ended.

    The frames of generators to which it delegates follow, if they are written in Python.
    """
    frames = []
    inner: Any = generator
    while (frame := getattr(inner, "gi_frame", None)) is not None:
        code: CodeType = frame.f_code
        frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        inner = inner.gi_yieldfrom
    return frames


def select_objective_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames that belong to an objective; empty if no objective runs."""
    return remove_program_frames(frames) if any(frame.filename in _CALLER_FILES for frame in frames) else []


def remove_program_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return frames without this program's own, which call an objective or interrupt it.

    The frames of `hpo.training`, which objectives call, stay, and so do all frames between the objective's.
    """
    called = next((index + 1 for index, frame in enumerate(frames) if frame.filename in _CALLER_FILES), 0)
    inside = list(frames[called:])
    while inside and _is_program_file(inside[0].filename):
        del inside[0]
    while inside and _is_program_file(inside[-1].filename):
        del inside[-1]
    return inside


def _is_program_file(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_TRAINING_FOLDER)
