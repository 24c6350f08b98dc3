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
from hpo.process.printed import warn
from hpo.results.confirmation import Plan, plan_of
from hpo.run.request import Request, check_with_heirs
from hpo.run.session_options import describe_changes, find_options
from hpo.run.source import changes, keep
from hpo.run.takeover import differences, find_misfits, take_over
from hpo.space import SearchSpace
from hpo.store.evaluations import CONFIRMING, Evaluation
from hpo.store.front import top
from hpo.store.journal import is_begun
from hpo.store.lineage import KEPT, to_keep
from hpo.store.manifest import Manifest
from hpo.store.mirror import Mirror
from hpo.store.outage import Patience
from hpo.store.pruning import describe_blind_spot
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, fresh_run_dir, write_json
from hpo.store.rungs import HALVINGS
from hpo.store.states import States
from hpo.store.storage import open_storage, studies
from hpo.store.study import check_objectives, confirmations_of, existing_study, is_missing, mistakes, open_study
from hpo.store.url import is_hidden, is_remote, without_password
from hpo.text import counted
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
    patience: Patience | None = None

    @property
    def plan(self) -> Plan:
        """How the best are confirmed."""
        return plan_of(self.manifest)

    def open_record(self) -> Record:
        """Open the record to read it; each process and thread needs one of its own."""
        return Record(self.storage, self.manifest.study, self.patience)

    def open_confirmations(self) -> Record:
        """Open the record of the evaluations that confirm the best, which `create_confirmations` has made."""
        return Record(self.storage, self.manifest.confirming_study, self.patience)

    def own_record(self, study: str) -> tuple[Record, Mirror]:
        """Open the record, or that of the confirmations, for the one who writes it, and the mirror that shows it."""
        storage = open_storage(self.storage, self.patience)
        mirror = Mirror(storage, storage.get_study_id_from_name(study), self.patience)
        return Record(mirror, study), mirror

    def roots_to_inherit(self, record: Record) -> set[int]:
        """Return the first trials of the individuals whose states others inherit."""
        islands = self.manifest.layout.islands
        return record.roots(to_keep(record.evaluations(), islands)) if self.manifest.pbt else set()

    def top(self, evaluations: Sequence[Evaluation], n: int) -> list[Evaluation]:
        """Return the n best of these evaluations by the objectives of the run."""
        return top(evaluations, n, self.manifest.objectives)

    def find_to_confirm(
        self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation], n: int
    ) -> list[Evaluation]:
        """Return the n best, and what was confirmed before; only the n best if n has changed since the last session."""
        best = self.top(evaluations, n)
        if any(one.options.get("top_n", n) != n for one in self.manifest.sessions[-2:]):
            return best
        ended = {one.confirms for one in self.plan.of([one for one in confirmations if one.finished])}
        # An individual with fewer seeds was not among the best of a later session.
        seeds = Counter(one.confirms for one in self.plan.of(confirmations) if one.confirms in ended)
        others = [trial for trial, count in seeds.items() if trial is not None and count == max(seeds.values())]
        return [*best, *(evaluations[trial] for trial in others if evaluations[trial] not in best)]

    def has_confirmations(self) -> bool:
        """Tell whether the study of the evaluations that confirm the best exists."""
        return self.manifest.confirming_study in studies(self.storage, self.patience)

    def create_confirmations(self, space: SearchSpace) -> None:
        """Make the study of the evaluations that confirm the best, unless it exists."""
        name = self.manifest.confirming_study
        begun = self.open_confirmations() if self.has_confirmations() else None
        if begun is None or not ("space" in begun.about() or begun.evaluations()):
            run = self.manifest
            Record.create(self.storage, name, space.describe(), confirms=run.study, objectives=run.objectives)


def enter(run_dir: Path | None, name: str, resume: bool, held: ExitStack) -> RunDir:
    """Make or find the run directory, return it, and keep other runs out of it for as long as `held` is open.

    A new one has the name of the search space file.
    """
    entered = RunDir(run_dir) if run_dir else fresh_run_dir(name)
    try:
        entered.path.mkdir(parents=True, exist_ok=True)
        held.enter_context(entered.hold())
    except OSError as error:
        place = error.filename or entered.path
        raise UsageError(f"--run-dir {entered.path}: {place} cannot be used: {error.strerror}") from error
    entered.check(resume)  # again: another run may have used it since
    return entered


