"""What a run takes over from another one: its finished evaluations, as the populations to start from."""

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
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, list_studies
from hpo.store.storage_url import has_hidden_password, is_url, mask_password
from hpo.store.study import convert_storage_errors, open_existing_study
from hpo.store.study_objectives import make_directions
from hpo.text_format import cut_text, format_count, format_number, make_printable

_MANY_EVALUATIONS = 1000  # so many evaluations take seconds to record


@dataclass(frozen=True)
class WarmStart:
    """The evaluations of another run that are of the search space, the best first, and why the others are not.

    `source` names the run, without a password; `settings` are those it had, empty where that is not known. `heirs` is
    the number of evaluations that are left out because they inherit.
    """

    source: str
    evaluations: list[Evaluation]
    misfits: list[str]
    settings: Mapping[str, Any]
    heir_count: int = 0


def read_warm_start(source: str, space: SearchSpace, objectives: Objectives) -> WarmStart:
    """Return the complete, pruned and paused evaluations of a run directory, or of a study at a URL or in a file.

    Where there are several studies, `source` ends with # and the name of one. What it has not as objectives may be
    among its metrics. Evaluations that inherit are left out: their hyperparameters alone do not give such losses.

    Raises UsageError where there is no such study, or none of its evaluations is of this space.
    """
    shown = mask_password(source)
    try:
        # Path.is_file raises where a folder is closed or a name too long.
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
    ended = [_clean_evaluation(evaluation, space, theirs, objectives) for evaluation in founders]
    why_not = find_misfits(ended, space)
    judged = [
        (one, misfit or _describe_missing_objective(one, objectives))
        for one, misfit in zip(ended, why_not, strict=True)
    ]
    fitting = [evaluation for evaluation, misfit in judged if not misfit]
    misfits = [misfit for _, misfit in judged if misfit]
    if not fitting:
        why = misfits[0] if misfits else "it has none"
        raise UsageError(f"--warm-start {shown}: no finished evaluation is of this search space: {why}")
    return WarmStart(shown, fitting, misfits, settings, len(succeeded) - len(founders))


def record_warm_start(
    takeover: WarmStart, record: Record, space: SearchSpace, layout: Layout, settings: Mapping[str, Any]
) -> list[str]:
    """Record the evaluations that are new, dealt to islands and their workers; return lines that tell of them."""
    if len(takeover.evaluations) > _MANY_EVALUATIONS:
        source = make_printable(takeover.source)
        print(f"taking over {len(takeover.evaluations)} evaluations of {source}", flush=True)

    def make_attributes(evaluation: Evaluation, taken: int) -> dict[str, Any]:
        island, place = taken % layout.islands, taken // layout.islands
        return {
            "imported_from": f"trial {evaluation.trial} of {takeover.source}",
            "propagator": "--warm-start",
            "island": island,
            "worker": layout.find_first_worker(island) + place % layout.count_island_workers(island),
        }

    taken = record.import_evaluations(takeover.evaluations, space.make_distributions(), make_attributes)
    record.remember_source(takeover.source)
    if not taken:
        return []
    best = "".join(
        f", the best {format_number(evaluation.loss)}" for evaluation in rank_evaluations(takeover.evaluations, 1)
    )
    lines = [make_printable(f"with {format_count(taken, 'evaluation')} of {takeover.source}{best}")]
    if misfits := takeover.misfits:
        are = "is" if len(misfits) == 1 else "are"
        such = cut_text(make_printable(misfits[0]))
        lines.append(f"without {len(misfits)} that {are} not of this search space, such as {such}")
    if takeover.heir_count:
        began = format_count(takeover.heir_count, "evaluation")
        lines.append(
            f"without {began} that began with the weights of others: such losses take more than hyperparameters"
        )
    return [*lines, *describe_setting_changes(takeover.settings, "there", settings, "here")]


def describe_setting_changes(before: Mapping[str, Any], then: str, settings: Mapping[str, Any], now: str) -> list[str]:
    """Return lines that say which settings had other values before."""
    return [
        make_printable(f"{name} was {value} {then}, and is {settings[name]} {now}: losses may not compare")
        for name, value in before.items()
        if name in settings and settings[name] != value
    ]


def find_misfits(evaluations: Sequence[Evaluation], space: SearchSpace) -> list[str]:
    """Return for each evaluation why it is not of a search space; empty if it is."""
    mistakes = space.find_mistakes([evaluation.params for evaluation in evaluations])
    return [
        f"trial {evaluation.trial}: {cut_text(mistake, LONGEST_MISTAKE)}" if mistake else ""
        for evaluation, mistake in zip(evaluations, mistakes, strict=True)
    ]


def _find_study_objectives(record: Record, ours: Objectives) -> Objectives:
    """Return what the objectives of a study are: those without names are ours, if they are as many, each as good."""
    names = record.study.metric_names
    if names is not None and LOSS in names[1:]:
        raise UsageError(f"its first objective is {names[0]!r}, and not {LOSS!r}, which comes first in a search")
    if names is not None:
        return record.objectives
    return ours if record.study.directions == make_directions(ours) else ONLY_LOSS


def _describe_missing_objective(evaluation: Evaluation, objectives: Objectives) -> str:
    """Return which objective is not known of an evaluation; empty if all are."""
    missing = objectives.find_missing(evaluation.metrics)
    return f"trial {evaluation.trial}: its {missing[0]!r} is not known" if missing else ""


def _clean_evaluation(evaluation: Evaluation, space: SearchSpace, theirs: Objectives, ours: Objectives) -> Evaluation:
    """Return an evaluation as this program would have recorded it, since another program may have made it."""
    metrics = {**evaluation.metrics, **dict(zip(theirs.metric_names, evaluation.other_values, strict=False))}
    metrics = {name: float(metric) for name, metric in metrics.items() if math.isfinite(metric)}
    between = evaluation.ended - evaluation.started  # negative where the clock was set
    seconds = evaluation.seconds
    return dataclasses.replace(
        evaluation,
        params=convert_params(evaluation.params, space),
        seconds=seconds if math.isfinite(seconds) and seconds > 0 else between if between >= 0 else math.nan,
        curve={epoch + (0 in evaluation.curve): loss for epoch, loss in evaluation.curve.items()},
        metrics=metrics,
        other_values=ours.select_metric_values(metrics),
    )


def _open_run(run_dir: RunDir) -> tuple[Record, Mapping[str, Any]]:
    manifest = run_dir.read_manifest()
    storage = run_dir.locate_storage(manifest.storage)
    if has_hidden_password(storage):
        raise UsageError(f"its study is in {storage}: give that URL instead, with the password and #{manifest.study}")
    check_readable(storage)
    return open_existing_study(run_dir, storage, manifest.study), manifest.settings


def _open_study(source: str) -> tuple[Record, Mapping[str, Any]]:
    storage, _, name = source.partition("#")
    if "@" in name:
        raise UsageError("what is behind # is the name of a study: write %23 for a # in a password")
    check_readable(storage)
    with convert_storage_errors(storage):
        found = list_studies(storage)
    searches = [study for study in found if not study.endswith(make_confirmation_name(""))]
    if not name and len(searches) == 1:
        name = searches[0]
    if name not in found:
        if not searches:
            raise UsageError("it holds no study: name the storage of one, or a run directory")
        names = cut_text(", ".join(map(repr, searches)))
        raise UsageError(f"it holds {names}: name one, as in {mask_password(storage)}#NAME")
    if found[name][0] != StudyDirection.MINIMIZE:
        raise UsageError(f"the study {name!r} does not minimise a loss, as a search does: name another")
    with convert_storage_errors(storage):
        return Record(storage, name), {}
