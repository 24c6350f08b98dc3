"""Read the stacks that faulthandler writes in a trainer that crashes, or is asked for its stack."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from traceback import FrameSummary

from hpo.process.user_frames import select_objective_frames

# Go's runtime interrupts its threads with this signal for the same reasons. It has no effect on a process without a
# handler, and neither libraries nor debuggers use it (golang.org/design/24543-non-cooperative-preemption).
INTERRUPT = signal.SIGURG
WRITE_STACKS = signal.SIGRTMIN + 9

_HEADER_FORMAT = "main thread 0x{:016x}\n"
_STACK_HEADER = "Stack (most recent call first):"  # of a single thread
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# Characters that are not ASCII, in the notation of faulthandler.
_ESCAPE_PATTERN = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def format_header(main_thread: int) -> str:
    """Return the line that names a process's main thread. The process writes it before its stacks."""
    return _HEADER_FORMAT.format(main_thread)


def find_frames(header: str, dump: str) -> Sequence[FrameSummary]:
    """Return the objective's frames in the main thread of a process, the outermost first; empty if no objective runs.

    Args:
        header: The line from `format_header`.
        dump: Stacks of all threads, or of the main thread alone, as faulthandler writes them.
    """
    thread = header.split()[-1] if header.startswith("main thread ") else "0x"
    if thread not in dump:
        thread = _STACK_HEADER
    _, found, stack = dump.rpartition(thread)
    if not found:
        return []
    stack = _ESCAPE_PATTERN.sub(lambda code: chr(int(code[code.lastindex or 0], 16)), stack.partition("\n\n")[0])
    frames = [FrameSummary(name, int(line), code) for name, line, code in reversed(_FRAME_PATTERN.findall(stack))]
    return select_objective_frames(frames)
