"""Read the evaluations that a search begins with: those of --enqueue and --warm-start."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection

from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.space import SearchSpace, Value
from hpo.store.evaluations import Evaluation, find_best
from hpo.store.manifest import make_confirmation_name
from hpo.store.record import Record, make_directions
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, list_studies
from hpo.store.storage_url import has_hidden_password, is_url, mask_password
from hpo.store.study import convert_storage_errors, open_existing_study
from hpo.text_format import cut_text, format_count, format_number, make_printable

_LONGEST_NAME = 100
_LONGEST_MISTAKE = 300  # Characters of a message about hyperparameters, which may be long.
_MANY_EVALUATIONS = 1000  # A larger number takes seconds to record, so a message is printed first.


def read_enqueued(given: str, space: SearchSpace, seed: int) -> list[dict[str, Value]]:
    """Return the sets of hyperparameters in a JSON file, or in a JSON list, without duplicates.

    Missing values are drawn at random, with a seed.

    Raises:
        UsageError: The file cannot be read, or an entry is not valid. The message has the number of
            the entry.
    """
    path = cut_text(given, _LONGEST_NAME)
    try:
        entries = json.loads(given if given.lstrip()[:1] in ("[", "{") else Path(given).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--enqueue {path}: cannot be read: {error}") from error
    if not isinstance(entries, list) or not entries:
        example = json.dumps([space.draw(random.Random(0))])
        raise UsageError(f"--enqueue {path}: must have a list of objects, such as {example}")
    enqueued: list[dict[str, Value]] = []
    for number, entry in enumerate(entries, start=1):
        try:
            if not isinstance(entry, dict):
                raise ValueError(f"must be an object, got {entry!r}")
            rng = random.Random(f"{seed}/{number}")
            params = space.draw(rng, _convert_params(entry, space))
        except ValueError as error:
            raise UsageError(
                f"--enqueue {path}: entry {number}: {cut_text(str(error), _LONGEST_MISTAKE)}"
            ) from error
        if params not in enqueued:
            enqueued.append(params)
    return enqueued


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


def parse_warm_start_values(texts: Sequence[str], space: SearchSpace) -> dict[str, Any]:
    """Return the values of --warm-start-value by the names of their hyperparameters."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in space.parameters:
            raise UsageError(
                f"--warm-start-value must be NAME=VALUE with one of {', '.join(space.parameters)}, "
                f"got {text!r}"
            )
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        values[name] = value
    return values


def read_warm_start(
    source: str,
    space: SearchSpace,
    objectives: Objectives,
    values: Mapping[str, Any] | None = None,
) -> WarmStart:
    """Return the complete, pruned and paused evaluations of another run or study.

    Evaluations with inherited weights are left out, since their losses do not depend on their
    hyperparameters alone.

    Args:
        source: A run directory, or the URL or the file of an Optuna storage. If the storage has
            several studies, it must be followed by ``#`` and the name of a study.
        objectives: The objectives of this run. The source may have them only as metrics.
        values: Values of hyperparameters that the evaluations do not have.

    Raises:
        UsageError: The study does not exist, or none of its evaluations is valid in this space.
    """
    shown = mask_password(source)
    try:
        # Path.is_file raises an error if a folder is not accessible, or if a name is too long.
        is_storage = is_url(source) or os.path.isfile(source.partition("#")[0])  # noqa: PTH113
        record, settings = _open_study(source) if is_storage else _open_run(RunDir(Path(source)))
        evaluations = record.read_evaluations()
        theirs = _find_study_objectives(record, objectives)
    except UsageError as error:
        raise UsageError(f"--warm-start {shown}: {error}") from error
    usable = []
    for evaluation in evaluations:
        numbers = (evaluation.loss, evaluation.started, evaluation.ended)
        has_succeeded = evaluation.is_finished and evaluation.has_succeeded
        if has_succeeded and all(map(math.isfinite, numbers)):
            usable.append(evaluation)
    usable.sort(key=lambda evaluation: evaluation.loss)
    founders = [evaluation for evaluation in usable if evaluation.inherits is None]
    founders = [_add_missing_values(founder, space, values or {}) for founder in founders]
    candidates = [_clean_evaluation(founder, space, theirs, objectives) for founder in founders]
    valid = []
    misfits = []
    for candidate, misfit in zip(candidates, find_misfits(candidates, space), strict=True):
        missing = objectives.find_missing(candidate.metrics)
        if misfit:
            misfits.append(misfit)
        elif missing:
            misfits.append(f"trial {candidate.trial}: its {missing[0]!r} is not known")
        else:
            valid.append(candidate)
    if not valid:
        reason = misfits[0] if misfits else "it has none"
        raise UsageError(
            f"--warm-start {shown}: no finished evaluation is valid in this search space: {reason}"
        )
    return WarmStart(shown, valid, misfits, settings, len(usable) - len(founders))


