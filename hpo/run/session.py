"""A session of a run: what its first rank finds on disk, checks, and leaves there for the session after a death."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpo.errors import UsageError
from hpo.process.standard_streams import warn
from hpo.results.confirmation import ConfirmationPlan, make_plan
from hpo.run.option_changes import collect_options, describe_changes
from hpo.run.request import RunRequest, check_with_heirs
from hpo.run.source_versions import describe_source_changes, keep_source
from hpo.run.warm_start import describe_setting_changes, find_misfits, record_warm_start
from hpo.space import SearchSpace
from hpo.store.cached_storage import CachedStorage
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX, Evaluation
from hpo.store.inheritance import PARENTS_PER_ISLAND, find_trials_to_keep
from hpo.store.journal import has_no_study
from hpo.store.manifest import Manifest
from hpo.store.pareto_front import select_top
from hpo.store.pruning import describe_blind_spot
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, make_run_dir, write_json
from hpo.store.storage import list_studies, open_storage
from hpo.store.storage_retry import StorageRetry
from hpo.store.storage_url import has_hidden_password, is_url, mask_password
from hpo.store.study import (
    check_objectives,
    convert_storage_errors,
    is_storage_missing,
    open_confirmations,
    open_existing_study,
    open_study,
)
from hpo.store.successive_halving import HALVING_SCHEDULES
from hpo.text_format import format_count
from hpo.versions import read_versions


@dataclass(frozen=True)
class Session:
    """Where the run's record is, and what all ranks need to know of the run; `headline` is its text for a person.

    With `patience`, the record is waited for while its storage is away.
    """

    run_dir: RunDir
    storage: str
    manifest: Manifest
    headline: str = ""
    patience: StorageRetry | None = None

    @property
    def confirmation_plan(self) -> ConfirmationPlan:
        """How the best are confirmed."""
        return make_plan(self.manifest)

    def open_record(self) -> Record:
        """Open the record to read it; each process and thread needs one of its own."""
        return Record(self.storage, self.manifest.study, self.patience)

    def open_confirmations(self) -> Record:
        """Open the record of the evaluations that confirm the best, which `create_confirmations` has made."""
        return Record(self.storage, self.manifest.confirmation_study, self.patience)

    def open_own_record(self, study: str) -> tuple[Record, CachedStorage]:
        """Open the record, or that of the confirmations, for the one who writes it, and the mirror that shows it."""
        storage = open_storage(self.storage, self.patience)
        mirror = CachedStorage(storage, storage.get_study_id_from_name(study), self.patience)
        return Record(mirror, study), mirror

    def find_roots_to_inherit(self, record: Record) -> set[int]:
        """Return the first trials of the individuals whose states others inherit."""
        islands = self.manifest.layout.islands
        return (
            record.find_roots(find_trials_to_keep(record.read_evaluations(), islands)) if self.manifest.pbt else set()
        )

    def select_best(self, evaluations: Sequence[Evaluation], n: int) -> list[Evaluation]:
        """Return the n best of these evaluations by the objectives of the run."""
        return select_top(evaluations, n, self.manifest.objectives)

    def find_to_confirm(
        self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation], n: int
    ) -> list[Evaluation]:
        """Return the n best, and what was confirmed before; only the n best if n has changed since the last session."""
        best = self.select_best(evaluations, n)
        if any(one.options.get("top_n", n) != n for one in self.manifest.sessions[-2:]):
            return best
        ended = {
            one.confirms
            for one in self.confirmation_plan.select_planned([one for one in confirmations if one.is_finished])
        }
        # An individual with fewer seeds was not among the best of a later session.
        seeds = Counter(
            one.confirms for one in self.confirmation_plan.select_planned(confirmations) if one.confirms in ended
        )
        others = [trial for trial, count in seeds.items() if trial is not None and count == max(seeds.values())]
        return [*best, *(evaluations[trial] for trial in others if evaluations[trial] not in best)]

    def has_confirmations(self) -> bool:
        """Tell whether the study of the evaluations that confirm the best exists."""
        return self.manifest.confirmation_study in list_studies(self.storage, self.patience)

    def create_confirmations(self, space: SearchSpace) -> None:
        """Make the study of the evaluations that confirm the best, unless it exists."""
        name = self.manifest.confirmation_study
        begun = self.open_confirmations() if self.has_confirmations() else None
        if begun is None or not ("space" in begun.read_attributes() or begun.read_evaluations()):
            run = self.manifest
            Record.create(self.storage, name, space.describe(), confirms=run.study, objectives=run.objectives)


def enter_run_dir(run_dir: Path | None, name: str, resume: bool, held: ExitStack) -> RunDir:
    """Make or find the run directory, return it, and keep other runs out of it for as long as `held` is open.

    A new one has the name of the search space file.
    """
    entered = RunDir(run_dir) if run_dir else make_run_dir(name)
    try:
        entered.path.mkdir(parents=True, exist_ok=True)
        held.enter_context(entered.hold_lock())
    except OSError as error:
        place = error.filename or entered.path
        raise UsageError(f"--run-dir {entered.path}: {place} cannot be used: {error.strerror}") from error
    entered.check_usable(resume)  # again: another run may have used it since
    return entered


def begin_session(run_dir: RunDir, request: RunRequest, hosts: Sequence[str]) -> Session:
    """Make the run's study, or take up that of earlier sessions, and return the session; needs `enter` first."""
    problem, before = request.problem, request.previous
    manifest = _make_manifest(run_dir, request, hosts)
    session = Session(run_dir, _locate_storage(run_dir, request), manifest)
    _check_storage(session, resumes=before is not None)
    taken_up = _resume_study(session, problem.space) if before else _create_study(session, problem.space)
    earlier = before.sessions if before else ()
    options = collect_options(request)
    this = dataclasses.replace(
        keep_source(run_dir, problem.file, earlier, manifest.started), options=options, settings=manifest.settings
    )
    manifest = dataclasses.replace(manifest, sessions=(*earlier, this))
    session = dataclasses.replace(session, manifest=manifest)
    lines = [
        f"{problem.file.path.stem}: {manifest.budget} evaluations on {request.layout}, "
        f"{format_count(len(hosts), 'host')}; "
        f"{', '.join(manifest.propagators[: request.layout.islands])}; seed {manifest.seed}",
        f"in {run_dir.path}{taken_up}",
        *describe_source_changes(run_dir, problem.file, earlier, this),
        *describe_changes(earlier[-1].options if earlier else {}, options),
        *describe_setting_changes(before.settings if before else {}, "before", manifest.settings, "now"),
    ]
    if request.options.checkpoint_every != math.inf:
        lines += filter(
            None, [CheckpointStore(run_dir.checkpoints).describe_shortage(_count_most_checkpoints(request))]
        )
    with convert_storage_errors(session.storage):
        evaluations = session.open_record().read_evaluations()
        lines += filter(None, [describe_blind_spot(request.pruner, manifest.objectives, evaluations)])
        write_json(run_dir.run_json, manifest.to_json())
        lines += _enqueue_given(session, request)
    return dataclasses.replace(session, headline="\n".join(lines))


