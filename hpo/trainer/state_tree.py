"""Split the state that an objective saves into a tree of plain values and a dict of tensors, and join both later."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MAX_DEPTH = 100  # The most nested levels of a state.
_PLAIN_TYPES = (str, int, float, type(None))  # bool is a subclass of int.
# Kinds of mappings, and the functions that a defaultdict may call for a missing key.
_MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
_FACTORIES = {
    kind.__name__: kind for kind in (int, float, bool, str, list, tuple, *_MAPPINGS.values())
}
# Kinds of sequences. The tree names a namedtuple by its module and class instead.
_SEQUENCES: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "Size": torch.Size,
}


@dataclass(frozen=True)
class StateParts:
    """A state in two parts: a tree as JSON data, and its tensors and arrays by name. The tree has only their names."""

    tree: Any
    leaves: dict[str, Any]

    @property
    def is_sharded(self) -> bool:
        """Whether some of the tensors are sharded."""
        return any(map(_is_sharded, self.leaves.values()))


def is_state_function(state: Any) -> bool:
    """Return whether a saved object is a function that returns a state, and not a state."""
    return callable(state) and not isinstance(state, (Mapping, torch.nn.Module))


def split_state(state: Any) -> StateParts:
    """Split a state into a tree and its tensors. Raises TypeError if the state has a value that cannot be saved.

    Tensors and arrays are not copied. All other values are copied. The message of the error names
    the position of the value.
    """
    leaves: dict[str, Any] = {}
    names: dict[int, str] = {}  # By id, since a tensor may occur several times.

    def add_leaf(value: Any) -> Any:
        name = names.setdefault(id(value), str(len(leaves)))
        leaves[name] = value
        if isinstance(value, np.ndarray):
            return {"array": [name, value.dtype.str, list(value.shape)]}
        return {"complex" if value.is_complex() else "tensor": name}

    return StateParts(_make_tree(state, add_leaf), leaves)


def gather_parts(parts: StateParts, is_kept: bool = True) -> StateParts:
    """Return the parts with whole tensors on the CPU, and with arrays as tensors of bytes.

    Sharded tensors are gathered, so the call is collective if there are any: call on all ranks. If
    not `is_kept`, this rank only helps to gather them, and returns no tensors.
    """
    gathered: dict[str, torch.Tensor] = {}
    for name, value in parts.leaves.items():
        whole = value.full_tensor() if _is_sharded(value) else value
        if not is_kept:
            continue
        if isinstance(whole, np.ndarray):
            gathered[name] = torch.from_numpy(np.frombuffer(whole.tobytes(), np.uint8).copy())
        else:
            plain = (
                torch.view_as_real(whole.detach().resolve_conj())
                if whole.is_complex()
                else whole.detach()
            )
            gathered[name] = plain.to("cpu").contiguous()
    return StateParts(parts.tree, gathered)


def _is_sharded(value: Any) -> bool:
    # This identifies a DTensor without an import of torch.distributed.tensor.
    return hasattr(value, "full_tensor")


def join_state(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Make a state from its tree and its tensors. Raises ValueError if the tree has a node of an unknown kind."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({key: join_state(one, tensors) for key, one in value})
    if kind == "defaultdict":
        factory, content = value
        return defaultdict(_FACTORIES.get(factory), join_state(content, tensors))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](join_state(one, tensors) for one in value)
    if kind == "namedtuple":
        module, name, fields, content = value
        return _find_namedtuple(module, name, fields)._make(join_state(content, tensors))
    if kind == "array":
        name, dtype, shape = value
        return np.frombuffer(tensors[name].numpy().tobytes(), dtype).reshape(shape).copy()
    if kind == "complex":
        return torch.view_as_complex(tensors[value].clone())
    if kind == "tensor":
        return tensors[value].clone()  # The file that the tensor is mapped from may be replaced.
    raise ValueError(f"there is no {kind!r} in a state")


def _make_tree(state: Any, leaf: Callable[[Any], Any], *place: Any) -> Any:
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, _PLAIN_TYPES):
        return state
    if (
        isinstance(state, torch.Tensor)
        and state.layout == torch.strided
        and not (state.is_meta or state.is_quantized)
    ):
        return leaf(state)
    if isinstance(state, np.ndarray) and not state.dtype.hasobject:
        return leaf(state)
    if len(place) > _MAX_DEPTH:
        raise TypeError(f"a saved state must not contain itself: {_format_path(place[:5])}...")
    if isinstance(state, Mapping):
        return _make_mapping_tree(state, leaf, *place)
    if isinstance(state, (list, tuple)):
        return _make_sequence_tree(state, leaf, *place)
    raise TypeError(
        "a saved state must be dicts and lists of tensors, numbers, texts, booleans and None, as state_dict() returns, "
        f"got {_describe_value(state)}{f' at {_format_path(place)}' if place else ''}"
    )


def _make_mapping_tree(state: Mapping[Any, Any], leaf: Callable[[Any], Any], *place: Any) -> Any:
    if wrong := [key for key in state if not isinstance(key, (str, int))]:
        where = _format_path(place) or "its top"
        raise TypeError(
            f"dicts of a saved state must have texts or integers as keys, got {wrong[0]!r} at {where}"
        )
    pairs = [[key, _make_tree(one, leaf, *place, key)] for key, one in state.items()]
    if isinstance(state, defaultdict):
        return {"defaultdict": [_name_factory(state, place), {"dict": pairs}]}
    return {
        next(
            (name for name in ("Counter", "OrderedDict") if isinstance(state, _MAPPINGS[name])),
            "dict",
        ): pairs
    }


def _make_sequence_tree(state: Sequence[Any], leaf: Callable[[Any], Any], *place: Any) -> Any:
    several = [_make_tree(one, leaf, *place, number) for number, one in enumerate(state)]
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        cls = type(state)
        return {
            "namedtuple": [cls.__module__, cls.__qualname__, list(state._fields), {"list": several}]
        }
    return {
        "list"
        if isinstance(state, list)
        else "Size"
        if isinstance(state, torch.Size)
        else "tuple": several
    }


def _name_factory(state: defaultdict[Any, Any], place: Sequence[Any]) -> str | None:
    factory = state.default_factory
    if factory is None or factory in _FACTORIES.values():
        return factory and factory.__name__
    raise TypeError(
        f"a defaultdict of a saved state must have one of {', '.join(_FACTORIES)} as factory, got {factory!r}"
        f"{f' at {_format_path(place)}' if place else ''}. Save dict(...) of it"
    )


def _find_namedtuple(module: str, name: str, fields: Sequence[str]) -> Any:
    """Return the class of a namedtuple, or a new class with the same fields if this process has not imported it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and getattr(found, "_fields", None) == tuple(fields)
    ):
        return found
    return namedtuple(name.rpartition(".")[2], fields)


def _format_path(place: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in place)


def _describe_value(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        why = "on no device" if value.is_meta else "quantized" if value.is_quantized else "sparse"
        return f"a {kind} that is {why}"
    return (
        f"the {kind} itself: save its state_dict()" if hasattr(value, "state_dict") else f"a {kind}"
    )
