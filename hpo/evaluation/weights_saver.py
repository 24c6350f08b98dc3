"""Save the weights of the best evaluations of the run, on the leader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.store.pareto_front import FrontArchive
from hpo.store.weights import make_weights_draft_path, warn_about_weights

if TYPE_CHECKING:
    from hpo.evaluation.draft_store import DraftStore
    from hpo.store.evaluations import Assignment, Evaluation
    from hpo.store.study_client import StudyClient


class WeightsSaver:
    """Writes the weights of the best individuals, on the leader.

    The first rank of the job moves the files to their final paths. The leader knows only the
    evaluations that it has received from the study. So it may write weights that are not the best
    of the run.
    """

    def __init__(self, study: StudyClient, settings: Mapping[str, Any]) -> None:
        self._study = study
        self._settings = settings
        self._archive = FrontArchive(study.objectives)
        study.listeners.append(self._add_to_archive)

    def is_wanted(self, assignment: Assignment, loss: float, metrics: Mapping[str, float]) -> bool:
        """Return whether these values would be the best, or on the Pareto front, as far as known.

        A confirmation must be better than the other confirmations of the same individual.
        """
        if assignment.confirms is not None:
            return self._study.call.should_keep_weights(assignment.number, loss)
        values = (loss, *self._study.objectives.select_metric_values(metrics))
        return self._archive.would_join(assignment.number, values)

    def save_weights(self, assignment: Assignment, drafts: DraftStore) -> None:
        """Write the weights of a recorded evaluation to all files that the study wants, if any."""
        paths = self._study.call.list_weight_files(assignment.number)
        if not paths:
            return
        metadata = {
            "trial": assignment.number,
            "params": assignment.params,
            "settings": self._settings,
        }
        if assignment.confirms is not None:
            metadata |= {
                "trial": assignment.confirms,
                "confirmation": assignment.number,
                "seed": assignment.seed,
            }
        texts = {name: json.dumps(value) for name, value in metadata.items()}
        for path in map(Path, paths):
            draft = make_weights_draft_path(path, assignment.number)
            try:
                path.parent.mkdir(exist_ok=True)
                drafts.make_weights_file(draft, texts)
            # The evaluation is recorded; a lost file must not fail it.
            except (OSError, ValueError) as error:
                warn_about_weights(error, path)
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
        self._study.notify.move_weights(assignment.number)

    def _add_to_archive(self, evaluation: Evaluation) -> None:
        if not evaluation.imported_from:
            self._archive.add(evaluation)
