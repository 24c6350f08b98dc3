"""Files with the state that an objective saves, or with its weights.

A state is split into a tree of plain values, which is JSON, and tensors. Both are in one
safetensors file, so that ranks can read it without torch and nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hpo.store.checkpoints import STATE_PREFIX, CheckpointInfo, parse_checkpoint_info
from hpo.store.tensors import TensorBytes, read_header, write_file
from hpo.text_format import format_error

# Weights, or a function that gathers them.
OfferedWeights = Union[Mapping[str, Tensor], Callable[[], Mapping[str, Tensor]]]

_SHARDED_ERROR = (
    "offered weights must be whole tensors, and {name!r} is sharded: offer, on all ranks, "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) "
    "of torch.distributed.checkpoint.state_dict"
)

_MAX_DEPTH = 100  # The most nested levels of a state.
_PLAIN_TYPES = (str, int, float, type(None))  # bool is a subclass of int.
# Kinds of mappings, and the functions that a defaultdict may call for a missing key.
_MAPPINGS = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
_FACTORIES = {
    kind.__name__: kind for kind in (int, float, bool, str, list, tuple, *_MAPPINGS.values())
}
# Kinds of sequences. The tree names a namedtuple by its module and class instead.
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, torch.Size)
}


@dataclass(frozen=True)
class StateParts:
    """A state in two parts: a tree as JSON data, and the tensors and arrays that it names."""

    tree: Any
    leaves: dict[str, Any]

    @property
    def is_sharded(self) -> bool:
        """Whether some of the tensors are sharded."""
        return any(map(_is_sharded, self.leaves.values()))


@dataclass(frozen=True)
class Checkpoint:
    """The state that an objective has saved, and the progress of its evaluation."""

    metadata: CheckpointInfo
    """The hyperparameters, the losses so far, and the tree of the state."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The tensors of the state. The keys are their names in the tree."""

    def load_state(self) -> Any:
        """Return a new copy of the state. Raises ValueError if its tree is invalid."""
        return join_state(self.metadata.tree, self.tensors)


def is_state_function(state: Any) -> bool:
    """Return whether a saved object is a function that returns a state, and not a state."""
    return callable(state) and not isinstance(state, (Mapping, torch.nn.Module))


def _is_sharded(value: Any) -> bool:
    # This identifies a DTensor without an import of torch.distributed.tensor.
    return hasattr(value, "full_tensor")


def split_state(state: Any) -> StateParts:
    """Split a state into a tree and its tensors, which are not copied.

    Raises TypeError, which names the position, if the state has a value that cannot be saved.
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
    gathered: dict[str, Tensor] = {}
    for name, value in parts.leaves.items():
        whole = value.full_tensor() if _is_sharded(value) else value
        if not is_kept:
            continue
        if isinstance(whole, np.ndarray):
            gathered[name] = torch.from_numpy(np.frombuffer(whole.tobytes(), np.uint8).copy())
            continue
        plain = whole.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        gathered[name] = plain.to("cpu").contiguous()
    return StateParts(parts.tree, gathered)


def _make_tree(state: Any, leaf: Callable[[Any], Any], *place: Any) -> Any:
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, _PLAIN_TYPES):
        return state
    if _is_leaf(state):
        return leaf(state)
    if len(place) > _MAX_DEPTH:
        raise TypeError(f"a saved state must not contain itself: {_format_path(place[:5])}...")
    if isinstance(state, Mapping):
        return _make_mapping_tree(state, leaf, *place)
    if isinstance(state, (list, tuple)):
        items = [_make_tree(value, leaf, *place, index) for index, value in enumerate(state)]
        if isinstance(state, tuple) and hasattr(state, "_fields"):
            cls = type(state)
            fields = list(state._fields)
            return {"namedtuple": [cls.__module__, cls.__qualname__, fields, {"list": items}]}
        return {_find_kind(state, _SEQUENCES, "list"): items}
    raise TypeError(
        "a saved state must be dicts and lists of tensors, numbers, texts, booleans and None, "
        f"as state_dict() returns, got {_describe_value(state)}{_format_position(place)}"
    )


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not (value.is_meta or value.is_quantized)
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def _make_mapping_tree(state: Mapping[Any, Any], leaf: Callable[[Any], Any], *place: Any) -> Any:
    if wrong := [key for key in state if not isinstance(key, (str, int))]:
        raise TypeError(
            "dicts of a saved state must have texts or integers as keys, "
            f"got {wrong[0]!r} at {_format_path(place) or 'its top'}"
        )
    pairs = [[key, _make_tree(value, leaf, *place, key)] for key, value in state.items()]
    if isinstance(state, defaultdict):
        return {"defaultdict": [_name_factory(state, place), {"dict": pairs}]}
    return {_find_kind(state, _MAPPINGS, "dict"): pairs}


def _find_kind(value: Any, kinds: dict[str, Any], default: str) -> str:
    """Return the name of the last of these classes that `value` is an instance of."""
    names = (name for name, kind in reversed(kinds.items()) if isinstance(value, kind))
    return next(names, default)


def _name_factory(state: defaultdict[Any, Any], place: Sequence[Any]) -> str | None:
    factory = state.default_factory
    if factory is None or factory in _FACTORIES.values():
        return factory and factory.__name__
    raise TypeError(
        f"a defaultdict of a saved state must have one of {', '.join(_FACTORIES)} as factory, "
        f"got {factory!r}{_format_position(place)}. Save dict(...) of it"
    )


def _format_path(place: Sequence[Any]) -> str:
    return "".join(f"[{key!r}]" for key in place)


def _format_position(place: Sequence[Any]) -> str:
    return f" at {_format_path(place)}" if place else ""


def _describe_value(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.is_meta:
            return f"a {kind} that is on no device"
        return f"a {kind} that is {'quantized' if value.is_quantized else 'sparse'}"
    if hasattr(value, "state_dict"):
        return f"the {kind} itself: save its state_dict()"
    return f"a {kind}"


def join_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Make a state from its tree and its tensors. Raises ValueError if the tree is invalid."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({key: join_state(item, tensors) for key, item in value})
    if kind == "defaultdict":
        factory, content = value
        return defaultdict(_FACTORIES.get(factory), join_state(content, tensors))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](join_state(item, tensors) for item in value)
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


def _find_namedtuple(module: str, name: str, fields: Sequence[str]) -> Any:
    """Return the class of a namedtuple; a new one if this process has not imported it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    if is_tuple and getattr(found, "_fields", None) == tuple(fields):
        return found
    return namedtuple(name.rpartition(".")[2], fields)