def record_warm_start(
    warm_start: WarmStart,
    record: Record,
    space: SearchSpace,
    layout: Layout,
    settings: Mapping[str, Any],
) -> list[str]:
    """Record the evaluations that the study lacks, over all workers; return lines of text."""
    if len(warm_start.evaluations) > _MANY_EVALUATIONS:
        source = make_printable(warm_start.source)
        print(f"importing {len(warm_start.evaluations)} evaluations of {source}", flush=True)

    def make_attributes(evaluation: Evaluation, imported: int) -> dict[str, Any]:
        index, island = divmod(imported, layout.islands)
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
    complete = find_best(warm_start.evaluations)
    best = f", the best {format_number(complete.loss)}" if complete else ""
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
            f"without {count} with inherited weights: their losses do not depend on their "
            "hyperparameters alone"
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
            f"{name} was {value} {then}, and is {settings[name]} {now}: losses may not be "
            "comparable"
        )
        for name, value in before.items()
        if name in settings and settings[name] != value
    ]


def find_misfits(evaluations: Sequence[Evaluation], space: SearchSpace) -> list[str]:
    """Return, for each evaluation, why it is not valid in a search space, or "" if it is valid."""
    mistakes = space.find_mistakes([evaluation.params for evaluation in evaluations])
    return [
        f"trial {evaluation.trial}: {cut_text(mistake, _LONGEST_MISTAKE)}" if mistake else ""
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


def _add_missing_values(
    evaluation: Evaluation, space: SearchSpace, values: Mapping[str, Any]
) -> Evaluation:
    params = dict(evaluation.params)
    for name in space.parameters:  # A parameter follows those that make it active.
        if name in values and name not in params and space.is_active(name, params):
            params[name] = values[name]
    return dataclasses.replace(evaluation, params=params)


def _clean_evaluation(
    evaluation: Evaluation, space: SearchSpace, theirs: Objectives, ours: Objectives
) -> Evaluation:
    """Return an evaluation of a study with objectives `theirs` as this run records it."""
    others = dict(zip(theirs.metric_names, evaluation.other_values, strict=False))
    metrics = {
        name: float(metric)
        for name, metric in {**evaluation.metrics, **others}.items()
        if math.isfinite(metric)
    }
    seconds = evaluation.seconds
    if not (math.isfinite(seconds) and seconds > 0):
        between = evaluation.ended - evaluation.started  # It is negative if the clock was changed.
        seconds = between if between >= 0 else math.nan
    return dataclasses.replace(
        evaluation,
        params=_convert_params(evaluation.params, space),
        seconds=seconds,
        curve={epoch + (0 in evaluation.curve): loss for epoch, loss in evaluation.curve.items()},
        metrics=metrics,
        other_values=ours.select_metric_values(metrics),
    )


def _convert_params(params: Mapping[str, Any], space: SearchSpace) -> dict[str, Any]:
    """Convert values to the types of a space, such as 1 to 1.0, and correct rounding."""
    known = space.parameters
    return {
        name: known[name].convert(value) if name in known else value
        for name, value in params.items()
    }


def _open_run(run_dir: RunDir) -> tuple[Record, Mapping[str, Any]]:
    manifest = run_dir.read_manifest()
    storage = run_dir.locate_storage(manifest.storage)
    if has_hidden_password(storage):
        raise UsageError(
            f"its study is in {storage}. Give that URL instead, with the password and "
            f"#{manifest.study}"
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
