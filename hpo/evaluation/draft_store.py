"""Drafts: temporary files with a checkpoint, or with the weights of a loss, that trainers write.

A training program writes its drafts next to the checkpoints. The trainer of an objective writes
them to memory. The leader keeps the drafts that the evaluation needs, makes checkpoint and weights
files from them, and removes the others.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpo.store.checkpoints import STATE_PREFIX, WEIGHTS_PREFIX, CheckpointInfo, check_space
from hpo.store.tensors import TensorSource, copy_tensors, read_header
from hpo.text_format import format_error


@dataclass(eq=False)
class Draft:
    """A temporary file with tensors."""

    path: Path
    prefix: str = ""
    """Beginning of the names of its tensors."""
    descriptor: int = -1
    """File descriptor of a file without a name, which this process owns; -1 if it has a name."""

    @classmethod
    def from_descriptor(cls, descriptor: int, prefix: str = "") -> Draft:
        """Return the draft in an open file, and take ownership of its file descriptor."""
        return cls(Path(f"/proc/self/fd/{descriptor}"), prefix, descriptor)

    def remove(self) -> None:
        """Remove the file, or close it if it has no name."""
        with suppress(OSError):
            if self.descriptor >= 0:
                os.close(self.descriptor)
            else:
                self.path.unlink(missing_ok=True)


def reset_drafts(prefix: Path, state: Path | None) -> Path | None:
    """Remove the drafts of an earlier attempt, and return the checkpoint file for the next attempt.

    The returned path is a new hard link, because a later checkpoint of the next attempt may replace
    `state`, from which the evaluation resumes. It is `state` itself on a file system without hard
    links. `prefix` begins the path of each draft.
    """
    _remove_named_drafts(prefix)
    if state is None:
        return None
    kept = _make_path(prefix, "continued")
    try:
        os.link(state, kept)
    except OSError:  # a file system without hard links
        return state
    return kept


class DraftStore:
    """Keeps the drafts of one attempt at an evaluation.

    `prefix` begins the path of each draft of a program; None for a function.
    """

    def __init__(self, prefix: Path | None, params: Mapping[str, Any]) -> None:
        self._prefix = prefix
        self._params = dict(params)
        self._numbers = itertools.count()
        self._checkpoint: Draft | None = None
        self._checkpoint_info: Mapping[str, Any] = {}
        self._weights: Draft | None = None
        self._saved_weights: Draft | None = None  # those of the lowest loss before the checkpoint

    @property
    def has_weights(self) -> bool:
        """Whether there are weights of the lowest loss."""
        return self._weights is not None

    def restore_weights(self, path: Path) -> None:
        """Take the weights of the lowest loss from a checkpoint file, if it can be opened.

        The file stays open, since a later checkpoint may replace it.
        """
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._weights = Draft.from_descriptor(descriptor, WEIGHTS_PREFIX)

    def take_named(self, name: str) -> Draft | None:
        """Take a draft from the program that wrote it, by renaming it; None if there is none."""
        if self._prefix is None:
            return None
        kept = _make_path(self._prefix, f"kept-{next(self._numbers)}")
        try:
            _make_path(self._prefix, name).replace(kept)
        except OSError:
            return None
        return Draft(kept)

    def keep_checkpoint(self, draft: Draft, info: Mapping[str, Any]) -> None:
        """Keep a checkpoint, with the weights of the lowest loss, and remove the previous one.

        `info` has the losses, metrics and seconds of the evaluation until the checkpoint.
        """
        previous = [self._checkpoint, self._saved_weights]
        self._checkpoint = draft
        self._checkpoint_info = info
        self._saved_weights = self._weights
        self._remove_unused(previous)

    def keep_weights(self, draft: Draft) -> None:
        """Keep the weights of the lowest loss."""
        self.drop_weights()
        self._weights = draft

    def drop_weights(self) -> None:
        """Remove weights that no longer have the lowest loss, unless the checkpoint has them."""
        previous = self._weights
        self._weights = None
        self._remove_unused([previous])

    def make_checkpoint_file(self, path: Path) -> int:
        """Write the latest checkpoint to the file `path`, and return its number of losses.

        Raises:
            OSError: The file cannot be written.
            ValueError: The draft is damaged.
        """
        assert self._checkpoint is not None
        sources = [TensorSource(self._checkpoint.path, STATE_PREFIX, STATE_PREFIX)]
        weights = self._saved_weights
        if weights is not None:
            sources.append(TensorSource(weights.path, weights.prefix, WEIGHTS_PREFIX))
        info = CheckpointInfo(
            self._params,
            **self._checkpoint_info,
            tree=_read_tree(self._checkpoint.path),
            has_weights=weights is not None,
        )
        _write_tensors(path, sources, {"about": json.dumps(asdict(info))}, checked="about")
        return len(info.losses)

    def make_weights_file(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the weights of the lowest loss, with `metadata`, to `path`.

        Raises:
            OSError: The file cannot be written.
            ValueError: The draft is damaged.
        """
        assert self._weights is not None
        _write_tensors(path, [TensorSource(self._weights.path, self._weights.prefix)], metadata)

    def close(self) -> None:
        """Remove all drafts."""
        previous = [self._checkpoint, self._weights, self._saved_weights]
        self._checkpoint = None
        self._weights = None
        self._saved_weights = None
        self._remove_unused(previous)
        if self._prefix is not None:
            _remove_named_drafts(self._prefix)

    def _remove_unused(self, drafts: Iterable[Draft | None]) -> None:
        used = (self._checkpoint, self._weights, self._saved_weights)
        for draft in {draft for draft in drafts if draft is not None and draft not in used}:
            draft.remove()


def _make_path(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}-{name}.safetensors")


def _remove_named_drafts(prefix: Path) -> None:
    """Remove all drafts that a program has written, and the link to its checkpoint."""
    for path in prefix.parent.glob(f"{prefix.name}-*.safetensors"):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _read_tree(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(read_header(file)[0]["__metadata__"]["tree"])
    except (LookupError, TypeError, RecursionError) as error:  # A script has changed its draft.
        raise ValueError(f"the draft is damaged: {format_error(error)}") from error


def _write_tensors(
    path: Path, sources: list[TensorSource], texts: Mapping[str, str], checked: str = ""
) -> None:
    check_space(path, sum(source.path.stat().st_size for source in sources))
    try:
        copy_tensors(path, sources, texts, checked)
    except (LookupError, TypeError) as error:  # A script has changed its draft.
        raise ValueError(f"the draft is damaged: {format_error(error)}") from error
