"""What a trainer keeps of an evaluation: the weights of its lowest loss, and what it continues from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.process.channel import Message
from hpo.store.states import About
from hpo.store.tensors import write_tensors
from hpo.text import message
from hpo.trainer.checkpoint import State, read_state, write_state
from hpo.trainer.state import Parts, copied, is_function, parts_of, put_together
from hpo.trainer.worker import Offered, checked_weights

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.trainer.objective import Objective


class Keeper:
    """Keeps what one evaluation offers and saves, as its supervisor wants it; only the leader's trainer copies any.

    `restored` is what this evaluation continues from if the objective asks for it, `inherited` what it begins with.
    """

    def __init__(
        self, params: Mapping[str, Any], is_leader: bool, restored: State | None, inherited: State | None
    ) -> None:
        self._params = dict(params)
        self._is_leader = is_leader
        self._restored = restored
        self._inherited = inherited
        self._has_restored = self._has_inherited = False
        self._offered: Offered | None = None
        self._saving: Parts | Callable[[], Any] | None = None
        self._gathered: Parts | None = None
        self._weights: dict[str, Tensor] | None = None
        self._state: State | None = None

    # For the objective

    def offer(self, weights: Offered) -> None:
        """Remember the weights that the next loss belongs to, or what gathers them."""
        self._offered = weights

    def save(self, state: Any) -> None:
        """Remember what the objective continues from after its next loss."""
        self._saving = state if is_function(state) else parts_of(state)

    def restore(self, has_loss: bool) -> tuple[Any, int]:
        """Return what the interrupted evaluation has saved, and the number of its losses; (None, 0) without one."""
        if has_loss and not self._has_restored:
            raise RuntimeError("worker.checkpoint is asked for before the first loss, to go on from")
        if self._restored is None:
            return None, 0
        if not self._has_restored:
            self._has_restored = True
            self._weights = dict(self._restored.weights) if self._restored.weights else None
        about = self._restored.about
        return put_together(about.tree, self._restored.tensors), len(about.losses)

    def inherit(self, has_loss: bool) -> Any:
        """Return what the parent has saved last; None without one."""
        if has_loss:
            raise RuntimeError("worker.parent_checkpoint is asked for before the first loss, to begin with")
        if self._inherited is None:
            return None
        self._has_inherited = True
        return put_together(self._inherited.about.tree, self._inherited.tensors)

    # For a step

    def flags(self) -> dict[str, Any]:
        """Return what a supervisor needs to know of what is offered and saved."""
        saving = self._saving
        return {
            "offers": self._offered is not None,
            "gathers": callable(self._offered),
            "has_saved": saving is not None,
            "saves": saving is not None and (not isinstance(saving, Parts) or saving.is_sharded),
            "went_on": self._has_restored,
            "inherited": self._has_inherited,
        }

    def gather(self, objective: Objective, verdict: Message) -> None:
        """Call the functions that all ranks have offered, or saved; collective over the worker's ranks."""
        if verdict["keep"] and callable(self._offered):
            weights = objective.gathered(self._offered)
            self._offered = checked_weights(weights) if self._is_leader else None
        flags = self.flags()
        if verdict["save"] and flags["saves"]:
            saving = self._saving
            assert saving is not None
            parts = saving if isinstance(saving, Parts) else parts_of(objective.gathered(saving))
            self._gathered = copied(parts, is_kept=self._is_leader)

    def settle(self, verdict: Message) -> dict[str, Any] | None:
        """Keep what the supervisor wants of a loss, and return what came of it; None if it wants nothing."""
        if verdict["has_loss"]:
            self._restored = self._inherited = None  # their files may be replaced from now on
        if verdict["is_best"]:
            self._weights = None
        if not self._is_leader or not (verdict["keep"] or verdict["save"]):
            return None
        found: dict[str, Any] = {"warnings": [], "has_weights": False, "has_state": False}
        if verdict["keep"]:
            found["warnings"] += self._copy_weights()
            found["has_weights"] = self._weights is not None
        if verdict["save"]:
            found |= self._copy_state(verdict["about"])
            if verdict["draft"] and found["has_state"]:
                found["written"] = self.write_state(verdict["draft"])
        return found

    def let_go(self) -> None:
        """Forget what was offered and saved for a loss: it holds the model."""
        self._offered = self._saving = self._gathered = None

    def _copy_weights(self) -> list[str]:
        assert isinstance(self._offered, Mapping)
        try:
            self._weights = {name: one.detach().cpu().clone().contiguous() for name, one in self._offered.items()}
        except Exception as error:  # any kind of tensor may raise, a sharded one for example, or memory is full
            return [f"the weights of the best so far cannot be kept: {message(error)}"]
        return []

    def _copy_state(self, about: Mapping[str, Any]) -> dict[str, Any]:
        saved = self._saving
        try:
            parts = copied(saved) if self._gathered is None and isinstance(saved, Parts) else self._gathered
        except Exception as error:  # a device may fail, or memory be full
            return {"state_error": message(error)}
        assert parts is not None
        known = About(self._params, about["losses"], about["metrics"], about["seconds"], parts.tree)
        self._state = State(known, parts.leaves, self._weights)
        return {"has_state": True}

    # For the supervisor, also after the evaluation

    def write_state(self, path: str) -> dict[str, Any]:
        """Write the last state that was copied to a path, and return its number of losses, or an error."""
        began = time.monotonic()
        if self._state is None:
            return {"losses": 0, "seconds": 0.0}
        try:
            write_state(Path(path), self._state)
        except Exception as error:  # the search is worth more than this file
            return {"error": message(error), "losses": 0, "seconds": time.monotonic() - began}
        return {"losses": len(self._state.about.losses), "seconds": time.monotonic() - began}

    def write_weights(self, path: str, about: Mapping[str, str]) -> dict[str, Any]:
        """Write the weights of the lowest loss to a path, with texts about them; return an error, or an empty text."""
        try:
            assert self._weights is not None
            write_tensors(Path(path), self._weights, about)
        except Exception as error:  # the evaluation is safe, and worth more than this file
            return {"error": message(error)}
        return {"error": ""}


def read_known(path: str | None) -> State | None:
    """Return the state in a file; None without a path."""
    return read_state(Path(path)) if path else None
