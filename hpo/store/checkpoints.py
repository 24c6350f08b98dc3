"""Store checkpoints of evaluations, one safetensors file for each individual.

A new checkpoint replaces the file atomically. Files are read without pickle, so they cannot execute
code.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.store.json_values import is_mapping, is_mapping_of, is_number
from hpo.store.tensors import compute_checksum, locate_tensors, read_header
from hpo.text_format import format_error

WEIGHTS_PREFIX = "weights/"  # Prefix of the names of weights.
STATE_PREFIX = "state/"  # Prefix of the names of a checkpoint's tensors.
_RESERVED_BYTES = 64 << 20  # Bytes that checkpoints leave free for the record of the run.
_LOW_SPACE_BYTES = 1 << 30  # Bytes needed if the size of checkpoints is unknown.


@dataclass(frozen=True)
class CheckpointInfo:
    """Describe the progress of an evaluation when its checkpoint was saved."""

    params: dict[str, Any]
    losses: list[float]
    """Losses that were reported before the checkpoint, ordered by step."""
    metrics: dict[str, float]
    """Metrics that were reported with the lowest of these losses."""
    seconds: float
    tree: Any = None
    """State that the objective saved. Each tensor is replaced by its name in the file."""
    has_weights: bool = False
    """Whether the file also contains the weights of the network at the lowest loss."""


class CheckpointStore:
    """Manage the checkpoint files of a study in one folder.

    An individual has one file. All its trials share this file, because they never run at the same
    time.

    Args:
        folder: Folder of the files; it is created when needed.
        prefix: Prefix of all file names.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix

    def get_path(self, root: int) -> Path:
        """Return the path of a checkpoint; `root` is the individual's first trial."""
        return self._folder / f"{self._prefix}{root}.safetensors"

    @contextmanager
    def replace_checkpoint(self, root: int) -> Iterator[Path]:
        """Replace a checkpoint by the file that the code in ``with`` writes to the yielded path.

        The file must be on disk at the end of ``with``. After an error, it is removed instead.
        """
        self._folder.mkdir(exist_ok=True)
        path = self.get_path(root)
        draft = path.with_name(f".{path.name}")
        try:
            yield draft
            draft.replace(path)
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def remove_checkpoint(self, root: int) -> None:
        """Remove the checkpoint of an individual, if it has one."""
        with suppress(OSError):
            self.get_path(root).unlink(missing_ok=True)

    def remove_all_except(self, roots: Collection[int]) -> None:
        """Remove all checkpoints but these, and all drafts; no process may write one."""
        kept = {self.get_path(root) for root in roots}
        for pattern in (f"{self._prefix}[0-9]*.safetensors", ".*.safetensors"):
            for path in self._folder.glob(pattern):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def remove_empty_folder(self) -> None:
        """Remove the folder if it is empty. No process may write to it during this call."""
        with suppress(OSError):
            self._folder.rmdir()

    def describe_shortage(self, most: int) -> str:
        """Return a warning if the disk may lack space for `most` more checkpoints, or ""."""
        sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")]
        needed = most * max(sizes) if sizes else _LOW_SPACE_BYTES
        free = shutil.disk_usage(self._folder.parent).free
        if free >= needed:
            return ""
        need = f"at least {needed / 1e9:.1f} GB are needed" if sizes else "that may be too little"
        return f"{free / 1e9:.1f} GB are free for checkpoints (--checkpoint-every): {need}"


def check_space(path: Path, size: int) -> None:
    """Raise OSError if the disk lacks space for `size` bytes and for the record of the run."""
    if (free := shutil.disk_usage(path.parent).free) < size + _RESERVED_BYTES:
        reserved = f"{_RESERVED_BYTES / 1e6:.0f} MB must stay free for the record of the run"
        raise OSError(
            f"it needs {size / 1e6:.0f} MB, but {free / 1e6:.0f} MB are free and {reserved}"
        )


def read_checkpoint_info(
    path: Path, params: Mapping[str, Any] | None = None, is_checked: bool = True
) -> CheckpointInfo:
    """Read the description of the evaluation from a checkpoint file.

    Args:
        params: Hyperparameters that the evaluation must have; None for any.
        is_checked: Whether to verify the checksum of the whole file, or only its size.

    Raises:
        ValueError: If the file cannot be read, is damaged, or belongs to other hyperparameters.
    """
    try:
        with path.open("rb") as file:
            header, start = read_header(file)
            metadata = header.pop("__metadata__")
            info = parse_checkpoint_info(json.loads(metadata["about"]))
            if is_checked:
                pieces = locate_tensors(file, start, header)
                parts = ((name, pieces[name].read_chunks()) for name in sorted(pieces))
                if metadata["checksum"] != compute_checksum(metadata["about"], parts):
                    raise ValueError("its checksum does not match")
            elif file.seek(0, 2) != start + max(
                (entry["data_offsets"][1] for entry in header.values()), default=0
            ):
                raise ValueError("it is incomplete")
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {format_error(error)}") from error
    if params is not None and info.params != dict(params):
        raise ValueError(f"{path} belongs to other hyperparameters")
    return info


def parse_checkpoint_info(content: dict[str, Any]) -> CheckpointInfo:
    """Convert the JSON of a checkpoint; raise ValueError or TypeError if it is invalid."""
    info = CheckpointInfo(**content)
    is_valid = (
        is_mapping(info.params)
        and is_mapping_of(is_number)(info.metrics)
        and is_number(info.seconds)
    )
    if not is_valid or not isinstance(info.losses, list) or not all(map(is_number, info.losses)):
        raise ValueError("its description of the evaluation is invalid")
    return info
