"""The states of evaluations, to go on from after a death: a file for each, whole or not at all, never unpickled."""

from __future__ import annotations

import ctypes
import json
import shutil
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.store.tensors import write_tensors
from hpo.store.values import are, is_mapping, is_number
from hpo.text import message

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.store.trials import Assignment

_STATE, _WEIGHTS = "state/", "weights/"
_TO_SPARE = 64 << 20  # bytes that states leave free, for the record of the run
_LITTLE = 1 << 30  # bytes, where nobody knows yet how large states are


@dataclass(frozen=True)
class About:
    """What is known of an evaluation at the time of its state: its losses so far, and the `metrics` of the lowest.

    `seconds` is how long it has taken. `tree` is what the objective has saved, with names in the place of tensors.
    """

    params: dict[str, Any]
    losses: list[float]
    metrics: dict[str, float]
    seconds: float
    tree: Any = None


@dataclass(frozen=True)
class State:
    """The state of an evaluation: what is known of it, the tensors of its tree, and the weights of its lowest loss.

    The weights are None where another individual is the best of the run.
    """

    about: About
    tensors: Mapping[str, Tensor] = field(repr=False)
    weights: Mapping[str, Tensor] | None = field(default=None, repr=False)


class States:
    """The states of the evaluations of a study, in a folder: of what goes on, waits, is paused, or is inherited.

    The repeats of a trial share its state. The names of the files begin with `prefix`. Nobody else evaluates the same
    individual meanwhile.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix
        self._there: set[Path] = set()  # what this process has found, or written

    def path(self, root: int) -> Path:
        """Return the file of a trial, the first of those that repeat each other."""
        return self._folder / f"{self._prefix}{root}.safetensors"

    def find(self, assignment: Assignment) -> Path | None:
        """Return the file of an evaluation's state; None where there is none."""
        path = self.path(assignment.root)
        if path not in self._there and assignment.number == assignment.root:
            return None  # it is the first of its individual
        if not path.exists():
            return None
        self._there.add(path)
        return path

    def write(self, assignment: Assignment, state: State) -> None:
        """Replace the state of an evaluation; it is durable when this returns.

        Raises OSError where the disk would be full, and whatever writing raises: the one before it is left.
        """
        path = self.path(assignment.root)
        self._folder.mkdir(exist_ok=True)
        tensors = {_STATE + name: tensor for name, tensor in state.tensors.items()}
        tensors |= {_WEIGHTS + name: tensor for name, tensor in (state.weights or {}).items()}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if (free := shutil.disk_usage(self._folder).free) < size + _TO_SPARE:
            raise OSError(f"it takes {size / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free")
        draft = path.with_name(f".{path.name}")
        try:
            text = json.dumps(vars(state.about))
            write_tensors(draft, tensors, {"about": text, "checksum": _checksum(text, tensors)})
            draft.replace(path)
            self._there.add(path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def has(self, assignment: Assignment) -> bool:
        """Tell whether this process has found the state of an evaluation, or written it."""
        return self.path(assignment.root) in self._there

    def discard(self, assignment: Assignment) -> None:
        """Remove the state of an evaluation that has ended, if there is one."""
        path = self.path(assignment.root)
        if path in self._there:
            self._there.discard(path)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def drop(self, root: int) -> None:
        """Remove the state of an evaluation that is not to be gone on from any more."""
        self._there.discard(self.path(root))
        with suppress(OSError):
            self.path(root).unlink(missing_ok=True)

    def sweep(self, roots: Collection[int]) -> None:
        """Remove all but the states of these trials; only while no process writes any."""
        kept = {self.path(root) for root in roots}
        for path in [*self._folder.glob(f"{self._prefix}[0-9]*.safetensors"), *self._folder.glob(".*.safetensors")]:
            if path not in kept:
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove the folder, unless there are states; only while no process writes any."""
        with suppress(OSError):
            self._folder.rmdir()

    def shortage(self, most: int) -> str:
        """Return a text where the disk may be too small for so many states; else an empty one."""
        sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")]
        needed = most * max(sizes) if sizes else _LITTLE
        free = shutil.disk_usage(self._folder.parent).free
        if free >= needed:
            return ""
        room = f"at least {needed / 1e9:.1f} GB are needed" if sizes else "that may be too little"
        return f"{free / 1e9:.1f} GB are free for what evaluations go on from (--save-every): {room}"


def read_state(path: Path, params: Mapping[str, Any] | None = None, is_checked: bool = True) -> State:
    """Return the state in a file, of an evaluation of these hyperparameters, or any; tensors are read when used.

    Raises ValueError, saying why, where it cannot be read, is damaged, or is another evaluation's. Bytes are compared
    with their checksum where `is_checked`, for which all are read.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        about = _about(json.loads(metadata["about"]))
        if is_checked and metadata["checksum"] != _checksum(metadata["about"], tensors):
            raise ValueError("its checksum is wrong")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {message(error)}") from error
    if params is not None and about.params != dict(params):
        raise ValueError(f"{path} is of other hyperparameters")
    weights = {name.removeprefix(_WEIGHTS): t for name, t in tensors.items() if name.startswith(_WEIGHTS)}
    state = {name.removeprefix(_STATE): t for name, t in tensors.items() if name.startswith(_STATE)}
    return State(about, state, weights or None)


def _about(content: dict[str, Any]) -> About:
    about = About(**content)
    fits = is_mapping(about.params) and are(is_number)(about.metrics) and is_number(about.seconds)
    if not fits or not isinstance(about.losses, list) or not all(map(is_number, about.losses)):
        raise ValueError("no evaluation has written it")
    return about


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    checksum = zlib.crc32(text.encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(_bytes(tensor), zlib.crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def _bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor that is contiguous and on the CPU, of any type."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