def begin(run_dir: RunDir, request: Request, hosts: Sequence[str]) -> Session:
    """Make the run's study, or take up that of earlier sessions, and return the session; needs `enter` first."""
    problem, before = request.problem, request.before
    manifest = _manifest(run_dir, request, hosts)
    session = Session(run_dir, _located(run_dir, request), manifest)
    _check_storage(session, resumes=before is not None)
    taken_up = _take_up(session, problem.space) if before else _create(session, problem.space)
    earlier = before.sessions if before else ()
    options = find_options(request)
    this = dataclasses.replace(
        keep(run_dir, problem.file, earlier, manifest.started), options=options, settings=manifest.settings
    )
    manifest = dataclasses.replace(manifest, sessions=(*earlier, this))
    session = dataclasses.replace(session, manifest=manifest)
    lines = [
        f"{problem.file.path.stem}: {manifest.budget} evaluations on {request.layout}, {counted(len(hosts), 'host')}; "
        f"{', '.join(manifest.propagators[: request.layout.islands])}; seed {manifest.seed}",
        f"in {run_dir.path}{taken_up}",
        *changes(run_dir, problem.file, earlier, this),
        *describe_changes(earlier[-1].options if earlier else {}, options),
        *differences(before.settings if before else {}, "before", manifest.settings, "now"),
    ]
    if request.options.checkpoint_every != math.inf:
        lines += filter(None, [States(run_dir.checkpoints).shortage(_most_states(request))])
    with mistakes(session.storage):
        evaluations = session.open_record().evaluations()
        lines += filter(None, [describe_blind_spot(request.pruner, manifest.objectives, evaluations)])
        write_json(run_dir.run_json, manifest.content())
        lines += _start_with(session, request)
    return dataclasses.replace(session, headline="\n".join(lines))


def _most_states(request: Request) -> int:
    """Return how many states there may be at once: the next one of each worker is written beside its last."""
    halving = HALVINGS.get(request.pruner)
    kept = KEPT * request.layout.islands if request.pbt else 0
    paused = halving.most_paused(request.budget, request.problem.file.objectives) if halving else 0
    return 2 * request.layout.workers + kept + paused


def _located(run_dir: RunDir, request: Request) -> str:
    """Return where the study is, with the password that is needed to open it."""
    storage = request.storage or run_dir.journal.name
    if is_hidden(storage):
        raise UsageError(f"{run_dir.path} keeps its study in {storage}: give --storage URL again, with the password")
    return run_dir.locate(storage)