def _count_most_checkpoints(request: RunRequest) -> int:
    """Return how many states there may be at once: the next one of each worker is written beside its last."""
    halving = HALVING_SCHEDULES.get(request.pruner)
    kept = PARENTS_PER_ISLAND * request.layout.islands if request.pbt else 0
    paused = halving.compute_max_paused(request.budget, request.problem.file.objectives) if halving else 0
    return 2 * request.layout.workers + kept + paused


def _locate_storage(run_dir: RunDir, request: RunRequest) -> str:
    """Return where the study is, with the password that is needed to open it."""
    storage = request.storage or run_dir.journal.name
    if has_hidden_password(storage):
        raise UsageError(f"{run_dir.path} keeps its study in {storage}: give --storage URL again, with the password")
    return run_dir.locate_storage(storage)


def _make_manifest(run_dir: RunDir, request: RunRequest, hosts: Sequence[str]) -> Manifest:
    """Return the manifest for run.json, but for the version of the search space file in this session."""
    problem, before, source = request.problem, request.previous, request.warm_start
    storages = (request.options.storage, request.options.warm_start)
    return Manifest(
        search_space=str(problem.file.path),
        space=problem.space.describe(),
        layout=request.layout,
        hosts=tuple(hosts),
        versions=read_versions(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        settings=problem.setting_values,
        set=request.setting_texts,
        budget=request.budget,
        seed=request.seed,
        propagators=request.propagators,
        pruner=request.pruner,
        confirm_seeds=request.confirm_seeds,
        pbt=request.pbt,
        objectives=problem.file.objectives,
        warm_start=source.source if source is not None else before.warm_start if before else None,
        storage=mask_password(request.storage or run_dir.journal.name),
        study=before.study if before else run_dir.study_name,
        sessions=(),
        command=shlex.join(_remove_passwords(sys.argv, *storages)),
    )


def _check_storage(session: Session, resumes: bool) -> None:
    """Raise a UsageError where the storage cannot be used; one that is away is waited for, on resuming."""
    storage, study = session.storage, session.manifest.study
    if resumes and is_url(storage) and not is_storage_missing(storage):
        with convert_storage_errors(storage):
            StorageRetry(mask_password(storage), warn).call(partial(list_studies, storage))
    if session.manifest.confirm_seeds:
        open_confirmations(storage, study)  # raises where that study is another run's


def _create_study(session: Session, space: SearchSpace) -> str:
    """Make the study of a new run, unless a session that was killed before it wrote run.json has made it."""
    run_dir, storage, study = session.run_dir, session.storage, session.manifest.study
    run_dir.remove_stale_files()
    record = open_study(storage, study)
    if record is None and not has_no_study(run_dir.journal):
        raise UsageError(f"{run_dir.journal} is not the study of a run: name another --run-dir")
    if record is None or not (record.read_attributes().get("space") or record.read_evaluations()):
        with convert_storage_errors(storage):
            Record.create(storage, study, space.describe(), objectives=session.manifest.objectives)
    elif record.read_evaluations() or record.read_attributes().get("space") != space.describe():
        missing = f"{run_dir.run_json} is missing; restore it, or " if run_dir.journal.exists() else ""
        raise UsageError(
            f"{mask_password(storage)} already holds a study named {study!r}: {missing}"
            "name another --run-dir, since a study has the name of its run directory"
        )
    return ""


def _resume_study(session: Session, space: SearchSpace) -> str:
    """Prepare the record of an earlier session for this one, and return a text on what is in it."""
    run_dir, storage, study = session.run_dir, session.storage, session.manifest.study
    run_dir.remove_stale_files()
    record = open_existing_study(run_dir, storage, study)
    if record.read_attributes().get("space") != space.describe():
        raise UsageError(
            f"the study {study!r} in {mask_password(storage)} is of another search space than "
            f"{run_dir.run_json} says: one of them is not this run's"
        )
    check_objectives(record, session.manifest, run_dir)
    _check_trials(record, session, space)
    _check_heirs(record, session)
    with convert_storage_errors(storage):
        record.requeue_interrupted(run_dir.previous_crashed)
        confirmations = open_study(storage, session.manifest.confirmation_study)
        if confirmations and confirmations.read_attributes().get("confirms") == study:
            confirmations.requeue_interrupted(run_dir.previous_crashed)
    CheckpointStore(run_dir.checkpoints).remove_all_except(
        record.find_resumable_roots() | session.find_roots_to_inherit(record)
    )
    CheckpointStore(run_dir.checkpoints, CONFIRMATION_PREFIX).remove_all_except(
        confirmations.find_resumable_roots() if confirmations else set()
    )
    own = [evaluation for evaluation in record.read_evaluations() if not evaluation.imported_from]
    waiting = [evaluation for evaluation in own if evaluation.state == "waiting"]
    finished = sum(evaluation.is_finished for evaluation in own)
    late = sum(evaluation.crash_count > 1 for evaluation in waiting)
    first = f"; {len(waiting) - late} that wait will be evaluated first" if len(waiting) > late else ""
    last = f"; {late} that may have killed the job twice, alone at the end" if late else ""
    return f": going on after {format_count(finished, 'evaluation')}{first}{last}"


def _check_trials(record: Record, session: Session, space: SearchSpace) -> None:
    """Raise a UsageError unless all trials are of a search space: propagators learn from them."""
    evaluations = record.read_evaluations()
    for evaluation, misfit in zip(evaluations, find_misfits(evaluations, space), strict=True):
        if misfit:
            hint = f"; if this constraint is new, start another run with --warm-start {session.run_dir.path}"
            raise UsageError(
                f"{mask_password(session.storage)}: {misfit}{'' if space.allows(evaluation.params) else hint}"
            )


def _check_heirs(record: Record, session: Session) -> None:
    """Raise a UsageError for options that make no sense with evaluations of any session that inherit."""
    heir = next((one for one in record.read_evaluations() if one.inherits is not None), None)
    if heir is not None:
        inherits = f"trial {heir.trial}, which inherits from trial {heir.inherits},"
        another = f"start another run with --warm-start {session.run_dir.path}"
        check_with_heirs(session.manifest.pruner, session.manifest.confirm_seeds, inherits, another)


def _enqueue_given(session: Session, request: RunRequest) -> list[str]:
    """Record what a person gives the run to start with, as far as it is new, and return lines that tell of it."""
    record, space, manifest = session.open_record(), request.problem.space, session.manifest
    lines: list[str] = []
    if request.warm_start is not None:
        lines = record_warm_start(request.warm_start, record, space, request.layout, manifest.settings)
    elif manifest.warm_start is not None and manifest.warm_start not in record.read_attributes().get("taken_over", []):
        lines = [f"only a part of {manifest.warm_start} was taken over: give --warm-start again for the rest"]
    known = [evaluation.params for evaluation in record.read_evaluations()] if request.enqueued else []
    for params in request.enqueued:
        if params not in known:
            record.enqueue(params, space.make_distributions(), propagator="--enqueue")
    return lines


def _remove_passwords(arguments: Sequence[str], *storages: str | None) -> list[str]:
    for storage in filter(None, storages):
        arguments = [argument.replace(storage, mask_password(storage)) for argument in arguments]
    return list(arguments)
