"""Keep copies of an evaluation in the memory of its trainer: the weights of its lowest loss, and its latest checkpoint.

The trainer is the process that runs the objective for one rank. The supervisor (MPI process of that rank) requests the
copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.process.channel import Message
from hpo.store.checkpoints import CheckpointInfo
from hpo.text_format import format_error
from hpo.trainer.checkpoint_file import Checkpoint, read_checkpoint_file, write_checkpoint_file
from hpo.trainer.state_tree import StateParts, copy_parts, is_state_function, join_state, split_state
from hpo.trainer.tensor_writer import write_tensors
from hpo.trainer.worker import OfferedWeights, check_weights

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.trainer.objective_call import ObjectiveCall
    from hpo.trainer.report_exchange import ReportAnswer


class SnapshotBuffer:
    """Copies the weights and states that an objective offers, if the supervisor requests it.

    Only the trainer of the leader keeps copies. The other trainers help to gather tensors.

    Args:
        params: The hyperparameters, which are written into checkpoints.
        is_leader: Whether this is the trainer of the leader.
        restored: The checkpoint that the evaluation may resume from; None for a first start.
        inherited: The checkpoint of the parent (individual that this one was bred from); None without a parent.
    """

    def __init__(
        self, params: Mapping[str, Any], is_leader: bool, restored: Checkpoint | None, inherited: Checkpoint | None
    ) -> None:
        self._params = dict(params)
        self._is_leader = is_leader
        self._checkpoint = restored
        self._parent_checkpoint = inherited
        self._has_resumed = self._has_loaded_parent = False
        self._offered_weights: OfferedWeights | None = None
        self._saved_state: StateParts | Callable[[], Any] | None = None
        self._gathered_state: StateParts | None = None
        self._best_weights: dict[str, Tensor] | None = None
        self._copied_checkpoint: Checkpoint | None = None

    # For the objective

    def offer_weights(self, weights: OfferedWeights) -> None:
        """Keep a reference to the weights that belong to the next loss, or to a function that returns them."""
        self._offered_weights = weights

    def save_checkpoint(self, state: Any) -> None:
        """Keep a reference to the state that belongs to the next loss, or to a function that returns it."""
        self._saved_state = state if is_state_function(state) else split_state(state)

    def load_checkpoint(self, has_loss: bool) -> tuple[Any, int]:
        """Return the state in the checkpoint and the number of losses before it; (None, 0) without a checkpoint.

        `has_loss` is whether the evaluation has already reported a loss, in this process or before the checkpoint.
        Raises RuntimeError if the objective has reported a loss in this process.
        """
        if has_loss and (self._checkpoint is None or not self._has_resumed):
            raise RuntimeError("worker.checkpoint must be read before the first loss")
        if self._checkpoint is None:
            return None, 0
        if not self._has_resumed:
            self._has_resumed = True
            self._best_weights = dict(self._checkpoint.weights) if self._checkpoint.weights else None
        metadata = self._checkpoint.metadata
        return join_state(metadata.tree, self._checkpoint.tensors), len(metadata.losses)

    def load_parent_checkpoint(self, has_loss: bool) -> Any:
        """Return the state in the latest checkpoint of the parent; None without a parent.

        `has_loss` is whether the objective has already reported a loss. Raises RuntimeError if it has.
        """
        if has_loss:
            raise RuntimeError("worker.parent_checkpoint must be read before the first loss")
        if self._parent_checkpoint is None:
            return None
        self._has_loaded_parent = True
        return join_state(self._parent_checkpoint.metadata.tree, self._parent_checkpoint.tensors)

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

    def gather_offers(self, objective: ObjectiveCall, answer: ReportAnswer) -> None:
        """Gather the weights and the state that `answer` requests. Collective: call on all ranks.

        The function that the objective has passed to `offer_weights` or `save_checkpoint` is called, and a sharded
        state is gathered. Afterwards, `copy_requested` keeps both in the memory of the leader.
        """
        if answer.keeps_weights and callable(self._offered_weights):
            weights = objective.call_gather_function(self._offered_weights)
            self._offered_weights = check_weights(weights) if self._is_leader else None
        if answer.saves_checkpoint and self.gathers_checkpoint:
            saved = self._saved_state
            assert saved is not None
            parts = saved if isinstance(saved, StateParts) else split_state(objective.call_gather_function(saved))
            self._gathered_state = copy_parts(parts, is_kept=self._is_leader)

    def forget_read_checkpoints(self) -> None:
        """Drop the checkpoints that could be read before the first loss: their files may be replaced from now on."""
        self._checkpoint = self._parent_checkpoint = None

    def copy_requested(self, answer: Message) -> dict[str, Any] | None:
        """Copy the weights and the state that the supervisor's answer to a loss requests, on the leader.

        Return a dict with the booleans "has_weights" and "has_state", and a list of "warnings". Return None without a
        request.
        """
        if answer["is_best"]:
            self._best_weights = None
        if not (answer["keep"] or answer["save"]):
            return None
        found: dict[str, Any] = {"warnings": [], "has_weights": False, "has_state": False}
        if answer["keep"]:
            found["warnings"] += self._copy_weights()
            found["has_weights"] = self._best_weights is not None
        if answer["save"]:
            found |= self._copy_checkpoint(answer["about"])
            if answer["draft"] and found["has_state"]:
                found["written"] = self.write_checkpoint(answer["draft"])
        return found

    def clear_offers(self) -> None:
        """Drop the references to offered weights and states, so that the memory of the network can be freed."""
        self._offered_weights = self._saved_state = self._gathered_state = None

    def _copy_weights(self) -> list[str]:
        assert isinstance(self._offered_weights, Mapping)
        try:
            self._best_weights = {
                name: tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in self._offered_weights.items()
            }
        except Exception as error:  # Some kinds of tensors raise, and memory may be full.
            return [f"the weights of the best so far cannot be kept: {format_error(error)}"]
        return []

    def _copy_checkpoint(self, about: Mapping[str, Any]) -> dict[str, Any]:
        saved = self._saved_state
        try:
            parts = (
                copy_parts(saved)
                if self._gathered_state is None and isinstance(saved, StateParts)
                else self._gathered_state
            )
        except Exception as error:  # A device may fail, and memory may be full.
            return {"state_error": format_error(error)}
        assert parts is not None
        known = CheckpointInfo(self._params, about["losses"], about["metrics"], about["seconds"], parts.tree)
        self._copied_checkpoint = Checkpoint(known, parts.leaves, self._best_weights)
        return {"has_state": True}

    # For the supervisor, also after the evaluation

    def write_checkpoint(self, path: str) -> dict[str, Any]:
        """Write the latest copied checkpoint to a file.

        Returns ``{"losses": count, "seconds": duration}``. If writing fails, "error" has the reason. The
        count is the number of losses in the checkpoint, or 0 if no file was written.
        """
        began = time.monotonic()
        if self._copied_checkpoint is None:
            return {"losses": 0, "seconds": 0.0}
        try:
            write_checkpoint_file(Path(path), self._copied_checkpoint)
        except Exception as error:  # A failure to write must not end the search.
            return {"error": format_error(error), "losses": 0, "seconds": time.monotonic() - began}
        return {"losses": len(self._copied_checkpoint.metadata.losses), "seconds": time.monotonic() - began}

    def write_weights(self, path: str, about: Mapping[str, str]) -> dict[str, Any]:
        """Write the weights of the lowest loss to a file with the metadata `about`.

        Returns ``{"error": text}``. The text is empty if the file was written.
        """
        try:
            assert self._best_weights is not None
            write_tensors(Path(path), self._best_weights, about)
        except Exception as error:  # A failure to write must not fail the evaluation.
            return {"error": format_error(error)}
        return {"error": ""}


def read_optional_checkpoint(path: str | None) -> Checkpoint | None:
    """Return the checkpoint in a file; None without a path."""
    return read_checkpoint_file(Path(path)) if path else None
