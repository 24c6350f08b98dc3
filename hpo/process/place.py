"""Where an objective is, or was: the line of the user's own code, among those of libraries and of this program."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

_PROGRAM = Path(__file__).parents[1]
_CALLERS = [str(_PROGRAM / "trainer" / name) for name in ("objective.py", "program.py")]
_FOR_OBJECTIVES = _PROGRAM / "training"
_STANDARD_LIBRARY = Path(traceback.__file__).parent
_LIBRARIES = ("site-packages", "dist-packages")


class Places:
    """Finds, among frames, the lines of a search space file and of the modules beside it.

    A place is the innermost of these lines, ``my_search.py:33``; empty where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.absolute().parent

    def of(self, frames: Sequence[traceback.FrameSummary]) -> str:
        """Return the place of frames, the outermost first; if no line is the user's, the innermost library line."""
        own = [frame for frame in frames if self._is_own(frame.filename)]
        others = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PROGRAM)]
        for frame in [*reversed(own), *reversed(others)]:
            path = Path(frame.filename)
            return f"{path.relative_to(self._folder) if own else path.name}:{frame.lineno}"
        return ""

    def _is_own(self, filename: str) -> bool:
        path = Path(filename)
        return (
            path.is_relative_to(self._folder)
            and not path.is_relative_to(_PROGRAM)
            and not path.is_relative_to(_STANDARD_LIBRARY)
            and not any(part in _LIBRARIES for part in path.relative_to(self._folder).parts)
        )


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames that an exception has come through, without those of this program around the objective."""
    return without_program(traceback.extract_tb(error.__traceback__))


def frames_here() -> list[traceback.FrameSummary]:
    """Return the frames that the caller is in, without those of this program around the objective."""
    outermost_first = reversed(list(traceback.walk_stack(sys._getframe())))
    return without_program(traceback.StackSummary.extract(outermost_first, lookup_lines=False))


def frames_of_generator(generator: Generator[Any, Any, Any]) -> list[traceback.FrameSummary]:
    """Return the frames of a generator that waits at a yield, and of those it delegates to; none where it has ended.

    Generators that it delegates to are found as far as they are written in Python.
    """
    frames = []
    inner: Any = generator
    while (frame := getattr(inner, "gi_frame", None)) is not None:
        code: CodeType = frame.f_code
        frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        inner = inner.gi_yieldfrom
    return frames


def in_objective(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return those of the frames that are an objective's; none where no objective runs."""
    return without_program(frames) if any(frame.filename in _CALLERS for frame in frames) else []


def without_program(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return frames without this program's own, which call an objective or interrupt it.

    The frames of `hpo.training`, which objectives call, stay, and so do all frames between the objective's.
    """
    called = next((place + 1 for place, frame in enumerate(frames) if frame.filename in _CALLERS), 0)
    inside = list(frames[called:])
    while inside and _is_around(inside[0].filename):
        del inside[0]
    while inside and _is_around(inside[-1].filename):
        del inside[-1]
    return inside


def _is_around(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PROGRAM) and not path.is_relative_to(_FOR_OBJECTIVES)
