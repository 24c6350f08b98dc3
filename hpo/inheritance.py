"""What a run takes over from another one: its finished evaluations, as the populations to start from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection

from hpo.errors import UsageError
from hpo.given import meant
from hpo.layout import Layout
from hpo.record import Record
from hpo.report.text import number
from hpo.run_dir import RunDir
from hpo.space import SearchSpace
from hpo.storage import file_of, studies, without_password
from hpo.study import CONFIRMATIONS, existing_study, mistakes
from hpo.trials import Evaluation


@dataclass(frozen=True)
class Inheritance:
    """The evaluations of another run that are of the search space, the best first, and how many are not.

    `source` names the run, without a password; `settings` are those it had, empty where that is not known.
    """

    source: str
    evaluations: list[Evaluation]
    left_out: int
    settings: Mapping[str, Any]


def read_inheritance(source: str, space: SearchSpace) -> Inheritance:
    """Read what is complete or pruned in a run directory, or in the study at a storage URL, URL#STUDY among several.

    Raises UsageError where there is no such study, or none of it is of this space.
    """
    shown = without_password(source)
    try:
        record, settings = _of_url(source) if "://" in source else _of_run(RunDir(Path(source)))
        with mistakes(source):
            evaluations = record.evaluations()
    except UsageError as error:
        raise UsageError(f"--start-from {shown}: {error}") from error
    ended = [
        dataclasses.replace(evaluation, params=meant(evaluation.params, space))
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.loss)
        if evaluation.state in ("complete", "pruned") and math.isfinite(evaluation.loss)
    ]
    misfits = [_misfit(evaluation, space) for evaluation in ended]
    fitting = [evaluation for evaluation, misfit in zip(ended, misfits, strict=True) if misfit is None]
    if not fitting:
        why = misfits[0] if misfits else "it has none"
        raise UsageError(f"--start-from {shown}: no finished evaluation is of this search space: {why}")
    return Inheritance(shown, fitting, len(ended) - len(fitting), settings)


def take_over(
    inheritance: Inheritance, record: Record, space: SearchSpace, layout: Layout, settings: Mapping[str, Any]
) -> list[str]:
    """Deal the evaluations to islands and their workers, as far as they are new, and say in lines what was done."""
    taken = 0
    for evaluation in inheritance.evaluations:
        island, place = taken % layout.islands, taken // layout.islands
        taken += record.take_over(
            evaluation,
            space.distributions(),
            origin=f"trial {evaluation.trial} of {inheritance.source}",
            propagator="--start-from",
            island=island,
            worker=layout.first_worker(island) + place % layout.island_size(island),
        )
    if not taken:
        return []
    left_out = f"; {inheritance.left_out} are not of this search space" if inheritance.left_out else ""
    best = number(inheritance.evaluations[0].loss)
    return [
        f"with {taken} evaluation{'' if taken == 1 else 's'} of {inheritance.source}, the best {best}{left_out}",
        *(
            f"{name} was {value} there, and is {settings[name]} here: losses may not compare"
            for name, value in inheritance.settings.items()
            if name in settings and settings[name] != value
        ),
    ]


def _misfit(evaluation: Evaluation, space: SearchSpace) -> str | None:
    """Say why an evaluation is not of a search space; None if it is."""
    try:
        space.check(evaluation.params)
    except ValueError as error:
        return f"trial {evaluation.trial}: {error}"
    return None


def _of_run(run_dir: RunDir) -> tuple[Record, Mapping[str, Any]]:
    content = run_dir.read()
    storage = run_dir.locate(content["storage"])
    if "***" in storage:
        raise UsageError(f"its study is in {storage}: give that URL instead, with the password and #{content['study']}")
    return existing_study(run_dir, storage, content["study"]), content["settings"]


def _of_url(source: str) -> tuple[Record, Mapping[str, Any]]:
    storage, _, name = source.partition("#")
    file = file_of(storage)
    if file is not None and not file.exists():  # it would be made
        raise UsageError(f"no such file: {file}")
    with mistakes(storage):
        found = studies(storage)
    searches = [study for study in found if not study.endswith(CONFIRMATIONS)]
    if not name and len(searches) == 1:
        name = searches[0]
    if name not in found:
        names = ", ".join(map(repr, searches)) or "no study"
        raise UsageError(f"it holds {names}: name one, as in {without_password(storage)}#NAME")
    if found[name] != [StudyDirection.MINIMIZE]:
        raise UsageError(f"the study {name!r} does not minimise one loss")
    with mistakes(storage):
        return Record(storage, name), {}
