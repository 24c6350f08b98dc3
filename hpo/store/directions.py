"""The objectives of a search as an Optuna study has them: a direction for each, and their names."""

from __future__ import annotations

import warnings

import optuna
from optuna.study import StudyDirection

from hpo.objectives import LOSS, Objectives


def directions(objectives: Objectives) -> list[StudyDirection]:
    """Return the direction of each objective."""
    return [
        StudyDirection.MAXIMIZE if name in objectives.maximized else StudyDirection.MINIMIZE
        for name in objectives.names
    ]


def name_objectives(study: optuna.Study, objectives: Objectives) -> None:
    """Let Optuna's plots and its dashboard call objectives by their names, where there are several."""
    if objectives.are_several:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(objectives.names))


def objectives_of(study: optuna.Study) -> Objectives:
    """Return the objectives of a study; its first one is called the loss, and others without names have numbers."""
    named = study.metric_names or [str(place) for place in range(len(study.directions))]
    names = (LOSS, *named[1:])
    pairs = zip(names, study.directions, strict=True)
    return Objectives(names, tuple(name for name, one in pairs if one == StudyDirection.MAXIMIZE))


class OfLosses(optuna.Study):
    """A study as Optuna's pruners take it: with one direction.

    They refuse studies of several objectives, and compare nothing but intermediate values, which are losses.
    """

    @property
    def direction(self) -> StudyDirection:
        """The direction of losses."""
        return StudyDirection.MINIMIZE
