"""The weights and the state that an objective function offers, and the checkpoints it may read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpo.process.messages import ReportAnswer
from hpo.text_format import format_error
from hpo.trainer.state_files import (
    Checkpoint,
    OfferedWeights,
    StateParts,
    check_weights,
    gather_parts,
    is_state_function,
    split_state,
    write_state,
    write_weights,
)


@dataclass
class Copies:
    """Copies of weights and of a checkpoint, each in a file in memory without a name."""

    kinds: list[str] = field(default_factory=list)
    """"weights", "checkpoint", both or none."""
    descriptors: list[int] = field(default_factory=list)
    """Descriptors of their files, in the same order."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why a copy has failed, by its kind."""

    def add(self, kind: str, write: Callable[[Path], None]) -> None:
        """Let `write` write a file, and add it, or the error."""
        try:
            self.descriptors.append(os.memfd_create(f"hpo-{kind}"))
        # The objective may have used up the file descriptors of this process.
        except OSError as error:
            self.errors[kind] = format_error(error)
            return
        try:
            write(Path(f"/proc/self/fd/{self.descriptors[-1]}"))
            self.kinds.append(kind)
        # Some kinds of tensors raise, a device may fail, and memory may be full.
        except Exception as error:
            os.close(self.descriptors.pop())
            self.errors[kind] = format_error(error)

    def close(self) -> None:
        """Close the files in this process."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass
class Offers:
    """Holds the weights and states that an objective offers, until its next loss is answered.

    Only the trainer of the leader copies them. The other trainers help to gather tensors.
    """

    _is_leader: bool = True
    checkpoint: Checkpoint | None = None
    """The checkpoint that the evaluation may resume from; None for a first start."""
    parent_checkpoint: Checkpoint | None = None
    """The checkpoint of the parent; None without a parent."""
    has_loss: bool = False
    """Whether the objective has reported a loss, in this process or before the checkpoint that it
    has read."""
    _has_resumed: bool = False
    _has_loaded_parent: bool = False
    _offered_weights: OfferedWeights | None = None
    _saved_state: StateParts | Callable[[], Any] | None = None

    # For the objective

    def offer_weights(self, weights: OfferedWeights) -> None:
        """Keep a reference to the weights of the next loss, or to a function that returns them."""
        self._offered_weights = weights

    def save_checkpoint(self, state: Any) -> None:
        """Keep a reference to the state of the next loss, or to a function that returns it."""
        self._saved_state = state if is_state_function(state) else split_state(state)

    def load_checkpoint(self) -> Any:
        """Return the state in the checkpoint; None without a checkpoint.

        Raises RuntimeError if the objective has reported a loss in this process.
        """
        if self.has_loss and (self.checkpoint is None or not self._has_resumed):
            raise RuntimeError("worker.checkpoint must be read before the first loss")
        if self.checkpoint is None:
            return None
        self._has_resumed = True
        state = self.checkpoint.load_state()
        # Only now, since an objective may catch an error of a damaged state, and start again.
        self.has_loss |= bool(self.checkpoint.metadata.losses)
        return state

    def load_parent_checkpoint(self) -> Any:
        """Return the state in the latest checkpoint of the parent; None without a parent.

        Raises RuntimeError if the objective has reported a loss.
        """
        if self.has_loss:
            raise RuntimeError("worker.parent_checkpoint must be read before the first loss")
        if self.parent_checkpoint is None:
            return None
        self._has_loaded_parent = True
        return self.parent_checkpoint.load_state()

    # For a report

    @property
    def offers_weights(self) -> bool:
        """Whether the objective has offered weights with the next loss."""
        return self._offered_weights is not None

    @property
    def gathers_weights(self) -> bool:
        """Whether all ranks must work together to gather these weights."""
        return callable(self._offered_weights)

    @property
    def has_saved(self) -> bool:
        """Whether the objective has saved a checkpoint with the next loss."""
        return self._saved_state is not None

    @property
    def gathers_checkpoint(self) -> bool:
        """Whether all ranks must work together to gather this checkpoint."""
        saved = self._saved_state
        return saved is not None and (not isinstance(saved, StateParts) or saved.is_sharded)

    @property
    def reads(self) -> dict[str, Any]:
        """Which checkpoints the objective has read."""
        return {"has_resumed": self._has_resumed, "has_read_parent": self._has_loaded_parent}

    def gather(self, call: Callable[[Callable[[], Any]], Any], answer: ReportAnswer) -> None:
        """Gather the weights and the state that `answer` requests. Collective: call on all ranks.

        `call` calls a function that the objective has passed to `offer_weights` or
        `save_checkpoint`.
        """
        if answer.keeps_weights and callable(self._offered_weights):
            weights = call(self._offered_weights)
            self._offered_weights = check_weights(weights) if self._is_leader else None
        if answer.saves_checkpoint and self.gathers_checkpoint:
            saved = self._saved_state
            assert saved is not None
            parts = saved if isinstance(saved, StateParts) else split_state(call(saved))
            self._saved_state = gather_parts(parts, is_kept=self._is_leader)

    def forget_read_checkpoints(self) -> None:
        """Drop the checkpoints after the first loss: their files may be replaced from now on."""
        self.checkpoint = self.parent_checkpoint = None

    def copy(self, answer: ReportAnswer) -> Copies:
        """Copy the gathered weights and the state that `answer` requests, on the leader."""
        copies = Copies()
        weights = self._offered_weights
        state = self._saved_state
        if answer.keeps_weights:
            assert isinstance(weights, Mapping)
            copies.add("weights", lambda path: write_weights(path, weights))
        if answer.saves_checkpoint:
            assert isinstance(state, StateParts)
            copies.add("checkpoint", lambda path: write_state(path, gather_parts(state)))
        return copies

    def clear(self) -> None:
        """Drop the offered weights and states, so that the memory of the network can be freed."""
        self._offered_weights = self._saved_state = None
