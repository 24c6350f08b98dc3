"""What an objective saves: nested dicts and lists, as a tree of plain values and its tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_DEEPEST = 100  # levels of a state
_PLAIN = (str, int, float, type(None))  # and bool, which is an int

# Returns what stands in the tree for a tensor or an array.
_Leaf = Callable[[Any], Any]


def is_function(state: Any) -> bool:
    """Tell whether what was saved is a function that returns a state."""
    return callable(state) and not isinstance(state, (Mapping, torch.nn.Module))


def is_gathered(state: Any) -> bool:
    """Tell whether all ranks have to gather a state together: a function does so, or tensors in it are sharded.

    Raises TypeError where it holds what cannot be saved, naming the place.
    """
    if is_function(state):
        return True
    sharded = False

    def leaf(value: Any) -> None:
        nonlocal sharded
        sharded |= hasattr(value, "full_tensor")  # a DTensor, without importing what defines it

    _tree_of(state, leaf)
    return sharded


@dataclass(frozen=True)
class Copied:
    """A copy of a state: a tree that JSON can hold, and tensors on the CPU by their names in it."""

    tree: Any
    tensors: dict[str, torch.Tensor]


def copy_of(state: Any, is_kept: bool = True) -> Copied:
    """Return a copy of a state, or of what a function returns.

    Sharded tensors are gathered, by all ranks together; nothing is copied where it is not to be kept.
    """
    if is_function(state):
        state = state()
    tensors: dict[str, torch.Tensor] = {}
    met: dict[int, str] = {}  # a tensor may stand in several places

    def leaf(value: Any) -> Any:
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        if not is_kept:
            return None
        name = met.setdefault(id(value), str(len(tensors)))
        if isinstance(value, np.ndarray):
            raw = np.frombuffer(value.tobytes(), np.uint8)
            tensors[name] = torch.from_numpy(raw.copy())
            return {"array": [name, value.dtype.str, list(value.shape)]}
        if name not in tensors:
            whole = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
            tensors[name] = whole.to("cpu", copy=True).contiguous()
            held.append(value)
        return {"complex" if value.is_complex() else "tensor": name}

    held: list[Any] = []  # so that no other tensor gets its id
    return Copied(_tree_of(state, leaf), tensors)


def put_together(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that was taken apart; raises ValueError where these are no parts of one."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "dict":
        return {key: put_together(one, tensors) for key, one in value}
    if kind in ("list", "tuple"):
        several = [put_together(one, tensors) for one in value]
        return several if kind == "list" else tuple(several)
    if kind == "array":
        name, dtype, shape = value
        return np.frombuffer(tensors[name].numpy().tobytes(), dtype).reshape(shape).copy()
    if kind == "complex":
        return torch.view_as_complex(tensors[value].clone())
    if kind == "tensor":
        return tensors[value].clone()  # of a file that may be replaced
    raise ValueError(f"there is no {kind!r} in a state")


def _tree_of(state: Any, leaf: _Leaf, *place: Any) -> Any:
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, _PLAIN):
        return state
    if isinstance(state, torch.Tensor) and state.layout == torch.strided and not state.is_meta:
        return leaf(state)
    if isinstance(state, np.ndarray) and not state.dtype.hasobject:
        return leaf(state)
    if len(place) > _DEEPEST:
        raise TypeError(f"worker.save takes no state that contains itself: {_shown(place[:5])}...")
    if isinstance(state, Mapping):
        if wrong := [key for key in state if not isinstance(key, (str, int))]:
            where = _shown(place) or "its top"
            raise TypeError(f"worker.save takes dicts with names or integers as keys, not {wrong[0]!r}, at {where}")
        return {"dict": [[key, _tree_of(one, leaf, *place, key)] for key, one in state.items()]}
    if isinstance(state, (list, tuple)):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_tree_of(one, leaf, *place, number) for number, one in enumerate(state)]}
    raise TypeError(
        "worker.save takes dicts and lists of tensors, numbers, texts, booleans and None, as state_dict() returns, "
        f"not {_what(state)}{f' at {_shown(place)}' if place else ''}"
    )


def _shown(place: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in place)


def _what(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a {kind} that is {'on no device' if value.is_meta else 'sparse'}"
    return f"the {kind} itself: save its state_dict()" if hasattr(value, "state_dict") else f"a {kind}"
