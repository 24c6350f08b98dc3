"""Convert between the objectives of a search and the directions and metric names of an Optuna study."""

from __future__ import annotations

import warnings

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from hpo.objectives import LOSS, Objectives


def make_directions(objectives: Objectives) -> list[StudyDirection]:
    """Return for each objective whether Optuna must minimize or maximize it."""
    return [
        StudyDirection.MAXIMIZE if name in objectives.maximized else StudyDirection.MINIMIZE
        for name in objectives.names
    ]


def make_study(storage: BaseStorage, name: str, objectives: Objectives) -> int:
    """Create a study with these objectives, and return its id.

    The names of the objectives are stored for Optuna's plots and dashboard. If the study exists with these objectives,
    but has neither a search space nor trials, its creation was interrupted. Then its id is returned.

    Returns:
        The id of the study.

    Raises:
        ValueError: If another study has this name.
    """
    try:
        study_id = storage.create_new_study(make_directions(objectives), name)
    except optuna.exceptions.DuplicatedStudyError as error:
        study_id = storage.get_study_id_from_name(name)
        is_same = storage.get_study_directions(study_id) == make_directions(objectives)
        if not is_same or "space" in storage.get_study_user_attrs(study_id) or storage.get_n_trials(study_id):
            raise ValueError(f"the storage already holds a study named {name!r}") from error
    if objectives.is_multi_objective:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            optuna.load_study(study_name=name, storage=storage).set_metric_names(list(objectives.names))
    return study_id


def read_objectives(study: optuna.Study) -> Objectives:
    """Return the objectives of a study. The first is named "loss". Others without names are numbered."""
    stored_names = study.metric_names or [str(index) for index in range(len(study.directions))]
    names = (LOSS, *stored_names[1:])
    pairs = zip(names, study.directions, strict=True)
    return Objectives(names, tuple(name for name, direction in pairs if direction == StudyDirection.MAXIMIZE))


class LossOnlyStudy(optuna.Study):
    """Present a study to Optuna's pruners as if the loss were its only objective.

    Optuna's pruners refuse studies with several objectives, although they compare only intermediate values. Here,
    intermediate values are losses.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__dict__.update(study.__dict__)  # The constructor of optuna.Study would read the storage again.

    @property
    def direction(self) -> StudyDirection:
        """Direction of the loss, which is always minimized."""
        return StudyDirection.MINIMIZE
