"""Warm start: import the finished evaluations of another run or study, so that a search begins with them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.run.enqueue import LONGEST_MISTAKE, convert_params
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.store.manifest import make_confirmation_name
from hpo.store.record import Record, make_directions
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, list_studies
from hpo.store.storage_url import has_hidden_password, is_url, mask_password
from hpo.store.study import convert_storage_errors, open_existing_study
from hpo.text_format import cut_text, format_count, format_number, make_printable

_MANY_EVALUATIONS = 1000  # A larger number takes seconds to record, so a message is printed first.


@dataclass(frozen=True)
class WarmStart:
    """The evaluations of another run that can be imported."""

    source: str
    """The directory of the run, or the URL of the study without its password."""
    evaluations: list[Evaluation]
    """The evaluations that are valid in this search space, the best first."""
    misfits: list[str]
    """The reasons why the remaining evaluations are not valid, a text for each."""
    settings: Mapping[str, Any]
    """The settings of the other run, empty if they are not known."""
    heir_count: int = 0
    """The number of evaluations that are left out because they inherited weights."""


def read_warm_start(source: str, space: SearchSpace, objectives: Objectives) -> WarmStart:
    """Return the complete, pruned and paused evaluations of another run or study.

    Evaluations with inherited weights are left out, since their losses do not depend on their
    hyperparameters alone.

    Args:
        source: A run directory, or the URL or the file of an Optuna storage. If the storage has
            several studies, it must be followed by ``#`` and the name of a study.
        objectives: The objectives of this run. The source may have them only as metrics.

    Raises:
        UsageError: The study does not exist, or none of its evaluations is valid in this space.
    """
    shown = mask_password(source)
    try:
        # Path.is_file raises an error if a folder is not accessible, or if a name is too long.
        is_storage = is_url(source) or os.path.isfile(source.partition("#")[0])  # noqa: PTH113
        record, settings = _open_study(source) if is_storage else _open_run(RunDir(Path(source)))
        evaluations, theirs = record.read_evaluations(), _find_study_objectives(record, objectives)
    except UsageError as error:
        raise UsageError(f"--warm-start {shown}: {error}") from error
    succeeded = [
        evaluation
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.loss)
        if evaluation.is_finished
        and evaluation.has_succeeded
        and all(map(math.isfinite, (evaluation.loss, evaluation.started, evaluation.ended)))
    ]
    founders = [evaluation for evaluation in succeeded if evaluation.inherits is None]
    candidates = [
        _clean_evaluation(evaluation, space, theirs, objectives) for evaluation in founders
    ]
    checked = [
        (candidate, misfit or _describe_missing_objective(candidate, objectives))
        for candidate, misfit in zip(candidates, find_misfits(candidates, space), strict=True)
    ]
    valid = [evaluation for evaluation, misfit in checked if not misfit]
    misfits = [misfit for _, misfit in checked if misfit]
    if not valid:
        reason = misfits[0] if misfits else "it has none"
        raise UsageError(
            f"--warm-start {shown}: no finished evaluation is valid in this search space: {reason}"
        )
    return WarmStart(shown, valid, misfits, settings, len(succeeded) - len(founders))


def record_warm_start(
    warm_start: WarmStart,
    record: Record,
    space: SearchSpace,
    layout: Layout,
    settings: Mapping[str, Any],
) -> list[str]:
    """Record the imported evaluations that the study does not have yet, distributed over islands and workers.

    Args:
        warm_start: The evaluations to import.

    Returns:
        Lines of text for the user about these evaluations.
    """
    if len(warm_start.evaluations) > _MANY_EVALUATIONS:
        source = make_printable(warm_start.source)
        print(f"importing {len(warm_start.evaluations)} evaluations of {source}", flush=True)

    def make_attributes(evaluation: Evaluation, imported: int) -> dict[str, Any]:
        island, index = imported % layout.islands, imported // layout.islands
        return {
            "imported_from": f"trial {evaluation.trial} of {warm_start.source}",
            "propagator": "--warm-start",
            "island": island,
            "worker": layout.find_first_worker(island)
            + index % layout.count_island_workers(island),
        }

    imported = record.import_evaluations(
        warm_start.evaluations, space.make_distributions(), make_attributes
    )
    record.remember_source(warm_start.source)
    if not imported:
        return []
    best = "".join(
        f", the best {format_number(evaluation.loss)}"
        for evaluation in rank_evaluations(warm_start.evaluations, 1)
    )
    lines = [
        make_printable(f"with {format_count(imported, 'evaluation')} of {warm_start.source}{best}")
    ]
    if misfits := warm_start.misfits:
        are = "is" if len(misfits) == 1 else "are"
        example = cut_text(make_printable(misfits[0]))
        lines.append(
            f"without {len(misfits)} that {are} not valid in this search space, such as {example}"
        )
    if warm_start.heir_count:
        count = format_count(warm_start.heir_count, "evaluation")
        lines.append(
            f"without {count} with inherited weights: their losses do not depend on their hyperparameters alone"
        )
    return [*lines, *describe_setting_changes(warm_start.settings, "there", settings, "here")]


def describe_setting_changes(
    before: Mapping[str, Any], then: str, settings: Mapping[str, Any], now: str
) -> list[str]:
    """Return a line of text for each setting that has different values in two sessions or runs.

    Args:
        before: The settings of an earlier session, or of another run.
        then: The word for `before` in the text, such as "before".
        now: The word for `settings` in the text, such as "now".
    """
    return [
        make_printable(
            f"{name} was {value} {then}, and is {settings[name]} {now}: losses may not be comparable"
        )
        for name, value in before.items()
        if name in settings and settings[name] != value
    ]


def find_misfits(evaluations: Sequence[Evaluation], space: SearchSpace) -> list[str]:
    """Return, for each evaluation, why it is not valid in a search space, or "" if it is valid."""
    mistakes = space.find_mistakes([evaluation.params for evaluation in evaluations])
    return [
        f"trial {evaluation.trial}: {cut_text(mistake, LONGEST_MISTAKE)}" if mistake else ""
        for evaluation, mistake in zip(evaluations, mistakes, strict=True)
    ]


def _find_study_objectives(record: Record, ours: Objectives) -> Objectives:
    """Return the objectives of a study.

    A study without names of objectives has the objectives `ours` if its directions (minimise or
    maximise) are the same. Otherwise its only objective is the loss.
    """
    names = record.study.metric_names
    if names is not None and LOSS in names[1:]:
        raise UsageError(f"its first objective must be {LOSS!r}, got {names[0]!r}")
    if names is not None:
        return record.objectives
    return ours if record.study.directions == make_directions(ours) else ONLY_LOSS


def _describe_missing_objective(evaluation: Evaluation, objectives: Objectives) -> str:
    """Return a text about the first objective that an evaluation has not reported, or "" if it has reported all."""
    missing = objectives.find_missing(evaluation.metrics)
    return f"trial {evaluation.trial}: its {missing[0]!r} is not known" if missing else ""


def _clean_evaluation(
    evaluation: Evaluation, space: SearchSpace, theirs: Objectives, ours: Objectives
) -> Evaluation:
    """Return an evaluation of another study as this run records evaluations.

    The objectives of the other study are `theirs`, and the objectives of this run are `ours`.
    """
    metrics = {
        **evaluation.metrics,
        **dict(zip(theirs.metric_names, evaluation.other_values, strict=False)),
    }
    metrics = {name: float(metric) for name, metric in metrics.items() if math.isfinite(metric)}
    between = evaluation.ended - evaluation.started  # It is negative if the clock was changed.
    seconds = evaluation.seconds
    return dataclasses.replace(
        evaluation,
        params=convert_params(evaluation.params, space),
        seconds=seconds
        if math.isfinite(seconds) and seconds > 0
        else between
        if between >= 0
        else math.nan,
        curve={epoch + (0 in evaluation.curve): loss for epoch, loss in evaluation.curve.items()},
        metrics=metrics,
        other_values=ours.select_metric_values(metrics),
    )


def _open_run(run_dir: RunDir) -> tuple[Record, Mapping[str, Any]]:
    manifest = run_dir.read_manifest()
    storage = run_dir.locate_storage(manifest.storage)
    if has_hidden_password(storage):
        raise UsageError(
            f"its study is in {storage}. Give that URL instead, with the password and #{manifest.study}"
        )
    check_readable(storage)
    return open_existing_study(run_dir, storage, manifest.study), manifest.settings


def _open_study(source: str) -> tuple[Record, Mapping[str, Any]]:
    storage, _, name = source.partition("#")
    if "@" in name:
        raise UsageError("the name of a study must follow #. Write %23 for a # in a password")
    check_readable(storage)
    with convert_storage_errors(storage):
        found = list_studies(storage)
    searches = [study for study in found if not study.endswith(make_confirmation_name(""))]
    if not name and len(searches) == 1:
        name = searches[0]
    if name not in found:
        if not searches:
            raise UsageError("it has no study. Give a storage with a study, or a run directory")
        names = cut_text(", ".join(map(repr, searches)))
        raise UsageError(
            f"it has the studies {names}. Name one of them, as in {mask_password(storage)}#NAME"
        )
    if found[name][0] != StudyDirection.MINIMIZE:
        raise UsageError(
            f"the study {name!r} must minimise a loss, as a search does. Name another study"
        )
    with convert_storage_errors(storage):
        return Record(storage, name), {}
