"""Functions for a script that a search runs: report losses, save checkpoints and offer weights.

Environment variables identify the evaluation, so child processes of the script can call these
functions too. In an objective function, each of these functions calls the method of `Worker` that
has the same name.
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

_METRICS_VARIABLE = "HPO_METRICS"
_TRIAL_VARIABLE = "HPO_TRIAL"
_FOLDER_VARIABLE = "HPO_FOLDER"
_CHECKPOINT_VARIABLE = "HPO_CHECKPOINT"
_CHECKPOINT_DRAFTS_VARIABLE = "HPO_CHECKPOINT_DRAFTS"
_WEIGHTS_DRAFTS_VARIABLE = "HPO_WEIGHTS_DRAFTS"
_READS_LINES_VARIABLE = "HPO_READS_LINES"
# Matches a message to the supervisor among printed lines.
NOTE_PATTERN = re.compile(rb"\x1ehpo:([^\x1e\n]*)\x1e")

_worker: Worker | None = None  # the worker of the objective function that runs in this process
_report_count = 0


def set_worker(worker: Worker | None) -> None:
    """Let the functions of this module call the methods of a worker; None for a script."""
    global _worker
    _worker = worker


def report(loss: Any, /, **metrics: Any) -> None:
    """Report a validation loss, and optionally metrics, from a script.

    Call it on one rank, or on all ranks with the same values. If a pruner stops the evaluation, the
    search ends the script. Without a search, the function does nothing. In an objective function,
    it calls ``worker.report``.

    Args:
        loss: The validation loss, lower is better: a number, a numpy number, or a tensor with one
            element.
        **metrics: Other numbers by name, for objectives and tables.

    Raises:
        TypeError: A value is not a number.

    Example:
        ::

            for epoch in range(epochs):
                train_epoch()
                hpo.report(compute_validation_loss(), accuracy=accuracy)
    """
    if _worker is not None:
        _worker.report(loss, **metrics)
    elif _METRICS_VARIABLE in os.environ:
        global _report_count
        _report_count += 1
        values = {**metrics, "loss": loss}
        send_note({name: _convert_to_number(name, value) for name, value in values.items()})


def save_checkpoint(state: Any) -> None:
    """Save a checkpoint, from which the evaluation resumes after an interruption.

    Call it before `report`. A checkpoint belongs to the next loss that is reported. If the
    evaluation is interrupted, or paused by a pruner, it later resumes from the latest checkpoint
    whose loss was reported. The file is removed when the evaluation ends. Without a search, the
    function does nothing. In an objective function, it calls ``worker.save_checkpoint``.

    Call it on rank 0, which writes the file, or on all ranks. If `state` is a function or has
    sharded tensors, the call is collective: call it on all ranks, because tensors are gathered.

    Args:
        state: Dicts, lists and tuples of tensors, numpy arrays, numbers, strings, booleans and
            None, for example from ``state_dict()``; or a function without arguments that returns
            such a state.

    Raises:
        TypeError: The state has a value of another type. The message has the path of the value in
            the state.

    Example:
        ::

            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            hpo.save_checkpoint({**state, "epoch": epoch})
            hpo.report(loss)
    """
    if _worker is not None:
        _worker.save_checkpoint(state)
    elif drafts := os.environ.get(_CHECKPOINT_DRAFTS_VARIABLE):
        from hpo.trainer import draft_writer

        draft_writer.save_checkpoint(Path(drafts), state)


def offer_weights(weights: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
    """Offer the weights of the network, which the run stores if this individual is its best.

    Call it before `report`. The run stores the weights of its best individual in
    RUN_DIR/best.safetensors. With ``--confirm-seeds``, the weights of the confirmed winner are in
    RUN_DIR/confirmed. Each call writes a file, so offer weights only if the loss is the lowest so
    far. Without a search, the function does nothing. In an objective function, it calls
    ``worker.offer_weights``.

    Call it on rank 0, which writes the file, or on all ranks. If `weights` is a function, which may
    gather a sharded network, the call is collective: call it on all ranks.

    Args:
        weights: Unsharded tensors by name, for example from ``state_dict()``; or a function that
            returns them.

    Raises:
        TypeError: The weights are not a dict of unsharded tensors by name.

    Example:
        ::

            if loss < lowest_loss:
                hpo.offer_weights(model.state_dict())
            hpo.report(loss)
    """
    if _worker is not None:
        _worker.offer_weights(weights)
    elif drafts := os.environ.get(_WEIGHTS_DRAFTS_VARIABLE):
        from hpo.trainer import draft_writer

        draft_writer.offer_weights(Path(drafts), weights)


def load_checkpoint() -> Any:
    """Return the state in the latest checkpoint of this evaluation: ``hpo.checkpoint``.

    Its tensors are on the CPU. It is None if the evaluation starts from the beginning, or if no
    search runs the script. The next loss that the script reports counts as the loss of the step
    after the checkpoint. A RuntimeError is raised if it has already reported a loss.
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
    """Return the number of this evaluation: ``hpo.trial``. It is None without a search."""
    if _worker is not None:
        return _worker.trial
    return int(os.environ[_TRIAL_VARIABLE]) if _TRIAL_VARIABLE in os.environ else None


def find_folder() -> Path | None:
    """Create and return the folder of this evaluation: ``hpo.folder``; None without a search."""
    if _worker is not None:
        return _worker.folder
    if _FOLDER_VARIABLE not in os.environ:
        return None
    folder = Path(os.environ[_FOLDER_VARIABLE])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def send_note(content: Mapping[str, Any]) -> None:
    """Append a note, as a line of JSON, to the file that the search reads."""
    line = f"{json.dumps(content)}\n".encode()
    descriptor = os.open(os.environ[_METRICS_VARIABLE], os.O_WRONLY | os.O_APPEND)
    try:
        # A single write, since other processes may write at the same time.
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def send_draft(kind: str, name: str) -> None:
    """Send the name of a draft: a file of the next loss, with a checkpoint or with weights.

    If losses are read from printed lines, the name is printed, too. Its position among the lines
    shows which loss is the next. The `kind` is "checkpoint" or "weights".
    """
    send_note({kind: name})
    if not reads_lines():
        return
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(Exception):  # The script may have closed the stream.
            stream.flush()
            # The script may have redirected it to a file.
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, f"\x1ehpo:{kind} {name}\x1e".encode())


def reads_lines() -> bool:
    """Return whether the search reads losses from the lines that the script prints."""
    return _READS_LINES_VARIABLE in os.environ


def count_reports() -> int:
    """Return the number of losses that this process has reported."""
    return _report_count


def _convert_to_number(name: str, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise TypeError(f"hpo.report: {name} must be a number, got {value!r}")
    return float(plain)
