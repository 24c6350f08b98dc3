"""The weights of the best of a run, of the front, and of the confirmed: written whole, never replaced by worse ones."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hpo.errors import UsageError
from hpo.process.standard_streams import warn
from hpo.store.evaluations import Evaluation, find_best
from hpo.store.pareto_front import FrontArchive, drop_equal_values, select_spread
from hpo.text_format import format_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hpo.objectives import Objectives
    from hpo.store.run_dir import RunDir


class BestWeights:
    """Whose weights a run keeps: of the best, and where there are several objectives, of some of the front.

    Those of the front have files of their own in a folder. Nobody has weights of what was taken over from another run.
    """

    def __init__(self, files: RunDir, objectives: Objectives) -> None:
        self._best = files.best_weights
        self._folder = files.front_weights
        self._objectives = objectives
        self._archive = FrontArchive(objectives)

    def update(self, one: Evaluation) -> None:
        """Take note of an evaluation that has started, or ended."""
        if not one.imported_from:
            self._archive.add(one)

    def list_wanted_files(self, trial: int) -> list[Path]:
        """Return the files that are to hold the weights of a trial which is complete."""
        winner = find_best(self._archive.front)  # of equal losses, it is the one that is better in something else
        places = [self._best] if winner is not None and winner.trial == trial else []
        if self._objectives.is_multi_objective and trial in self._select_kept_trials(trial):
            places.append(make_weights_path(self._folder, trial))
        return places

    def move_draft(self, trial: int) -> None:
        """Put the weights in their place that a leader has written, if they are still wanted there.

        Those on the front are removed that are dominated now, or crowded out.
        """
        wanted = self.list_wanted_files(trial)
        for path in (self._best, make_weights_path(self._folder, trial)):
            _move_or_remove_draft(path, trial, path in wanted)
        if self._objectives.is_multi_objective:
            self._remove_superseded()

    def _select_kept_trials(self, *more: int) -> set[int]:
        """Return whose weights are to stay, of those on the front that have some, and of `more` trials."""
        there = {int(path.stem) for path in self._list_files()} | set(more)
        on_front = [one for one in drop_equal_values(self._archive.front) if one.trial in there]
        return {one.trial for one in select_spread(on_front, self._objectives)}

    def _list_files(self) -> list[Path]:
        with suppress(OSError):  # an objective may have used up all descriptors
            return [path for path in self._folder.glob("*.safetensors") if path.stem.isdecimal()]
        return []

    def _remove_superseded(self) -> None:
        with suppress(OSError):
            kept = self._select_kept_trials()
            for path in self._list_files():
                if int(path.stem) not in kept:
                    path.unlink()


class ConfirmedWeights:
    """Whose weights a run keeps of the evaluations that confirm its best.

    Of each individual, they are those of its lowest loss with another seed, in a file that its trial in the search
    names. Weights under settings other than the run's are replaced.
    """

    def __init__(self, files: RunDir, settings: Mapping[str, Any]) -> None:
        self._folder = files.confirmed_weights
        self._settings = settings
        self._evaluations: dict[int, Evaluation] = {}

    def update(self, one: Evaluation) -> None:
        """Take note of an evaluation that has started, or ended."""
        self._evaluations[one.trial] = one

    def should_keep(self, trial: int, loss: float) -> bool:
        """Return whether this loss is lower than that of the weights which are kept of the same individual."""
        path = self._find_path(trial)
        try:
            kept = read_weights_info(path) if path else None
        except UsageError:
            kept = None  # Damaged weights are replaced.
        if kept is None or kept.confirmation not in self._evaluations or kept.settings != self._settings:
            return path is not None
        return loss < self._evaluations[kept.confirmation].loss

    def list_wanted_files(self, trial: int) -> list[Path]:
        """Return the files that are to hold the weights of a trial which is complete."""
        path = self._find_path(trial)
        return [path] if path and self.should_keep(trial, self._evaluations[trial].loss) else []

    def move_draft(self, trial: int) -> None:
        """Move the weights that a leader has written to their path, if they are still wanted there."""
        if path := self._find_path(trial):
            _move_or_remove_draft(path, trial, bool(self.list_wanted_files(trial)))

    def _find_path(self, trial: int) -> Path | None:
        confirms = self._evaluations[trial].confirms
        return None if confirms is None else make_weights_path(self._folder, confirms)


def remove_other_weights(folder: Path, trial: int) -> None:
    """Remove all weights in a folder, and drafts of weights, except those of one trial."""
    with suppress(OSError):
        for path in folder.glob("*.safetensors*"):
            if path != make_weights_path(folder, trial):
                path.unlink()


def _move_or_remove_draft(path: Path, trial: int, is_wanted: bool) -> None:
    """Move the draft of a trial's weights to their path, or remove it."""
    draft = make_weights_draft_path(path, trial)
    try:
        if is_wanted and draft.exists():
            draft.replace(path)
        else:
            draft.unlink(missing_ok=True)
    except OSError as error:
        warn_about_weights(error, path)


def make_weights_draft_path(path: Path, trial: int) -> Path:
    """Return where the weights of a trial are written before they are put in their place."""
    return path.with_name(f".{path.name}.{trial}")


def warn_about_weights(error: Exception, path: Path) -> None:
    """Warn that weights cannot be kept; their evaluation is safe."""
    warn(f"warning: the weights of the best so far cannot be kept in {path}: {format_error(error)}")


def make_weights_path(folder: Path, trial: int) -> Path:
    """Return the file of a trial's weights among those of the front."""
    return folder / f"{trial}.safetensors"


def find_weights(run_dir: RunDir, trial: int) -> Path | None:
    """Return the file with the weights that a trial of the search has; None without any."""
    files = (make_weights_path(run_dir.front_weights, trial), run_dir.best_weights)
    return next((path for path in files if read_weights_trial(path) == trial), None)


@dataclass(frozen=True)
class WeightsInfo:
    """What weights were trained with: the trial, its hyperparameters and the run's settings; `names` of the tensors.

    `confirmation` is the trial that trained them with another seed, in the study that confirms the best; None if the
    search has trained them.
    """

    trial: int
    params: dict[str, Any]
    settings: dict[str, Any]
    names: list[str]
    confirmation: int | None = None


def read_weights_info(path: Path) -> WeightsInfo | None:
    """Return what weights were trained with; None if none were kept. Raises UsageError if the file is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            metadata, names = file.metadata(), list(file.keys())
        known = {name: json.loads(metadata[name]) for name in ("trial", "params", "settings")}
        return WeightsInfo(**known, names=names, confirmation=json.loads(metadata.get("confirmation", "null")))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {format_error(error)}") from error


@dataclass(frozen=True)
class Weights:
    """The weights of a trial, as `load_state_dict` takes them, and what they were trained with."""

    trial: int
    params: dict[str, Any]
    settings: dict[str, Any]
    state: dict[str, Tensor]


def read_weights(path: Path) -> Weights | None:
    """Return the weights of a run's best; None if none were kept. Needs torch.

    Raises UsageError if the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            about = {name: json.loads(file.metadata()[name]) for name in ("trial", "params", "settings")}
            return Weights(**about, state=state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {format_error(error)}") from error


def read_weights_trial(path: Path) -> int | None:
    """Return the trial whose weights are kept, without reading them; None where there are none that can be read."""
    try:
        with safe_open(path, "np") as file:
            return int(file.metadata()["trial"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
