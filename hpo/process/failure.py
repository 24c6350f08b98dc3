"""Describe failures of an objective for the study and for the user."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpo.process.user_frames import remove_program_frames
from hpo.text_format import cut_text, escape_unencodable, format_error, make_printable

# Variables of torchrun that scripts read. They are set for an objective, and not for `test`.
_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_HINTS = {
    "is not initialized in the world group": "a process group ends with the evaluation that made it: make it in each",
    "not compiled with CUDA": "worker.device is where this rank computes: use .to(worker.device)",
    "No CUDA GPUs are available": "worker.device is where this rank computes: use .to(worker.device)",
    "Cannot re-initialize CUDA": "worker.device is where this rank computes: use .to(worker.device)",
    "Found no NVIDIA driver": "worker.device is where this rank computes: use .to(worker.device)",
    "finished reduction in the prior iteration": (
        "parameters without a part in the loss: requires_grad_(False) for them, or parallel=shard, or DDP's "
        "find_unused_parameters"
    ),
    "Worker.report() takes 2 positional": "metrics go by name: worker.report(loss, accuracy=0.9)",
    "all tensors to be on the same device": "worker.device is where this rank computes: use .to(worker.device)",
}


def format_with_hint(error: BaseException) -> str:
    """Return an exception's message, followed by a hint if the exception is a common mistake in an objective."""
    text, hint = format_error(error), find_hint(error)
    return f"{cut_text(text, 90)} ({hint})" if hint else text


def find_hint(error: BaseException) -> str:
    """Return a hint for the user if an exception is a common mistake in an objective, otherwise an empty string."""
    text = format_error(error)
    hint = next((hint for part, hint in _HINTS.items() if part in text), "")
    if isinstance(error, KeyError) and text.strip("'") in _TORCHRUN_VARIABLES:
        hint = "variables of torchrun are set for the objective alone"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, (str, Path)):
        with suppress(OSError):  # The working directory may have been removed.
            relative = not Path(error.filename).is_absolute()
            hint = (
                f"a relative path, looked for in {make_printable(str(Path.cwd()))}"
                if relative
                else hint
            )
    return hint


def format_traceback(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the traceback of an objective's exception, from the objective's own frame on.

    Args:
        frames: Frames to show if no frame of the exception belongs to the objective, as after an
        invalid yielded value.
    """
    outer = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()

    def shorten(exception: traceback.TracebackException | None) -> None:
        if exception is not None and id(exception) not in seen:
            seen.add(id(exception))
            exception.stack = traceback.StackSummary.from_list(
                remove_program_frames(exception.stack)
            )
            shorten(exception.__cause__)
            shorten(exception.__context__)

    shorten(outer)
    outer.stack = outer.stack or traceback.StackSummary.from_list(frames)
    return escape_unencodable("".join(outer.format()))


def format_stack(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return frames as text, in the format of a traceback."""
    return escape_unencodable("".join(traceback.format_list(list(frames)))).rstrip()


def describe_status(status: int | None) -> str:
    """Return how a process has ended, for the user.

    Args:
        status: Exit status, negative for a signal; None if it is not known.
    """
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
