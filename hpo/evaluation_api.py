"""For code that a search runs: reports, checkpoints and weights of its evaluation. Imports no torch by itself.

A script learns from its environment what evaluation it runs in, so child processes may use these functions too. In an
objective that is a function, each of them is the method of its worker.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpo.trainer.worker import Worker

_METRICS_VARIABLE, _TRIAL_VARIABLE, _FOLDER_VARIABLE, _CHECKPOINT_VARIABLE = (
    "HPO_METRICS",
    "HPO_TRIAL",
    "HPO_FOLDER",
    "HPO_CHECKPOINT",
)
_CHECKPOINT_DRAFTS_VARIABLE, _WEIGHTS_DRAFTS_VARIABLE = "HPO_CHECKPOINT_DRAFTS", "HPO_WEIGHTS_DRAFTS"
_READS_LINES_VARIABLE = "HPO_READS_LINES"
NOTE_PATTERN = re.compile(rb"\x1ehpo:([^\x1e\n]*)\x1e")  # a note among printed lines

_worker: Worker | None = None  # of the objective that is a function and runs in this process
_report_count = 0


def set_worker(worker: Worker | None) -> None:
    """Let the functions of this module be the methods of a worker, or of none again."""
    global _worker
    _worker = worker


def report(loss: Any, /, **metrics: Any) -> None:
    """Report a validation loss, with metrics, from anywhere in a script that a search runs.

    Call it on one rank, or on all ranks with the same loss. The search may end the script after a loss, as a pruner
    asks. Without a search, nothing happens. In an objective that is a function, it is ``worker.report``.

    Args:
        loss: The validation loss: a number, of numpy too, or a tensor of one element.
        metrics: Other numbers by their names.

    Raises:
        TypeError: A value is not a number.
    """
    if _worker is not None:
        _worker.report(loss, **metrics)
    elif _METRICS_VARIABLE in os.environ:
        global _report_count
        _report_count += 1
        send_note({name: _convert_to_number(name, value) for name, value in {**metrics, "loss": loss}.items()})


def save_checkpoint(state: Any) -> None:
    """Save what the script needs to continue, before it reports the loss that belongs to it.

    The evaluation continues from the last checkpoint whose loss was reported, if it is interrupted, or paused by a
    pruner. Rank 0 writes a file each time. Call it on rank 0, or on all ranks; on all of them if the state is a
    function or has sharded tensors, which are gathered. The file is removed when the evaluation ends. Without a search,
    nothing happens. In an objective that is a function, it is ``worker.save_checkpoint``.

    Args:
        state: Dicts, lists and tuples of tensors, numpy arrays, numbers, texts, booleans and None, such as
            ``state_dict()`` returns; or a function without arguments that returns them.

    Raises:
        TypeError: The state has another value; the message names its place.
    """
    if _worker is not None:
        _worker.save_checkpoint(state)
    elif drafts := os.environ.get(_CHECKPOINT_DRAFTS_VARIABLE):
        from hpo.trainer.draft_writer import write_checkpoint

        write_checkpoint(Path(drafts), state)


def offer_weights(weights: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
    """Offer the network's weights, before the script reports the loss that belongs to them.

    The weights of the run's best individual are kept in RUN_DIR/best.safetensors, and with ``--confirm-seeds`` those of
    the confirmed winner in RUN_DIR/confirmed. Rank 0 writes a file each time: offer weights if the loss is the lowest
    so far. Call it on rank 0, or on all ranks; on all of them if `weights` is a function, which may gather a sharded
    network. Without a search, nothing happens. In an objective that is a function, it is ``worker.offer_weights``.

    Args:
        weights: Whole tensors by their names, such as ``state_dict()`` returns; or a function that returns them.

    Raises:
        TypeError: The weights are not a dict of whole tensors by their names.
    """
    if _worker is not None:
        _worker.offer_weights(weights)
    elif drafts := os.environ.get(_WEIGHTS_DRAFTS_VARIABLE):
        from hpo.trainer.draft_writer import write_weights

        write_weights(Path(drafts), weights)


def load_checkpoint() -> Any:
    """Return the state that this evaluation continues from; None if it begins, and without a search.

    Its next loss is the one after the losses that it had when the state was saved. Tensors are on the CPU.

    Raises:
        RuntimeError: The script has reported a loss already.
    """
    if _worker is not None:
        return _worker.checkpoint
    if _CHECKPOINT_DRAFTS_VARIABLE not in os.environ:
        return None
    if _report_count:
        raise RuntimeError("hpo.checkpoint must be read before the first report")
    path = os.environ.get(_CHECKPOINT_VARIABLE)
    send_note({"asked": True})
    if path is None:
        return None
    from hpo.trainer.draft_writer import read_checkpoint

    return read_checkpoint(Path(path))


def find_trial() -> int | None:
    """Return the number of the evaluation in the run, None without a search."""
    if _worker is not None:
        return _worker.trial
    return int(os.environ[_TRIAL_VARIABLE]) if _TRIAL_VARIABLE in os.environ else None


def find_folder() -> Path | None:
    """Return a folder of this evaluation alone, which is made now, None without a search."""
    if _worker is not None:
        return _worker.folder
    if _FOLDER_VARIABLE not in os.environ:
        return None
    folder = Path(os.environ[_FOLDER_VARIABLE])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def send_note(content: Mapping[str, Any]) -> None:
    """Send a line to the supervisor of this rank, in the order in which processes send them."""
    line = f"{json.dumps(content)}\n".encode()
    descriptor = os.open(os.environ[_METRICS_VARIABLE], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, line)  # at once: other processes may write, too
    finally:
        os.close(descriptor)


def send_draft(kind: str, name: str) -> None:
    """Send the name of a draft that belongs to the next loss.

    If losses are read from printed lines, it goes among the lines as well, since only there it is in order with them.
    """
    send_note({kind: name})
    if not reads_lines():
        return
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(Exception):  # the script may have closed it
            stream.flush()
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # and not a file of the script's own
                os.write(descriptor, f"\x1ehpo:{kind} {name}\x1e".encode())


def reads_lines() -> bool:
    """Return whether the search reads losses from printed lines."""
    return _READS_LINES_VARIABLE in os.environ


def count_reports() -> int:
    """Return how many losses this process has reported."""
    return _report_count


def _convert_to_number(name: str, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError(f"hpo.report: {name} must be a number, got {value!r}")
    return float(plain)
