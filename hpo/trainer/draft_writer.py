"""Write checkpoints and weights of a training script to draft files.

The leader later keeps or removes each draft. The path of a draft is the path `drafts` with a unique
suffix.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpo.evaluation_api import count_reports, reads_lines, send_draft
from hpo.store.checkpoints import check_space
from hpo.text_format import format_error
from hpo.trainer.state_files import (
    check_weights,
    gather_parts,
    is_state_function,
    read_checkpoint_file,
    split_state,
    write_state,
    write_weights,
)

_draft_numbers = itertools.count()
# The latest draft of each kind, with the number of earlier reports.
_last_drafts: dict[str, tuple[int, Path]] = {}
_warned_kinds: set[str] = set()


def save_checkpoint(drafts: Path, state: Any) -> None:
    """Write a checkpoint on rank 0. See ``hpo.save_checkpoint``."""
    is_first = _find_rank() == 0
    parts = split_state(state() if is_state_function(state) else state)
    if not is_first and not parts.is_sharded:
        return
    parts = gather_parts(parts, is_kept=is_first)
    if is_first:
        _write_draft("checkpoint", drafts, parts.leaves, lambda path: write_state(path, parts))


def offer_weights(drafts: Path, weights: Mapping[str, Any] | Callable[[], Any]) -> None:
    """Write weights on rank 0. See ``hpo.offer_weights``."""
    whole: Any = weights() if is_state_function(weights) else weights  # type: ignore[operator]
    if _find_rank() == 0:
        checked = check_weights(whole)
        _write_draft("weights", drafts, checked, lambda path: write_weights(path, checked))


def read_checkpoint(path: Path) -> Any:
    """Return the state in a checkpoint file. Raises ValueError if the file cannot be read."""
    return read_checkpoint_file(path).load_state()


def _find_rank() -> int:
    """Return the rank in torch's process group; without one, the environment variable RANK.

    The group comes first, since RANK may be wrong in processes that the script has started.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _write_draft(
    kind: str, drafts: Path, tensors: Mapping[str, torch.Tensor], write: Callable[[Path], None]
) -> None:
    """Let `write` write a draft file of these tensors, and send its name to the supervisor.

    `kind` is "checkpoint" or "weights". If the file cannot be written, print a warning, and
    continue.
    """
    name = f"{os.getpid()}-{next(_draft_numbers)}"
    path = drafts.with_name(f"{drafts.name}-{name}.safetensors")
    try:
        path.parent.mkdir(exist_ok=True)
        check_space(path, sum(tensor.nbytes for tensor in tensors.values()))
        write(path)
    except Exception as error:  # The file system and safetensors raise exceptions of many types.
        path.unlink(missing_ok=True)
        if kind not in _warned_kinds:
            _warned_kinds.add(kind)
            print(
                f"warning: the {kind} cannot be saved: {format_error(error)}",
                file=sys.stderr,
                flush=True,
            )
        return
    send_draft(kind, name)
    reports, before = _last_drafts.get(kind, (-1, path))
    if reports == count_reports() and not reads_lines():
        before.unlink(missing_ok=True)  # No loss was reported for the earlier draft.
    _last_drafts[kind] = count_reports(), path
