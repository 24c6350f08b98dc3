"""What the leader of a worker does to keep the weights of its evaluations, where these are the best of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.store.pareto_front import FrontArchive
from hpo.store.weights import make_weights_draft_path, warn_about_weights

if TYPE_CHECKING:
    from hpo.evaluation.attempt import CopyHolder
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.study_client import StudyClient


class WeightsSaver:
    """Writes the weights of a run's best individuals on their leaders; the record's writer puts them in place.

    It knows of other evaluations what the recorder has heard, and so may take one for the best that is not. `settings`
    are the run's.
    """

    def __init__(self, recorder: StudyClient, settings: Mapping[str, Any]) -> None:
        self._recorder = recorder
        self._settings = settings
        self._archive = FrontArchive(recorder.objectives)
        recorder.listeners.append(self._add_to_archive)

    def is_wanted(self, assignment: Assignment, loss: float, metrics: Mapping[str, float]) -> bool:
        """Tell whether an evaluation with these values would be the best, or on the front, as far as is known.

        One that confirms the best has to be better than the others of the same individual.
        """
        if assignment.confirms is not None:
            return self._recorder.should_keep_weights(assignment.number, loss)
        values = (loss, *self._recorder.objectives.select_metric_values(metrics))
        return self._archive.would_join(assignment.number, values)

    def save_weights(self, assignment: Assignment, copies: CopyHolder) -> None:
        """Write the weights of an evaluation that has been recorded, if they are wanted."""
        places = self._recorder.list_weight_files(assignment.number)
        for place in map(Path, places):
            self._write_weights(place, assignment, copies)
        if places:
            self._recorder.move_weights(assignment.number)

    def _write_weights(self, path: Path, assignment: Assignment, copies: CopyHolder) -> None:
        draft = make_weights_draft_path(path, assignment.number)
        try:
            path.parent.mkdir(exist_ok=True)
            about = {"trial": assignment.number, "params": assignment.params, "settings": self._settings}
            if assignment.confirms is not None:
                about |= {"trial": assignment.confirms, "confirmation": assignment.number, "seed": assignment.seed}
            texts = {name: json.dumps(value) for name, value in about.items()}
            if error := copies.write_weights(str(draft.absolute()), texts):
                raise OSError(error)
        except OSError as error:  # the evaluation is safe, and worth more than this file
            warn_about_weights(error, path)
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def _add_to_archive(self, one: Evaluation) -> None:
        if not one.imported_from:
            self._archive.add(one)
