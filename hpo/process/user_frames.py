"""Find the frames of the user's own code among those of libraries and of this program.

Stacks come from exceptions, from the running thread, from a trainer that is asked for its stack,
and from faulthandler, which writes the stacks of a trainer that crashes.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Generator, Sequence
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PACKAGE = Path(__file__).parents[1]
# The functions that call code of the user, by file and name.
_CALLERS = {
    (str(_PACKAGE / "trainer" / "objective_runner.py"), "advance_to_loss"),
    (str(_PACKAGE / "trainer" / "objective_runner.py"), "call_gather_function"),
    (str(_PACKAGE / "trainer" / "program_runner.py"), "run"),
}
COLLECTIVES_PATH = "/torch/distributed/"  # in the paths of frames
# DistributedDataParallel also waits in its forward pass, and in a backward pass, without a frame of
# torch.distributed.
_WAITING_PATHS = (COLLECTIVES_PATH, "/torch/nn/parallel/", "/torch/autograd/")
_TRAINING_FOLDER = _PACKAGE / "training"
_STANDARD_LIBRARY = Path(traceback.__file__).parent
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")

# Go's runtime interrupts its threads with this signal for the same reasons. It has no effect on a
# process without a handler, and neither libraries nor debuggers use it
# (golang.org/design/24543-non-cooperative-preemption).
INTERRUPT = signal.SIGURG

_HEADER_FORMAT = "main thread 0x{:016x}\n"
_STACK_HEADER = "Stack (most recent call first):"  # of a single thread
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# Characters that are not ASCII, in the notation of faulthandler.
_ESCAPE_PATTERN = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class UserFrames:
    """Finds the line of the search file `path`, or of a module next to it, in stacks."""

    def __init__(self, path: Path) -> None:
        self._folder = path.absolute().parent

    def find_position(self, frames: Sequence[traceback.FrameSummary]) -> str:
        """Return the innermost line of the user's code in a stack, such as `my_search.py:33`.

        If there is none, return the innermost line of a library. If the stack is empty or has only
        frames of this program, return an empty string. The outermost of the `frames` is first.
        """
        for name in (partial(_name_user_file, self._folder), _name_library_file):
            for frame in reversed(frames):
                if path := name(frame.filename):
                    return f"{path}:{frame.lineno}"
        return ""


@cache  # Each report of an objective has a position.
def _name_user_file(folder: Path, filename: str) -> str:
    """Return a file's path relative to the user's folder; empty if it is not the user's."""
    path = Path(filename)
    is_other = path.is_relative_to(_PACKAGE) or path.is_relative_to(_STANDARD_LIBRARY)
    if is_other or not path.is_relative_to(folder):
        return ""
    relative = path.relative_to(folder)
    return "" if any(part in _LIBRARY_FOLDERS for part in relative.parts) else str(relative)


@cache
def _name_library_file(filename: str) -> str:
    """Return the name of a file of a library; empty for a file of this program."""
    path = Path(filename)
    return "" if path.is_relative_to(_PACKAGE) else path.name


def extract_error_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception, without those of this program that call the objective."""
    return remove_program_frames(traceback.extract_tb(error.__traceback__))


def extract_current_frames() -> list[traceback.FrameSummary]:
    """Return the current stack, without the frames of this program that call the objective."""
    outermost_first = reversed(list(traceback.walk_stack(sys._getframe())))
    return remove_program_frames(
        traceback.StackSummary.extract(outermost_first, lookup_lines=False)
    )


def extract_generator_frames(generator: Generator[Any, Any, Any]) -> list[traceback.FrameSummary]:
    """Return the frames of a generator that waits at a `yield`; empty if the generator has ended.

    If it delegates to other generators (`yield from`), their frames follow if they are written in
    Python.
    """
    frames = []
    inner: Any = generator
    while (frame := getattr(inner, "gi_frame", None)) is not None:
        code: CodeType = frame.f_code
        frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        inner = inner.gi_yieldfrom
    return frames


def select_objective_frames(
    frames: Sequence[traceback.FrameSummary],
) -> list[traceback.FrameSummary]:
    """Return the frames of a stack that belong to an objective; empty if it runs none."""
    return remove_program_frames(frames) if any(map(_is_caller, frames)) else []


def are_in_collective(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether a stack ends in torch.distributed, so that the rank waits for other ranks.

    The innermost frame counts, since torch.distributed may call code of the user.
    """
    return bool(frames) and COLLECTIVES_PATH in frames[-1].filename


def may_wait_for_ranks(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether a thread that sleeps at a stack may wait for other ranks."""
    return bool(frames) and any(path in frames[-1].filename for path in _WAITING_PATHS)


def remove_program_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return frames without the frames of this program that call an objective or interrupt it.

    Frames of `hpo.training` stay, since objectives call it. Frames between frames of the objective
    also stay.
    """
    called = next((index + 1 for index, frame in enumerate(frames) if _is_caller(frame)), 0)
    inside = list(frames[called:])
    while inside and _is_program_file(inside[0].filename):
        del inside[0]
    while inside and _is_program_file(inside[-1].filename):
        del inside[-1]
    return inside


def _is_caller(frame: traceback.FrameSummary) -> bool:
    return (frame.filename, frame.name.rpartition(".")[2]) in _CALLERS  # The name may be qualified.


def _is_program_file(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_TRAINING_FOLDER)


def format_header(main_thread: int) -> str:
    """Return the line that names the main thread, which a process writes before its stacks."""
    return _HEADER_FORMAT.format(main_thread)


def format_frames(innermost: FrameType) -> str:
    """Return the stack of a thread in the notation of faulthandler."""
    lines = [
        f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
        for frame, line in traceback.walk_stack(innermost)
    ]
    return "\n".join([_STACK_HEADER, *lines, "", ""])


def find_frames(header: str, dump: str) -> Sequence[traceback.FrameSummary]:
    """Return the objective's frames in the main thread of a process, the outermost first.

    The result is empty if no objective runs.

    Args:
        header: The line from `format_header`.
        dump: Stacks of all threads from faulthandler, or the stack of the main thread from
            `format_frames`.
    """
    thread = header.split()[-1] if header.startswith("main thread ") else "0x"
    if thread not in dump:
        thread = _STACK_HEADER
    _, found, stack = dump.rpartition(thread)
    if not found:
        return []
    stack = _ESCAPE_PATTERN.sub(
        lambda code: chr(int(code[code.lastindex or 0], 16)), stack.partition("\n\n")[0]
    )
    frames = [
        traceback.FrameSummary(name, int(line), code)
        for name, line, code in reversed(_FRAME_PATTERN.findall(stack))
    ]
    return select_objective_frames(frames)
