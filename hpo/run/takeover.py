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
from hpo.run.given import LONGEST_MISTAKE, meant
from hpo.space import SearchSpace
from hpo.store.directions import directions
from hpo.store.evaluations import Evaluation, rank
from hpo.store.manifest import confirming
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.storage import check_readable, studies
from hpo.store.study import existing_study, mistakes
from hpo.store.url import is_hidden, is_remote, without_password
from hpo.text import counted, number, printable, short

_MANY = 1000  # so many evaluations take seconds to record


@dataclass(frozen=True)
class Takeover:
    """The evaluations of another run that are of the search space, the best first, and why the others are not.

    `source` names the run, without a password; `settings` are those it had, empty where that is not known. `heirs` is
    the number of evaluations that are left out because they inherit.
    """

    source: str
    evaluations: list[Evaluation]
    misfits: list[str]
    settings: Mapping[str, Any]
    heirs: int = 0


def read_takeover(source: str, space: SearchSpace, objectives: Objectives) -> Takeover:
    """Return the complete, pruned and paused evaluations of a run directory, or of a study at a URL or in a file.

    Where there are several studies, `source` ends with # and the name of one. What it has not as objectives may be
    among its metrics. Evaluations that inherit are left out: their hyperparameters alone do not give such losses.

    Raises UsageError where there is no such study, or none of its evaluations is of this space.
    """
    shown = without_password(source)
    try:
        # Path.is_file raises where a folder is closed or a name too long.
        is_storage = is_remote(source) or os.path.isfile(source.partition("#")[0])  # noqa: PTH113
        record, settings = _of_storage(source) if is_storage else _of_run(RunDir(Path(source)))
        evaluations, theirs = record.evaluations(), _theirs(record, objectives)
    except UsageError as error:
        raise UsageError(f"--warm-start {shown}: {error}") from error
    succeeded = [
        evaluation
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.loss)
        if evaluation.finished
        and evaluation.succeeded
        and all(map(math.isfinite, (evaluation.loss, evaluation.started, evaluation.ended)))
    ]
    founders = [evaluation for evaluation in succeeded if evaluation.inherits is None]
    ended = [_cleaned(evaluation, space, theirs, objectives) for evaluation in founders]
    why_not = find_misfits(ended, space)
    judged = [(one, misfit or _unknown(one, objectives)) for one, misfit in zip(ended, why_not, strict=True)]
    fitting = [evaluation for evaluation, misfit in judged if not misfit]
    misfits = [misfit for _, misfit in judged if misfit]
    if not fitting:
        why = misfits[0] if misfits else "it has none"
        raise UsageError(f"--warm-start {shown}: no finished evaluation is of this search space: {why}")
    return Takeover(shown, fitting, misfits, settings, len(succeeded) - len(founders))


def take_over(
    takeover: Takeover, record: Record, space: SearchSpace, layout: Layout, settings: Mapping[str, Any]
) -> list[str]:
    """Record the evaluations that are new, dealt to islands and their workers; return lines that tell of them."""
    if len(takeover.evaluations) > _MANY:
        source = printable(takeover.source)
        print(f"taking over {len(takeover.evaluations)} evaluations of {source}", flush=True)

    def attributes(evaluation: Evaluation, taken: int) -> dict[str, Any]:
        island, place = taken % layout.islands, taken // layout.islands
        return {
            "imported_from": f"trial {evaluation.trial} of {takeover.source}",
            "propagator": "--warm-start",
            "island": island,
            "worker": layout.first_worker(island) + place % layout.island_size(island),
        }

    taken = record.take_over(takeover.evaluations, space.distributions(), attributes)
    record.remember_source(takeover.source)
    if not taken:
        return []
    best = "".join(f", the best {number(evaluation.loss)}" for evaluation in rank(takeover.evaluations, 1))
    lines = [printable(f"with {counted(taken, 'evaluation')} of {takeover.source}{best}")]
    if misfits := takeover.misfits:
        are = "is" if len(misfits) == 1 else "are"
        such = short(printable(misfits[0]))
        lines.append(f"without {len(misfits)} that {are} not of this search space, such as {such}")
    if takeover.heirs:
        began = counted(takeover.heirs, "evaluation")
        lines.append(
            f"without {began} that began with the weights of others: such losses take more than hyperparameters"
        )
    return [*lines, *differences(takeover.settings, "there", settings, "here")]