def _manifest(run_dir: RunDir, request: Request, hosts: Sequence[str]) -> Manifest:
    """Return the manifest for run.json, but for the version of the search space file in this session."""
    problem, before, source = request.problem, request.before, request.takeover
    storages = (request.options.storage, request.options.warm_start)
    return Manifest(
        search_space=str(problem.file.path),
        space=problem.space.describe(),
        layout=request.layout,
        hosts=tuple(hosts),
        versions=read_versions(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        settings=problem.values,
        set=request.set,
        budget=request.budget,
        seed=request.seed,
        propagators=request.propagators,
        pruner=request.pruner,
        confirm_seeds=request.confirm_seeds,
        pbt=request.pbt,
        objectives=problem.file.objectives,
        warm_start=source.source if source is not None else before.warm_start if before else None,
        storage=without_password(request.storage or run_dir.journal.name),
        study=before.study if before else run_dir.study_name,
        sessions=(),
        command=shlex.join(_without_passwords(sys.argv, *storages)),
    )


def _check_storage(session: Session, resumes: bool) -> None:
    """Raise a UsageError where the storage cannot be used; one that is away is waited for, on resuming."""
    storage, study = session.storage, session.manifest.study
    if resumes and is_remote(storage) and not is_missing(storage):
        with mistakes(storage):
            Patience(without_password(storage), warn).call(partial(studies, storage))
    if session.manifest.confirm_seeds:
        confirmations_of(storage, study)  # raises where that study is another run's


def _create(session: Session, space: SearchSpace) -> str:
    """Make the study of a new run, unless a session that was killed before it wrote run.json has made it."""
    run_dir, storage, study = session.run_dir, session.storage, session.manifest.study
    run_dir.clear_locks()
    record = open_study(storage, study)
    if record is None and not is_begun(run_dir.journal):
        raise UsageError(f"{run_dir.journal} is not the study of a run: name another --run-dir")
    if record is None or not (record.about().get("space") or record.evaluations()):
        with mistakes(storage):
            Record.create(storage, study, space.describe(), objectives=session.manifest.objectives)
    elif record.evaluations() or record.about().get("space") != space.describe():
        missing = f"{run_dir.run_json} is missing; restore it, or " if run_dir.journal.exists() else ""
        raise UsageError(
            f"{without_password(storage)} already holds a study named {study!r}: {missing}"
            "name another --run-dir, since a study has the name of its run directory"
        )
    return ""


def _take_up(session: Session, space: SearchSpace) -> str:
    """Prepare the record of an earlier session for this one, and return a text on what is in it."""
    run_dir, storage, study = session.run_dir, session.storage, session.manifest.study
    run_dir.clear_locks()
    record = existing_study(run_dir, storage, study)
    if record.about().get("space") != space.describe():
        raise UsageError(
            f"the study {study!r} in {without_password(storage)} is of another search space than "
            f"{run_dir.run_json} says: one of them is not this run's"
        )
    check_objectives(record, session.manifest, run_dir)
    _check_trials(record, session, space)
    _check_heirs(record, session)
    with mistakes(storage):
        record.requeue_interrupted(run_dir.died)
        confirmations = open_study(storage, session.manifest.confirming_study)
        if confirmations and confirmations.about().get("confirms") == study:
            confirmations.requeue_interrupted(run_dir.died)
    States(run_dir.checkpoints).sweep(record.roots_to_go_on() | session.roots_to_inherit(record))
    States(run_dir.checkpoints, CONFIRMING).sweep(confirmations.roots_to_go_on() if confirmations else set())
    own = [evaluation for evaluation in record.evaluations() if not evaluation.imported_from]
    waiting = [evaluation for evaluation in own if evaluation.state == "waiting"]
    finished = sum(evaluation.finished for evaluation in own)
    late = sum(evaluation.crash_count > 1 for evaluation in waiting)
    first = f"; {len(waiting) - late} that wait will be evaluated first" if len(waiting) > late else ""
    last = f"; {late} that may have killed the job twice, alone at the end" if late else ""
    return f": going on after {counted(finished, 'evaluation')}{first}{last}"


def _check_trials(record: Record, session: Session, space: SearchSpace) -> None:
    """Raise a UsageError unless all trials are of a search space: propagators learn from them."""
    evaluations = record.evaluations()
    for evaluation, misfit in zip(evaluations, find_misfits(evaluations, space), strict=True):
        if misfit:
            new_rule = f"; if this rule is new, start another run with --warm-start {session.run_dir.path}"
            raise UsageError(
                f"{without_password(session.storage)}: {misfit}{'' if space.allows(evaluation.params) else new_rule}"
            )


def _check_heirs(record: Record, session: Session) -> None:
    """Raise a UsageError for options that make no sense with evaluations of any session that inherit."""
    heir = next((one for one in record.evaluations() if one.inherits is not None), None)
    if heir is not None:
        inherits = f"trial {heir.trial}, which inherits from trial {heir.inherits},"
        another = f"start another run with --warm-start {session.run_dir.path}"
        check_with_heirs(session.manifest.pruner, session.manifest.confirm_seeds, inherits, another)


def _start_with(session: Session, request: Request) -> list[str]:
    """Record what a person gives the run to start with, as far as it is new, and return lines that tell of it."""
    record, space, manifest = session.open_record(), request.problem.space, session.manifest
    lines: list[str] = []
    if request.takeover is not None:
        lines = take_over(request.takeover, record, space, request.layout, manifest.settings)
    elif manifest.warm_start is not None and manifest.warm_start not in record.about().get("taken_over", []):
        lines = [f"only a part of {manifest.warm_start} was taken over: give --warm-start again for the rest"]
    known = [evaluation.params for evaluation in record.evaluations()] if request.given else []
    for params in request.given:
        if params not in known:
            record.enqueue(params, space.distributions(), propagator="--enqueue")
    return lines


def _without_passwords(arguments: Sequence[str], *storages: str | None) -> list[str]:
    for storage in filter(None, storages):
        arguments = [argument.replace(storage, without_password(storage)) for argument in arguments]
    return list(arguments)
