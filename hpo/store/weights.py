"""The weights of the best individual of a run, and of the front: never half-written, never replaced by worse ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.errors import UsageError
from hpo.process.printed import warn
from hpo.store.front import Archive, spread
from hpo.store.lock import FileLock
from hpo.store.news import News
from hpo.store.tensors import write_tensors
from hpo.store.trials import best
from hpo.text import message

if TYPE_CHECKING:
    from torch import Tensor

    from hpo.store.record import Record
    from hpo.store.run_dir import RunDir
    from hpo.store.trials import Assignment


class WeightsKeeper:
    """Keeps the weights of a run's best individual in one file, which all leaders share; `settings` are the run's."""

    def __init__(self, path: Path, record: Record, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._record = record
        self._settings = settings

    def wants(self, assignment: Assignment, loss: float, metrics: Mapping[str, float]) -> bool:  # noqa: ARG002
        """Tell whether an evaluation with this loss is the best of the run so far."""
        return (loss, assignment.number) < self._record.best()

    def copy(self, offered: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return a copy of the weights that an objective offers; None, with a warning, if they cannot be copied."""
        try:
            return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in offered.items()}
        except Exception as error:  # any kind of tensor may raise, a sharded one for example, or memory is full
            self._warn(error, self._path)
            return None

    def keep(self, assignment: Assignment, weights: Mapping[str, Tensor] | None) -> None:
        """Replace the weights in the file, if their evaluation, which has been recorded, is the best of the run."""
        if weights is not None and self._is_best(assignment.number):
            self._write(self._path, assignment, weights, self._is_best)

    def _is_best(self, number: int) -> bool:
        return self._record.best()[1] == number

    def _write(
        self,
        path: Path,
        assignment: Assignment,
        weights: Mapping[str, Tensor],
        is_wanted: Callable[[int], bool],
    ) -> None:
        """Write weights to a file, if they are still wanted when they are written."""
        number = assignment.number
        draft = path.with_name(f".{path.name}.{number}")  # a pid is not unique: there are several hosts
        try:
            path.parent.mkdir(exist_ok=True)
            about = {"trial": number, "params": assignment.params, "settings": self._settings}
            write_tensors(draft, weights, {name: json.dumps(value) for name, value in about.items()})
            with FileLock(self._path):
                if is_wanted(number):
                    draft.replace(path)
        except Exception as error:  # the evaluation is safe, and worth more than this file
            self._warn(error, path)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def _warn(self, error: Exception, path: Path) -> None:
        warn(f"warning: the weights of the best so far cannot be kept in {path}: {message(error)}")


class FrontKeeper(WeightsKeeper):
    """Keeps the weights of some individuals of the front, each in a file of its own in a folder, and of the best.

    Nobody has weights of what was taken over from another run: the front is that of the run's own evaluations.
    """

    def __init__(self, path: Path, folder: Path, record: Record, settings: Mapping[str, Any]) -> None:
        super().__init__(path, record, settings)
        self._folder = folder
        self._news = News()
        self._archive = Archive(record.objectives)

    def wants(self, assignment: Assignment, loss: float, metrics: Mapping[str, float]) -> bool:
        """Tell whether an evaluation with these values would be on the front as it is now."""
        return self._now().has_room_for(assignment.number, (loss, *self._record.objectives.of(metrics)))

    def keep(self, assignment: Assignment, weights: Mapping[str, Tensor] | None) -> None:
        """Keep the weights of an evaluation that has been recorded, if it is on the front; remove what is no more."""
        super().keep(assignment, weights)
        if weights is not None and self._is_on_front(assignment.number):
            self._write(weights_of(self._folder, assignment.number), assignment, weights, self._is_on_front)
            self._tidy()

    def _now(self) -> Archive:
        """Return the front, with what has ended since it was asked for last."""
        for one in self._news.of(self._record.trials()):
            if not one.origin:
                self._archive.add(one)
        return self._archive

    def _is_best(self, number: int) -> bool:
        """Tell whether a trial is the winner: of equal losses, it is the one that is better in something else."""
        winner = best(self._now().front)
        return winner is not None and winner.trial == number

    def _is_on_front(self, number: int) -> bool:
        return number in self._kept(number)

    def _kept(self, *more: int) -> set[int]:
        """Return whose weights are to stay, of those on the front that have some, and of `more` trials."""
        there = {int(path.stem) for path in self._files()} | set(more)
        on_front = [one for one in self._now().front if one.trial in there]
        return {one.trial for one in spread(on_front, self._record.objectives)}

    def _files(self) -> list[Path]:
        return [path for path in self._folder.glob("*.safetensors") if path.stem.isdecimal()]

    def _tidy(self) -> None:
        """Remove the weights of those that are dominated now, or crowded out."""
        with suppress(OSError), FileLock(self._path):
            kept = self._kept()
            for path in self._files():
                if int(path.stem) not in kept:
                    path.unlink()


def weights_of(folder: Path, trial: int) -> Path:
    """Return the file of a trial's weights among those of the front."""
    return folder / f"{trial}.safetensors"


def kept_weights(run_dir: RunDir, trial: int) -> Path | None:
    """Return the file with a trial's weights; None where there are none."""
    files = (weights_of(run_dir.front, trial), run_dir.weights)
    return next((path for path in files if trial_of_weights(path) == trial), None)


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
