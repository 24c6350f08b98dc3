"""Drafts: temporary files with a checkpoint, or with the weights of a loss, that a training program writes.

The leader keeps the drafts that the evaluation needs, and removes the others.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpo.process import clock
from hpo.store.checkpoints import STATE_PREFIX, WEIGHTS_PREFIX, CheckpointInfo, check_space
from hpo.store.tensors import TensorSource, copy_tensors, read_header
from hpo.text_format import format_error


def reset_drafts(prefix: Path, state: Path | None) -> Path | None:
    """Remove the drafts (temporary files) of an earlier attempt, and return the checkpoint file for the next attempt.

    The returned path is a new hard link, because a later checkpoint of the next attempt may replace `state`.

    Args:
        prefix: First part of the path of each draft, to which a name is appended.
        state: Checkpoint file from which the evaluation resumes. None if it does not resume.

    Returns:
        The link; `state` itself if the file system has no hard links; None if `state` is None.
    """
    _remove_drafts(prefix)
    if state is None:
        return None
    kept = _make_path(prefix, "continued")
    try:
        os.link(state, kept)
    except OSError:  # a file system without hard links
        return state
    return kept


class DraftStore:
    """Keeps the drafts (temporary files) of one evaluation, and makes checkpoint and weights files from them.

    A draft that is kept is renamed, so that the program does not remove it.

    Args:
        prefix: First part of the path of each draft, to which a name is appended.
        params: Hyperparameters of the evaluation.
    """

    def __init__(self, prefix: Path, params: Mapping[str, Any]) -> None:
        self._prefix = prefix
        self._params = dict(params)
        self._numbers = itertools.count()
        self._checkpoint: Path | None = None
        self._checkpoint_info: Mapping[str, Any] = {}
        self._weights: TensorSource | None = None
        self._saved_weights: TensorSource | None = None  # those of the lowest loss before the checkpoint

    def restore_weights(self, path: Path) -> None:
        """Take the weights of the lowest loss from `path`, the checkpoint file from which the evaluation resumes."""
        self._weights = TensorSource(path, prefix=WEIGHTS_PREFIX)

    def keep_checkpoint(self, name: str, info: Mapping[str, Any], has_weights: bool) -> bool:
        """Keep a checkpoint draft, and remove the previous one.

        Args:
            info: Losses, metrics and seconds of the evaluation until the checkpoint.
            has_weights: Whether the weights of the lowest of these losses were kept. The checkpoint then includes them.

        Returns:
            Whether the draft exists.
        """
        kept = self._keep_draft(name)
        if kept is not None:
            self._delete_file(self._checkpoint)
            self._checkpoint, self._checkpoint_info = kept, info
            previous, self._saved_weights = self._saved_weights, self._weights if has_weights else None
            self._drop_unused(previous)
        return kept is not None

    def keep_weights(self, name: str) -> bool:
        """Keep a weights draft, and return whether it exists.

        The previous weights draft is removed, unless the latest checkpoint includes its weights.
        """
        kept = self._keep_draft(name)
        previous, self._weights = self._weights, TensorSource(kept) if kept is not None else None
        self._drop_unused(previous)
        return kept is not None

    def drop_draft(self, name: str) -> None:
        """Remove the draft with this name, if the name is not empty."""
        self._delete_file(_make_path(self._prefix, name) if name else None)

    def write_checkpoint(self, path: str) -> dict[str, Any]:
        """Write the latest checkpoint of the evaluation to the file `path`.

        Returns:
            A mapping with `losses`, the number of losses in the checkpoint, and `seconds`, the time to write it. If the
            write has failed, `losses` is 0, and `error` is the message.
        """
        began, losses = clock.now(), self._checkpoint_info.get("losses", [])
        if self._checkpoint is None:
            return {"losses": 0, "seconds": 0.0}
        try:
            sources = [TensorSource(self._checkpoint, STATE_PREFIX, STATE_PREFIX)]
            if (weights := self._saved_weights) is not None:
                sources.append(TensorSource(weights.path, weights.prefix, WEIGHTS_PREFIX))
            info = CheckpointInfo(
                self._params, **self._checkpoint_info, tree=_read_tree(self._checkpoint), has_weights=len(sources) > 1
            )
            _write_tensors(Path(path), sources, {"about": json.dumps(asdict(info))}, checked="about")
        except (OSError, ValueError, KeyError) as error:
            return {"error": format_error(error), "losses": 0, "seconds": clock.now() - began}
        return {"losses": len(losses), "seconds": clock.now() - began}

    def write_weights(self, path: str, metadata: Mapping[str, str]) -> str:
        """Write the weights of the lowest loss, with `metadata`, to `path`.

        Return an error message, or an empty string.
        """
        if self._weights is None:
            return "the script has removed the draft of the weights"
        try:
            _write_tensors(Path(path), [self._weights], metadata)
        except (OSError, ValueError) as error:
            return format_error(error)
        return ""

    def close(self) -> None:
        """Remove all drafts of the evaluation."""
        _remove_drafts(self._prefix)

    def _keep_draft(self, name: str) -> Path | None:
        kept = _make_path(self._prefix, f"kept-{next(self._numbers)}")
        try:
            _make_path(self._prefix, name).replace(kept)
        except OSError:
            return None
        return kept

    def _drop_unused(self, source: TensorSource | None) -> None:
        if source is not None and source not in (self._weights, self._saved_weights):
            self._delete_file(source.path)

    def _delete_file(self, path: Path | None) -> None:
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _make_path(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}-{name}.safetensors")


def _remove_drafts(prefix: Path) -> None:
    for path in prefix.parent.glob(f"{prefix.name}-*.safetensors"):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read_tree(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(read_header(file)[0]["__metadata__"]["tree"])


def _write_tensors(path: Path, sources: list[TensorSource], texts: Mapping[str, str], checked: str = "") -> None:
    check_space(path, sum(source.path.stat().st_size for source in sources))
    copy_tensors(path, sources, texts, checked)
