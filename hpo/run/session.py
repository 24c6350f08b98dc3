"""A session: one start of a run, on the first rank.

It enters the run directory, creates or resumes the study, and writes run.json. Later, it selects
the checkpoints to keep, and the individuals to confirm.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from hpo.errors import UsageError
from hpo.evaluation.host import RankPlace, choose_backend, describe_gpus, has_separated_worker
from hpo.layout import describe_spanning_workers
from hpo.options import to_json
from hpo.process.launcher import find_launch_words
from hpo.process.standard_streams import warn
from hpo.results.confirmation import ConfirmationPlan, make_plan
from hpo.run.initial_evaluations import describe_setting_changes, find_misfits, record_warm_start
from hpo.run.request import RunRequest, check_with_heirs
from hpo.run.resolve_options import describe_changes, describe_worker_size
from hpo.run.source_versions import describe_source_changes, keep_source
from hpo.space import SearchSpace
from hpo.space.parameters import describe_priors
from hpo.store.cached_storage import CachedStorage
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX, Evaluation
from hpo.store.inheritance import PARENTS_PER_ISLAND, find_trials_to_keep
from hpo.store.manifest import Manifest
from hpo.store.pareto_front import select_top
from hpo.store.pruning import HALVING_SCHEDULES, describe_blind_spot
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, make_run_dir, write_json
from hpo.store.storage import StorageRetry, list_studies, open_storage
from hpo.store.storage_url import has_hidden_password, is_url, mask_password
from hpo.store.study import (
    check_objectives,
    convert_storage_errors,
    create_study,
    is_storage_missing,
    open_confirmations,
    open_existing_study,
    open_study,
)
from hpo.text_format import format_count
from hpo.versions import read_versions


@dataclass(frozen=True)
class Session:
    """A session: one start of a run, which may resume an earlier one, on the first rank."""

    run_dir: RunDir
    storage: str
    """The storage of the study, with its password."""
    manifest: Manifest
    headline: str = ""
    """The lines that are printed when the session begins."""
    patience: StorageRetry | None = None
    """Repeats accesses to an unavailable storage. None: they fail."""

    @property
    def confirmation_plan(self) -> ConfirmationPlan:
        """The plan to confirm the best with other seeds."""
        return make_plan(self.manifest)

    def open_record(self) -> Record:
        """Open the study of the search to read it. Each process and thread needs its own record."""
        return Record(self.storage, self.manifest.study, self.patience)

    def open_confirmations(self) -> Record:
        """Open the study that confirms the best. `create_confirmations` must have created it."""
        return Record(self.storage, self.manifest.confirmation_study, self.patience)

    def open_cached_storage(self, study: str) -> CachedStorage:
        """Open the storage for the only writer of a study: of the search, or its confirmations."""
        storage = open_storage(self.storage, self.patience)
        return CachedStorage(storage, storage.get_study_id_from_name(study), self.patience)

    def find_roots_to_inherit(self, record: Record) -> set[int]:
        """Return the individuals whose checkpoints must be kept, since others can inherit them."""
        if not self.manifest.pbt:
            return set()
        islands = self.manifest.layout.islands
        return record.find_roots(find_trials_to_keep(record.read_evaluations(), islands))

    def find_to_confirm(
        self,
        evaluations: Sequence[Evaluation],
        confirmations: Sequence[Evaluation],
    ) -> list[Evaluation]:
        """Return the evaluations to confirm with other seeds.

        These are the --top-n best, those of --confirm-trials that have a loss, and the individuals
        that earlier sessions confirmed. If --top-n has changed since the previous session, the last
        are left out.
        """
        options = self.manifest.sessions[-1].options
        n = options["top_n"]
        trials = options["confirm_trials"]
        best = select_top(evaluations, n, self.manifest.objectives)
        best += [
            evaluation
            for evaluation in evaluations
            if evaluation.trial in trials
            and evaluation.state in ("complete", "pruned")
            and evaluation not in best
        ]
        if any(session.options.get("top_n", n) != n for session in self.manifest.sessions[-2:]):
            return best
        plan = self.confirmation_plan
        finished = [confirmation for confirmation in confirmations if confirmation.is_finished]
        confirmed = {confirmation.confirms for confirmation in plan.select_planned(finished)}
        planned = plan.select_planned(confirmations)
        # An individual with fewer seeds was not among the best of a later session.
        seeds = Counter(one.confirms for one in planned if one.confirms in confirmed)
        most = max(seeds.values(), default=0)
        earlier = [trial for trial, count in seeds.items() if trial is not None and count == most]
        others = [evaluations[trial] for trial in earlier]
        return [*best, *(evaluation for evaluation in others if evaluation not in best)]

    def has_confirmations(self) -> bool:
        """Return whether the study that confirms the best exists."""
        return self.manifest.confirmation_study in list_studies(self.storage, self.patience)

    def read_confirmations(self) -> list[Evaluation]:
        """Return the confirmations of all sessions of this run."""
        record = self.open_confirmations() if self.has_confirmations() else None
        # The study of this name may belong to another run.
        if record is None or record.read_attributes().get("confirms") != self.manifest.study:
            return []
        return record.read_evaluations()

    def create_confirmations(self, space: SearchSpace) -> None:
        """Create the study that confirms the best, unless it exists."""
        name = self.manifest.confirmation_study
        if self.has_confirmations():
            existing = self.open_confirmations()
            if "space" in existing.read_attributes() or existing.read_evaluations():
                return
        run = self.manifest
        Record.create(
            self.storage, name, space.describe(), confirms=run.study, objectives=run.objectives
        )


def enter_run_dir(run_dir: Path | None, name: str, resume: bool, resources: ExitStack) -> RunDir:
    """Create the run directory if needed, and lock it, so that no other run uses it.

    Args:
        run_dir: The path of the directory. None: a new directory in runs/.
        name: The name of the search file, from which the name of a new directory is made.
        resources: Holds the lock until it is closed.
    """
    entered = RunDir(run_dir) if run_dir else make_run_dir(name)
    try:
        entered.path.mkdir(parents=True, exist_ok=True)
        resources.enter_context(entered.hold_lock())
    except OSError as error:
        path = error.filename or entered.path
        raise UsageError(
            f"--run-dir {entered.path}: {path} cannot be used: {error.strerror}"
        ) from error
    entered.check_usable(resume)  # Another run may have used it since the first check.
    return entered


def begin_session(run_dir: RunDir, request: RunRequest, places: Sequence[RankPlace]) -> Session:
    """Create the study of a run, or prepare it to resume the run, and write run.json.

    `enter_run_dir` has locked the run directory. Raises UsageError if the study cannot be used, or
    belongs to another run.
    """
    problem = request.problem
    before = request.previous
    hosts = list({place.host: place.host_name for place in places}.values())
    manifest = _make_manifest(run_dir, request, hosts)
    storage = request.storage or run_dir.journal.name
    if has_hidden_password(storage):
        raise UsageError(
            f"the study of {run_dir.path} is in {storage}: give --storage URL again, "
            "with the password"
        )
    session = Session(run_dir, run_dir.locate_storage(storage), manifest)
    _check_storage(session, resumes=before is not None)
    progress = ""
    if before is None:
        create_study(run_dir, session.storage, manifest)
    else:
        progress = _resume_study(session, request)
    earlier = before.sessions if before else ()
    entry = dataclasses.replace(
        keep_source(run_dir, problem.file, earlier, manifest.started),
        options=to_json(request.options),
        settings=manifest.settings,
        layout=str(manifest.layout),
    )
    manifest = dataclasses.replace(manifest, sessions=(*earlier, entry))
    session = dataclasses.replace(session, manifest=manifest)
    lines = [
        *_describe_run(session, request, places, progress),
        *describe_source_changes(run_dir, problem.file, earlier, entry),
        describe_worker_size(before.layout, manifest.layout) if before else "",
        *describe_changes(earlier[-1].options if earlier else {}, entry.options),
        *describe_setting_changes(
            before.settings if before else {}, "before", manifest.settings, "now"
        ),
    ]
    if request.options.checkpoint_every != math.inf:
        most = _count_most_checkpoints(request)
        lines.append(CheckpointStore(run_dir.checkpoints).describe_shortage(most))
    with convert_storage_errors(session.storage):
        evaluations = session.open_record().read_evaluations()
        lines.append(describe_blind_spot(manifest.pruner, manifest.objectives, evaluations))
        write_json(run_dir.run_json, manifest.to_json())
        lines += _enqueue_given(session, request)
    return dataclasses.replace(session, headline="\n".join(filter(None, lines)))


def _describe_run(
    session: Session, request: RunRequest, places: Sequence[RankPlace], progress: str
) -> list[str]:
    """Return lines about the ranks, devices and directory of a run, with warnings about them."""
    manifest = session.manifest
    layout = request.layout
    hosts = [place.host for place in places]
    gpus = [place.gpus for place in places]
    worker_gpus = [
        [gpus[rank] for rank in layout.list_ranks(worker)] for worker in range(layout.workers)
    ]
    devices = describe_gpus(gpus, list(map(choose_backend, worker_gpus)))
    warning = (
        "warning: ranks of one worker see different GPUs, so NVLink between these GPUs may not be "
        "used. Request srun --gpus-per-node=N --gpu-bind=none"
    )
    budget = format_count(manifest.budget, "evaluation")
    return [
        f"{request.problem.file.path.stem}: {budget} on {layout}, "
        f"{format_count(len(manifest.hosts), 'host')}, {devices}; "
        f"{', '.join(manifest.propagators[: layout.islands])}; seed {manifest.seed}",
        f"in {session.run_dir.path}{progress}",
        describe_spanning_workers(hosts, layout.ranks_per_worker),
        warning if has_separated_worker(layout, hosts, gpus) else "",
    ]


def _count_most_checkpoints(request: RunRequest) -> int:
    # Each worker needs space for two, since its next checkpoint is complete before the last one is
    # removed.
    options = request.options
    halving = HALVING_SCHEDULES.get(options.pruner)
    kept = PARENTS_PER_ISLAND * request.layout.islands if options.pbt else 0
    paused = 0
    if halving:
        objectives = request.problem.file.objectives
        paused = halving.compute_max_paused(options.evaluations, objectives)
    return 2 * request.layout.workers + kept + paused


def _make_manifest(run_dir: RunDir, request: RunRequest, hosts: Sequence[str]) -> Manifest:
    """Return the manifest for run.json, still without its list of sessions."""
    problem = request.problem
    before = request.previous
    options = request.options
    script = problem.file.script
    warm_start = before.warm_start if before else None
    if request.warm_start is not None:
        warm_start = request.warm_start.source
    arguments = sys.argv
    for storage in filter(None, (options.storage, options.warm_start)):  # Without passwords.
        arguments = [argument.replace(storage, mask_password(storage)) for argument in arguments]
    return Manifest(
        search_space=str(problem.file.path),
        space=problem.space.describe(),
        priors=describe_priors(problem.space.parameters),
        layout=request.layout,
        hosts=tuple(hosts),
        versions=read_versions(),
        started=datetime.now().astimezone().isoformat(timespec="microseconds"),
        settings=problem.setting_values,
        set=request.setting_texts,
        budget=options.evaluations,
        seed=options.seed,
        propagators=options.propagators,
        pruner=options.pruner,
        confirm_seeds=options.confirm_seeds,
        lacks_seed=script is not None and not script.has_placeholder("seed"),
        pbt=options.pbt,
        objectives=problem.file.objectives,
        warm_start=warm_start,
        storage=mask_password(request.storage or run_dir.journal.name),
        study=before.study if before else run_dir.study_name,
        sessions=(),
        command=shlex.join(arguments),
        launcher=shlex.join(find_launch_words(os.environ, request.layout.ranks)),
    )


def _check_storage(session: Session, resumes: bool) -> None:
    """Raise a UsageError if the storage cannot be used. A resumed run waits for it."""
    storage = session.storage
    study = session.manifest.study
    if resumes and is_url(storage) and not is_storage_missing(storage):
        with convert_storage_errors(storage):
            StorageRetry(mask_password(storage), warn).call(partial(list_studies, storage))
    if session.manifest.confirm_seeds:
        # It raises an error if that study belongs to another run.
        open_confirmations(storage, study)


def _resume_study(session: Session, request: RunRequest) -> str:
    """Prepare the study of an earlier session, and return a text about its progress."""
    space = request.problem.space
    run_dir = session.run_dir
    storage = session.storage
    study = session.manifest.study
    run_dir.remove_stale_files()
    record = open_existing_study(run_dir, storage, study)
    if record.read_attributes().get("space") != space.describe():
        raise UsageError(
            f"the study {study!r} in {mask_password(storage)} has another search space than "
            f"{run_dir.run_json}: one of them belongs to another run"
        )
    check_objectives(record, session.manifest, run_dir)
    _check_trials(record, session, space)
    heirs = [
        evaluation for evaluation in record.read_evaluations() if evaluation.inherits is not None
    ]
    if heirs:
        reason = f"trial {heirs[0].trial}, which inherits from trial {heirs[0].inherits},"
        remedy = f"start another run with --warm-start {run_dir.path}"
        check_with_heirs(session.manifest.pruner, session.manifest.confirm_seeds, reason, remedy)
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
    how = "run first"
    if any(evaluation.crash_count == 1 for evaluation in waiting):
        how = "run, a few at a time, since one may have crashed the job"
    ready = len(waiting) - late
    left = max(0, session.manifest.budget - finished)
    first = ""
    if ready > left:
        first = f"; {ready} waiting, of which the budget allows {left}"
    elif ready:
        first = f"; {ready} waiting will {how}"
    last = f"; {late} that may have crashed the job twice will run alone at the end" if late else ""
    return f": resumed after {format_count(finished, 'evaluation')}{first}{last}"


def _check_trials(record: Record, session: Session, space: SearchSpace) -> None:
    """Raise a UsageError if the space excludes a recorded trial: propagators learn from all."""
    evaluations = record.read_evaluations()
    for evaluation, misfit in zip(evaluations, find_misfits(evaluations, space), strict=True):
        if misfit:
            hint = ""
            if not space.allows(evaluation.params):
                hint = "; if this constraint is new, start another run with --warm-start "
                hint += str(session.run_dir.path)
            raise UsageError(f"{mask_password(session.storage)}: {misfit}{hint}")


def _enqueue_given(session: Session, request: RunRequest) -> list[str]:
    """Record evaluations of --warm-start, --enqueue and priors. Return lines about the import."""
    record = session.open_record()
    space = request.problem.space
    manifest = session.manifest
    source = manifest.warm_start
    lines: list[str] = []
    if request.warm_start is not None:
        lines = record_warm_start(
            request.warm_start, record, space, request.layout, manifest.settings
        )
    elif source is not None and source not in record.read_attributes().get("taken_over", []):
        lines = [
            f"only a part of {source} was imported. Give --warm-start again to import the rest"
        ]
    recorded = record.read_evaluations()
    known = [evaluation.params for evaluation in recorded]
    for params in request.enqueued:
        if params not in known:
            record.enqueue(params, space.make_distributions(), propagator="--enqueue")
    expected = {name: value for name, value in request.prior_params.items() if name in space.priors}
    # Parameters without a prior may have any values.
    given = [*known, *request.enqueued]
    is_known = any(params.items() >= expected.items() for params in given)
    own = sum(not evaluation.imported_from for evaluation in recorded)
    if expected and not is_known and own + len(request.enqueued) < manifest.budget:
        record.enqueue(request.prior_params, space.make_distributions(), propagator="priors")
    return lines
