"""The weights of the best individual of a run: one file, never half-written, and never replaced by worse ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.errors import UsageError
from hpo.process.printed import warn
from hpo.store.lock import FileLock
from hpo.store.tensors import write_tensors
from hpo.text import message

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.store.record import Record
    from hpo.store.trials import Assignment


class WeightsKeeper:
    """Keeps the weights of a run's best individual in one file, which all leaders share; `settings` are the run's."""

    def __init__(self, path: Path, record: Record, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._record = record
        self._settings = settings

    def wants(self, assignment: Assignment, loss: float) -> bool:
        """Tell whether an evaluation with this loss is the best of the run so far."""
        return (loss, assignment.number) < self._record.best()

    def copy(self, offered: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return a copy of the weights that an objective offers; None, with a warning, if they cannot be copied."""
        try:
            return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in offered.items()}
        except Exception as error:  # any kind of tensor may raise, a sharded one for example, or memory is full
            self._warn(error)
            return None

    def keep(self, assignment: Assignment, weights: Mapping[str, Tensor] | None) -> None:
        """Replace the weights in the file, if their evaluation, which has been recorded, is the best of the run."""
        number = assignment.number
        if weights is None or self._record.best()[1] != number:
            return
        draft = self._path.with_name(f".{self._path.name}.{number}")  # a pid is not unique: there are several hosts
        try:
            about = {"trial": number, "params": assignment.params, "settings": self._settings}
            write_tensors(draft, weights, {name: json.dumps(value) for name, value in about.items()})
            self._publish(draft, number)
        except Exception as error:  # the evaluation is safe, and worth more than this file
            self._warn(error)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def _publish(self, draft: Path, number: int) -> None:
        with FileLock(self._path):
            if self._record.best()[1] == number:
                draft.replace(self._path)

    def _warn(self, error: Exception) -> None:
        text = f"warning: the weights of the best so far cannot be kept in {self._path}: {message(error)}"
        warn(text)


@dataclass(frozen=True)
class Weights:
    """The weights of a trial, as `load_state_dict` takes them, and what they were trained with."""

    trial: int
    params: dict[str, Any]
    settings: dict[str, Any]
    state: dict[str, Tensor]


def read_weights(path: Path) -> Weights | None:
    """Return the weights of a run's best; None where none were kept. Raises UsageError where the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            about = {name: json.loads(file.metadata()[name]) for name in ("trial", "params", "settings")}
            return Weights(**about, state=state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {message(error)}") from error


def trial_of_weights(path: Path) -> int | None:
    """Return the trial whose weights are kept, without reading them; None where there are none that can be read."""
    try:
        with safe_open(path, "np") as file:
            return int(file.metadata()["trial"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
