"""The objectives of a search as an Optuna study has them: a direction for each, and their names as metric names."""

from __future__ import annotations

import warnings

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from hpo.objectives import LOSS, Objectives


def make_directions(objectives: Objectives) -> list[StudyDirection]:
    """Return the direction of each objective."""
    return [
        StudyDirection.MAXIMIZE if name in objectives.maximized else StudyDirection.MINIMIZE
        for name in objectives.names
    ]


def make_study(storage: BaseStorage, name: str, objectives: Objectives) -> int:
    """Make a study with these objectives, by which Optuna's plots and its dashboard call them, and return its id.

    A study of this name that has neither a space nor trials was only begun, and is taken. Raises ValueError if the name
    is taken by any other study.
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
    """Return the objectives of a study; its first one is called the loss, and others without names have numbers."""
    named = study.metric_names or [str(place) for place in range(len(study.directions))]
    names = (LOSS, *named[1:])
    pairs = zip(names, study.directions, strict=True)
    return Objectives(names, tuple(name for name, one in pairs if one == StudyDirection.MAXIMIZE))


class LossOnlyStudy(optuna.Study):
    """A study as Optuna's pruners take it: with one direction.

    They refuse studies of several objectives, and compare nothing but intermediate values, which are losses.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__dict__.update(study.__dict__)  # Optuna's would ask the storage again

    @property
    def direction(self) -> StudyDirection:
        """The direction of losses."""
        return StudyDirection.MINIMIZE
