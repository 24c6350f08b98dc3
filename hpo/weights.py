"""The weights of the best individual of a run: one file, never half-written, and never of a worse one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optuna.storages.journal import JournalFileOpenLock
from safetensors import SafetensorError, safe_open

from hpo.errors import UsageError
from hpo.failure import message

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.record import Assignment, Record


class WeightsKeeper:
    """What a leader does for the file of a run's best weights, which all leaders share."""

    def __init__(self, path: Path, record: Record) -> None:
        self._path = path
        self._record = record
        self._draft = path.with_name(f".{path.name}.{os.getpid()}")

    def copy(self, offered: Mapping[str, Tensor] | None, loss: float) -> dict[str, Tensor] | None:
        """Copy what an objective offers before it trains on; None where the run has something better already."""
        if offered is None or loss >= self._record.best()[0]:
            return None
        try:
            return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in offered.items()}
        except (RuntimeError, MemoryError) as error:
            self._warn(error)
            return None

    @contextmanager
    def kept(self, assignment: Assignment, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
        """Put weights into the place of the others, if what completes in here is the best of the run.

        They are written before and renamed after, so that a crash loses them in the moment between alone.
        """
        written = weights is not None and self._write(assignment, weights)
        yield
        if written:
            self._publish(assignment)

    def _write(self, assignment: Assignment, weights: Mapping[str, Tensor]) -> bool:
        from safetensors.torch import save_file

        about = {"trial": str(self._record.number(assignment)), "params": json.dumps(assignment.params)}
        try:
            self._draft.touch()
            mode = self._draft.stat().st_mode  # as the user asks for; safetensors lets nobody else read
            save_file(dict(weights), self._draft, about)
            self._draft.chmod(mode)
            with self._draft.open("rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            self._warn(error)
            self._draft.unlink(missing_ok=True)
            return False
        return True

    def _publish(self, assignment: Assignment) -> None:
        lock = JournalFileOpenLock(str(self._path))
        try:
            lock.acquire()
            try:
                if self._record.best()[1] == self._record.number(assignment):
                    self._draft.replace(self._path)
            finally:
                lock.release()
            self._draft.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        text = f"warning: the weights of the best so far cannot be kept in {self._path}: {message(error)}"
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Weights:
    """The weights of a trial, as `load_state_dict` takes them."""

    trial: int
    state: dict[str, Tensor]


def read_weights(path: Path) -> Weights | None:
    """Read the weights of a run's best; None where none were kept, UsageError where the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            return Weights(int(file.metadata()["trial"]), state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {message(error)}") from error


def trial_of_weights(path: Path) -> int | None:
    """Give whose weights are kept, without reading them; None where there are none that can be read."""
    try:
        with safe_open(path, "np") as file:
            return int(file.metadata()["trial"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