def differences(before: Mapping[str, Any], then: str, settings: Mapping[str, Any], now: str) -> list[str]:
    """Return lines that say which settings had other values before."""
    return [
        printable(f"{name} was {value} {then}, and is {settings[name]} {now}: losses may not compare")
        for name, value in before.items()
        if name in settings and settings[name] != value
    ]


def find_misfits(evaluations: Sequence[Evaluation], space: SearchSpace) -> list[str]:
    """Return for each evaluation why it is not of a search space; empty if it is."""
    mistakes = space.find_mistakes([evaluation.params for evaluation in evaluations])
    return [
        f"trial {evaluation.trial}: {short(mistake, LONGEST_MISTAKE)}" if mistake else ""
        for evaluation, mistake in zip(evaluations, mistakes, strict=True)
    ]


def _theirs(record: Record, ours: Objectives) -> Objectives:
    """Return what the objectives of a study are: those without names are ours, if they are as many, each as good."""
    names = record.study.metric_names
    if names is not None and LOSS in names[1:]:
        raise UsageError(f"its first objective is {names[0]!r}, and not {LOSS!r}, which comes first in a search")
    if names is not None:
        return record.objectives
    return ours if record.study.directions == directions(ours) else ONLY_LOSS


def _unknown(evaluation: Evaluation, objectives: Objectives) -> str:
    """Return which objective is not known of an evaluation; empty if all are."""
    missing = objectives.missing(evaluation.metrics)
    return f"trial {evaluation.trial}: its {missing[0]!r} is not known" if missing else ""


def _cleaned(evaluation: Evaluation, space: SearchSpace, theirs: Objectives, ours: Objectives) -> Evaluation:
    """Return an evaluation as this program would have recorded it, since another program may have made it."""
    metrics = {**evaluation.metrics, **dict(zip(theirs.others, evaluation.others, strict=False))}
    metrics = {name: float(metric) for name, metric in metrics.items() if math.isfinite(metric)}
    between = evaluation.ended - evaluation.started  # negative where the clock was set
    seconds = evaluation.seconds
    return dataclasses.replace(
        evaluation,
        params=meant(evaluation.params, space),
        seconds=seconds if math.isfinite(seconds) and seconds > 0 else between if between >= 0 else math.nan,
        curve={epoch + (0 in evaluation.curve): loss for epoch, loss in evaluation.curve.items()},
        metrics=metrics,
        others=ours.of(metrics),
    )


def _of_run(run_dir: RunDir) -> tuple[Record, Mapping[str, Any]]:
    manifest = run_dir.manifest()
    storage = run_dir.locate(manifest.storage)
    if is_hidden(storage):
        raise UsageError(f"its study is in {storage}: give that URL instead, with the password and #{manifest.study}")
    check_readable(storage)
    return existing_study(run_dir, storage, manifest.study), manifest.settings


def _of_storage(source: str) -> tuple[Record, Mapping[str, Any]]:
    storage, _, name = source.partition("#")
    if "@" in name:
        raise UsageError("what is behind # is the name of a study: write %23 for a # in a password")
    check_readable(storage)
    with mistakes(storage):
        found = studies(storage)
    searches = [study for study in found if not study.endswith(confirming(""))]
    if not name and len(searches) == 1:
        name = searches[0]
    if name not in found:
        if not searches:
            raise UsageError("it holds no study: name the storage of one, or a run directory")
        names = short(", ".join(map(repr, searches)))
        raise UsageError(f"it holds {names}: name one, as in {without_password(storage)}#NAME")
    if found[name][0] != StudyDirection.MINIMIZE:
        raise UsageError(f"the study {name!r} does not minimise a loss, as a search does: name another")
    with mistakes(storage):
        return Record(storage, name), {}
