"""Keep the weights of the best evaluation, of the Pareto front, and of confirmations."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
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
    """Select the evaluations of a search whose weights are kept.

    These are the best evaluation and, with several objectives, some evaluations on the Pareto
    front. Weights of the front are stored in a folder, one file for each evaluation. Imported
    evaluations have no weights.
    """

    def __init__(self, files: RunDir, objectives: Objectives) -> None:
        self._best = files.best_weights
        self._folder = files.front_weights
        self._objectives = objectives
        self._archive = FrontArchive(objectives)

    def update(self, evaluation: Evaluation) -> None:
        """Update the Pareto front with an evaluation that has started or ended."""
        if not evaluation.imported_from:
            self._archive.add(evaluation)

    def list_wanted_files(self, trial: int) -> list[Path]:
        """Return the files for the weights of a complete trial; [] discards them."""
        # Of evaluations with equal losses, only those that are better in another objective are on
        # the front.
        winner = find_best(self._archive.front)
        paths = []
        if winner is not None and winner.trial == trial:
            paths.append(self._best)
        if self._objectives.is_multi_objective and trial in self._select_kept_trials(trial):
            paths.append(make_weights_path(self._folder, trial))
        return paths

    def move_draft(self, trial: int) -> None:
        """Move the drafts of a trial's weights to `list_wanted_files`, and remove its other drafts.

        Then remove the files of evaluations that have left the front, or whose values are too close
        to others.
        """
        wanted = self.list_wanted_files(trial)
        for path in (self._best, make_weights_path(self._folder, trial)):
            _move_or_remove_draft(path, trial, path in wanted)
        if self._objectives.is_multi_objective:
            with suppress(OSError):
                kept = self._select_kept_trials()
                for path in self._list_files():
                    if int(path.stem) not in kept:
                        path.unlink()

    def _select_kept_trials(self, *more: int) -> set[int]:
        """Return the trials whose weights are kept, out of those with a file and of `more`."""
        stored = {int(path.stem) for path in self._list_files()} | set(more)
        on_front = [
            evaluation
            for evaluation in drop_equal_values(self._archive.front)
            if evaluation.trial in stored
        ]
        return {evaluation.trial for evaluation in select_spread(on_front, self._objectives)}

    def _list_files(self) -> list[Path]:
        with suppress(OSError):  # An objective may use all file descriptors for a while.
            return [path for path in self._folder.glob("*.safetensors") if path.stem.isdecimal()]
        return []


class ConfirmedWeights:
    """Select the confirmations whose weights are kept.

    A confirmation trains a best individual with another seed. For each individual, the weights of
    the confirmation with the lowest loss are kept. The file is named after the individual's trial
    in the search. A resumed run may have new settings. Then weights that were trained with earlier
    settings are replaced, even if their loss is lower.
    """

    def __init__(self, files: RunDir, settings: Mapping[str, Any]) -> None:
        self._folder = files.confirmed_weights
        self._settings = settings
        self._evaluations: dict[int, Evaluation] = {}

    def update(self, evaluation: Evaluation) -> None:
        """Remember a confirmation that has started or ended."""
        self._evaluations[evaluation.trial] = evaluation

    def should_keep(self, trial: int, loss: float) -> bool:
        """Return whether valid weights are missing, or have a higher loss."""
        path = self._find_path(trial)
        try:
            kept = read_weights(path, with_tensors=False) if path else None
        except UsageError:
            kept = None  # Damaged weights are replaced.
        if (
            kept is None
            or kept.confirmation not in self._evaluations
            or kept.settings != self._settings
        ):
            return path is not None
        return loss < self._evaluations[kept.confirmation].loss

    def list_wanted_files(self, trial: int) -> list[Path]:
        """Return the files for the weights of a complete trial; [] discards them."""
        path = self._find_path(trial)
        return [path] if path and self.should_keep(trial, self._evaluations[trial].loss) else []

    def move_draft(self, trial: int) -> None:
        """Move the draft of a trial's weights to its file, or remove it."""
        if path := self._find_path(trial):
            _move_or_remove_draft(path, trial, bool(self.list_wanted_files(trial)))

    def _find_path(self, trial: int) -> Path | None:
        confirms = self._evaluations[trial].confirms
        return None if confirms is None else make_weights_path(self._folder, confirms)


def remove_other_weights(folder: Path, trial: int) -> None:
    """Remove all weights in a folder, and all drafts, except the weights of one trial."""
    with suppress(OSError):
        for path in folder.glob("*.safetensors*"):
            if path != make_weights_path(folder, trial):
                path.unlink()


def _move_or_remove_draft(path: Path, trial: int, is_wanted: bool) -> None:
    draft = make_weights_draft_path(path, trial)
    try:
        if is_wanted and draft.exists():
            draft.replace(path)
        else:
            draft.unlink(missing_ok=True)
    except OSError as error:
        warn_about_weights(error, path)


def make_weights_draft_path(path: Path, trial: int) -> Path:
    """Return the temporary file of a trial's weights, before they are moved to `path`."""
    return path.with_name(f".{path.name}.{trial}")


def warn_about_weights(error: Exception, path: Path) -> None:
    """Warn that weights cannot be stored; the evaluation itself is not affected."""
    warn(f"warning: the weights of the best so far cannot be kept in {path}: {format_error(error)}")


def make_weights_path(folder: Path, trial: int) -> Path:
    """Return the path of the file for a trial's weights in a folder."""
    return folder / f"{trial}.safetensors"


def find_weights(run_dir: RunDir, trial: int) -> Path | None:
    """Return the file with the weights of a trial of the search; None if there are none."""
    files = (make_weights_path(run_dir.front_weights, trial), run_dir.best_weights)
    return next((path for path in files if read_weights_trial(path) == trial), None)


@dataclass(frozen=True)
class Weights:
    """Hold stored weights, and describe how they were trained."""

    trial: int
    """Trial of the search with these hyperparameters."""
    params: dict[str, Any]
    settings: dict[str, Any]
    names: list[str]
    """Names of the tensors."""
    confirmation: int | None = None
    """Trial that trained them with another seed to confirm `trial`; None for the search itself."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by name, for `load_state_dict`; empty if only the description was read."""


def read_weights(path: Path, with_tensors: bool = True) -> Weights | None:
    """Load weights as torch tensors, or only their description. Return None without a file.

    Raises UsageError if the file is damaged.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt" if with_tensors else "np") as file:
            metadata = file.metadata()
            known = {name: json.loads(metadata[name]) for name in ("trial", "params", "settings")}
            confirmation = json.loads(metadata.get("confirmation", "null"))
            names = list(file.keys())
            state = {name: file.get_tensor(name) for name in names if with_tensors}
            return Weights(**known, names=names, confirmation=confirmation, state=state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {format_error(error)}") from error


def read_weights_trial(path: Path) -> int | None:
    """Return the trial of stored weights without loading them, or None."""
    try:
        with safe_open(path, "np") as file:
            return int(file.metadata()["trial"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
