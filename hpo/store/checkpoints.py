"""The states of evaluations, to go on from after a death: a file for each, whole or not at all, never unpickled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.store.json_values import is_mapping, is_mapping_of, is_number
from hpo.store.tensors import compute_checksum, locate_tensors, read_header
from hpo.text_format import format_error

if TYPE_CHECKING:
    from hpo.store.evaluations import Assignment

WEIGHTS_PREFIX = "weights/"  # in front of the names of weights
STATE_PREFIX = "state/"  # in front of the names of a state's tensors
_RESERVED_BYTES = 64 << 20  # bytes that states leave free, for the record of the run
_LOW_SPACE_BYTES = 1 << 30  # bytes, where nobody knows yet how large states are


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of an evaluation at the time of its state: its losses so far, and the `metrics` of the lowest.

    `seconds` is how long it has taken. `tree` is what the objective has saved, with names in the place of tensors.
    `has_weights` says that the weights of the lowest loss are in the file, too.
    """

    params: dict[str, Any]
    losses: list[float]
    metrics: dict[str, float]
    seconds: float
    tree: Any = None
    has_weights: bool = False


class CheckpointStore:
    """The states of the evaluations of a study, in a folder: of what goes on, waits, is paused, or is inherited.

    The repeats of a trial share its state. The names of the files begin with `prefix`. Nobody else evaluates the same
    individual meanwhile.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix
        self._known_paths: set[Path] = set()  # what this process has found, or written

    def get_path(self, root: int) -> Path:
        """Return the file of a trial, the first of those that repeat each other."""
        return self._folder / f"{self._prefix}{root}.safetensors"

    def find_checkpoint(self, assignment: Assignment) -> Path | None:
        """Return the file of an evaluation's state; None where there is none."""
        path = self.get_path(assignment.root)
        if path not in self._known_paths and assignment.number == assignment.root:
            return None  # it is the first of its individual
        if not path.exists():
            return None
        self._known_paths.add(path)
        return path

    def make_draft_path(self, assignment: Assignment) -> Path:
        """Return where the next state of an evaluation is to be written. Raises OSError without a folder for it."""
        self._folder.mkdir(exist_ok=True)
        path = self.get_path(assignment.root)
        return path.with_name(f".{path.name}")

    def commit_draft(self, assignment: Assignment) -> None:
        """Replace the state of an evaluation by the draft that was written, and flushed."""
        path = self.get_path(assignment.root)
        path.with_name(f".{path.name}").replace(path)
        self._known_paths.add(path)

    def remove_draft(self, assignment: Assignment) -> None:
        """Remove a draft that was not written whole, if there is one."""
        path = self.get_path(assignment.root)
        with suppress(OSError):
            path.with_name(f".{path.name}").unlink(missing_ok=True)

    def has_checkpoint(self, assignment: Assignment) -> bool:
        """Tell whether this process has found the state of an evaluation, or written it."""
        return self.get_path(assignment.root) in self._known_paths

    def remove_ended(self, assignment: Assignment) -> None:
        """Remove the state of an evaluation that has ended, if there is one."""
        path = self.get_path(assignment.root)
        if path in self._known_paths:
            self._known_paths.discard(path)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def remove_root(self, root: int) -> None:
        """Remove the state of an evaluation that is not to be gone on from any more."""
        self._known_paths.discard(self.get_path(root))
        with suppress(OSError):
            self.get_path(root).unlink(missing_ok=True)

    def remove_all_except(self, roots: Collection[int]) -> None:
        """Remove all but the states of these trials; only while no process writes any."""
        kept = {self.get_path(root) for root in roots}
        for path in [*self._folder.glob(f"{self._prefix}[0-9]*.safetensors"), *self._folder.glob(".*.safetensors")]:
            if path not in kept:
                path.unlink(missing_ok=True)

    def remove_empty_folder(self) -> None:
        """Remove the folder, unless there are states; only while no process writes any."""
        with suppress(OSError):
            self._folder.rmdir()

    def describe_shortage(self, most: int) -> str:
        """Return a text where the disk may be too small for so many states; else an empty one."""
        sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")]
        needed = most * max(sizes) if sizes else _LOW_SPACE_BYTES
        free = shutil.disk_usage(self._folder.parent).free
        if free >= needed:
            return ""
        room = f"at least {needed / 1e9:.1f} GB are needed" if sizes else "that may be too little"
        return f"{free / 1e9:.1f} GB are free for what evaluations go on from (--checkpoint-every): {room}"


def check_space(path: Path, size: int) -> None:
    """Raise OSError if the disk would be full with a file of so many bytes."""
    if (free := shutil.disk_usage(path.parent).free) < size + _RESERVED_BYTES:
        kept = f"{_RESERVED_BYTES / 1e6:.0f} MB are kept for the record of the run"
        raise OSError(f"it takes {size / 1e6:.0f} MB, and of the {free / 1e6:.0f} MB that are free, {kept}")


def read_checkpoint_info(
    path: Path, params: Mapping[str, Any] | None = None, is_checked: bool = True
) -> CheckpointInfo:
    """Return what is known of the evaluation whose state is in a file, of these hyperparameters, or any.

    Raises ValueError, saying why, if the file cannot be read, is damaged, or is another evaluation's. If `is_checked`,
    all bytes are read, and compared with their checksum.
    """
    try:
        with path.open("rb") as file:
            header, start = read_header(file)
            metadata = header.pop("__metadata__")
            about = parse_checkpoint_info(json.loads(metadata["about"]))
            if is_checked:
                pieces = locate_tensors(file, start, header)
                parts = ((name, pieces[name].read_chunks()) for name in sorted(pieces))
                if metadata["checksum"] != compute_checksum(metadata["about"], parts):
                    raise ValueError("its checksum is wrong")
            elif file.seek(0, 2) != start + max((entry["data_offsets"][1] for entry in header.values()), default=0):
                raise ValueError("it is not whole")
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error
    if params is not None and about.params != dict(params):
        raise ValueError(f"{path} is of other hyperparameters")
    return about


def parse_checkpoint_info(content: dict[str, Any]) -> CheckpointInfo:
    """Return what a file says of an evaluation; raises ValueError or TypeError if no evaluation has written it."""
    about = CheckpointInfo(**content)
    fits = is_mapping(about.params) and is_mapping_of(is_number)(about.metrics) and is_number(about.seconds)
    if not fits or not isinstance(about.losses, list) or not all(map(is_number, about.losses)):
        raise ValueError("no evaluation has written it")
    return about