def read_checkpoint_file(path: Path) -> Checkpoint:
    """Return the checkpoint in a file. Raises ValueError if the file cannot be read.

    The checksum is not verified here, because the leader has verified it. Tensors are mapped: their
    data are read from disk when they are used.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = [name for name in file.keys() if name.startswith(STATE_PREFIX)]  # noqa: SIM118 - This is not a dict.
            tensors = {name.removeprefix(STATE_PREFIX): file.get_tensor(name) for name in names}
        return Checkpoint(parse_checkpoint_info(json.loads(metadata["about"])), tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error


def write_state(path: Path, parts: StateParts) -> None:
    """Write a gathered state, without flushing it to disk."""
    tensors = {STATE_PREFIX + name: tensor for name, tensor in parts.leaves.items()}
    write_tensors(path, tensors, {"tree": json.dumps(parts.tree)})


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write whole tensors by name, without flushing them to disk."""
    tensors = {}
    for name, tensor in weights.items():
        tensors[name] = tensor.detach().resolve_conj().resolve_neg()
        if tensor.layout == torch.strided:  # `write_tensors` explains why others are not written.
            tensors[name] = tensors[name].to("cpu").contiguous()
    write_tensors(path, tensors, {})


def check_weights(weights: Any) -> Mapping[str, Tensor]:
    """Return the offered weights. Raises TypeError unless they map names to unsharded tensors."""
    if isinstance(weights, torch.nn.Module):
        raise TypeError(
            "offered weights must be a state_dict(), got a network: offer model.state_dict()"
        )
    if not isinstance(weights, Mapping):
        raise TypeError(
            "offered weights must be a dict of tensors by their names, "
            f"got a {type(weights).__name__}"
        )
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                "offered weights must be a dict of tensors by their names, "
                f"got {name!r}: {type(tensor).__name__}"
            )
        if _is_sharded(tensor):
            raise TypeError(_SHARDED_ERROR.format(name=name))
    return weights


def write_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write CPU tensors and texts to a safetensors file, without flushing it to disk.

    safetensors 0.8 would write to a file with a random name first. If the process is killed, this
    file would stay.
    """
    contents = {name: _view_tensor(tensor) for name, tensor in tensors.items()}
    write_file(path, contents, texts, is_flushed=False)


def _view_tensor(tensor: Tensor) -> TensorBytes:
    """Return the bytes of a contiguous CPU tensor, without a copy.

    Raises ValueError or RuntimeError if it cannot be in a file: some subclasses have no memory.
    """
    if tensor.layout != torch.strided:
        raise ValueError("a sparse tensor cannot be saved: convert it with to_dense()")
    dtype, factor = _describe_dtype(tensor.dtype)
    shape = list(tensor.shape)
    if shape:
        shape[-1] *= factor
    address = tensor.data_ptr()
    if not tensor.nbytes:
        return TensorBytes(dtype, shape, 0, list)
    if not address or tensor.device.type != "cpu":
        raise ValueError(f"a {type(tensor).__name__} without memory on the CPU cannot be saved")
    memory = [(ctypes.c_char * tensor.nbytes).from_address(address)]
    return TensorBytes(dtype, shape, tensor.nbytes, lambda: memory)


@cache
def _describe_dtype(dtype: torch.dtype) -> tuple[str, int]:
    """Return the name of a dtype in safetensors files, and how many values an element has.

    An element of a 4-bit type has 2 values. Raises ValueError if files cannot have the dtype.
    """
    try:
        header, _ = read_header(BytesIO(save({"one": torch.empty(1, dtype=dtype, device="cpu")})))
    except KeyError as error:
        raise ValueError(f"a tensor of {dtype} cannot be saved") from error
    return header["one"]["dtype"], header["one"]["shape"][0]
