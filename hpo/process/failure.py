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
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_DEVICE_HINT = "worker.device is where this rank computes: use .to(worker.device)"
_HINTS = {
    "is not initialized in the world group": (
        "a process group ends with the evaluation that made it: make it in each"
    ),
    "not compiled with CUDA": _DEVICE_HINT,
    "No CUDA GPUs are available": _DEVICE_HINT,
    "Cannot re-initialize CUDA": _DEVICE_HINT,
    "Found no NVIDIA driver": _DEVICE_HINT,
    "all tensors to be on the same device": _DEVICE_HINT,
    "finished reduction in the prior iteration": (
        "parameters without a part in the loss: requires_grad_(False) for them, or parallel=shard, "
        "or DDP's find_unused_parameters"
    ),
    "Worker.report() takes 2 positional": "metrics go by name: worker.report(loss, accuracy=0.9)",
}


def format_with_hint(error: BaseException, has_worker: bool = True) -> str:
    """Return an exception's message, followed by the hint of `find_hint`.

    A program does not have a `worker`, which some hints name.
    """
    text = format_error(error)
    hint = find_hint(error)
    if "worker." in hint and not has_worker:
        return text
    return f"{cut_text(text, 90)} ({hint})" if hint else text


def find_hint(error: BaseException) -> str:
    """Return a hint if an exception is a common mistake in an objective, otherwise ""."""
    text = format_error(error)
    hint = next((hint for part, hint in _HINTS.items() if part in text), "")
    if isinstance(error, KeyError) and text.strip("'") in _TORCHRUN_VARIABLES:
        hint = "variables of torchrun are set for the objective alone"
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, (str, Path)):
        with suppress(OSError):  # The working directory may have been removed.
            if not Path(error.filename).is_absolute():
                hint = f"a relative path, looked for in {make_printable(str(Path.cwd()))}"
    return hint


def format_traceback(error: BaseException, frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the traceback of an objective's exception, from the objective's own frame on.

    If no frame of the exception belongs to the objective, as after an invalid yielded value, it
    shows `frames`.
    """
    outer = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()

    def shorten(exception: traceback.TracebackException | None) -> None:
        if exception is not None and id(exception) not in seen:
            seen.add(id(exception))
            inside = remove_program_frames(exception.stack)
            exception.stack = traceback.StackSummary.from_list(inside)
            shorten(exception.__cause__)
            shorten(exception.__context__)

    shorten(outer)
    outer.stack = outer.stack or traceback.StackSummary.from_list(frames)
    return escape_unencodable("".join(outer.format()))


def format_stack(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return frames as text, in the format of a traceback."""
    return escape_unencodable("".join(traceback.format_list(list(frames)))).rstrip()


def describe_status(status: int | None) -> str:
    """Return how a process has ended. Its `status` is negative for a signal, None if unknown."""
    if status is None:
        return "ended"
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
