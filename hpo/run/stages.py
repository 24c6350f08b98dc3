"""What a run does once everything is ready: it searches, confirms what it has found, and reports; on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from hpo.breeding.islands import Archipelago
from hpo.evaluation.evaluator import Evaluator, Task
from hpo.evaluation.group import Group
from hpo.evaluation.growing import Growing
from hpo.evaluation.leader import Leader, Limits, target_reached
from hpo.evaluation.pruning import make_pruner
from hpo.evaluation.saver import Saver
from hpo.evaluation.teams import Teams
from hpo.process.printed import warn
from hpo.ranks.agreement import on_first
from hpo.ranks.job import Job
from hpo.ranks.offers import Offers
from hpo.report.progress import Progress
from hpo.run.conclusion import Conclusion
from hpo.run.handover import hand_over
from hpo.run.options import Options
from hpo.run.session import Session
from hpo.store.log import Log
from hpo.store.outage import Patience
from hpo.store.record import Record
from hpo.store.run_dir import RunDir
from hpo.store.rungs import HALVINGS, Halving
from hpo.store.states import States
from hpo.store.trials import CONFIRMING
from hpo.store.url import without_password
from hpo.store.weights import FrontKeeper, WeightsKeeper
from hpo.text import counted
from hpo.trackers.tracking import Tracking

_NICENESS_OF_TRACKERS = 5  # ranks come first: one of them may have the same core
_SECONDS_FOR_TRACKERS = 10.0
_SECONDS_FOR_TRACKERS_AT_A_STOP = 3.0  # the watch ends a run that has not stopped after 7 s


class Stages:
    """The stages of a run, each to be gone through by all ranks of the job together."""

    def __init__(
        self, options: Options, job: Job, session: Session, task: Task, group: Group, teams: Teams | None
    ) -> None:
        self._options = options
        self._job = job
        self._task = task
        self._group = group
        self._teams = teams
        self._files = RunDir(session.run_dir.path.absolute())  # absolute: objectives may change the directory
        self._timeout = options.evaluation_timeout or math.inf
        self._target = -math.inf if options.target_loss is None else options.target_loss
        say = warn if job.is_first else lambda _: None
        patience = Patience(without_password(session.storage), say, self._cannot_wait)
        self._session = replace(session, patience=patience)
        self._conclusion = Conclusion(
            self._session, lambda: job.watch.stopping, job.started, options.top_n, self._target, task.problem.space
        )
        if job.is_first:
            job.watch.speak_for_the_run(self._files.sign_off, self._conclusion.last_words)
            print(session.headline, flush=True)
        trackers = options.trackers if job.is_first else ()
        self._tracking = Tracking(trackers, session.run_dir.path, niceness=_NICENESS_OF_TRACKERS)
        self._tracking.follow(session.storage, session.manifest.study)

    def search(self) -> None:
        """Search until the budget is spent or the target reached, unless one of them is so already."""
        if on_first(self._job.world, self._conclusion.is_search_over):
            return
        session, run, space = self._session, self._session.manifest, self._task.problem.space
        options, leader, claims, growing = self._options, None, None, None
        if self._group.rank == 0:
            record, halving = session.open_record(), HALVINGS.get(run.pruner)
            claims = session.claims(record, space, run.budget, self._is_stopping, halving)
            growing = self._growing(record, halving)
            limits = Limits(self._timeout, options.max_failures, self._target, make_pruner(run.pruner, run.budget))
            keeper = self._keeper(record)
            saver = Saver(States(self._files.states), options.save_every, run.layout.islands if run.inherit else 0)
            leader = Leader(record, Log(self._files.printed), limits, self._job.watch.stop, keeper, saver)
        exchange = (options.migration_probability, options.pollination)
        islands = Archipelago(space, run.layout, run.propagators, *exchange, run.seed, run.inherit, run.objectives)
        with self._progress(session.open_record, run.budget):
            islands.evolve(self._job.world, self._group.index, claims, self._evaluator(leader, growing))
        if growing:
            growing.close()

    def confirm(self) -> None:
        """Train the best again with other seeds, where that is asked for and the search is at its end."""
        self._job.watch.forget(target_reached(self._target))  # it ends the search, but not the confirmation
        total = on_first(self._job.world, self._begin_confirmations) if self._session.plan.count else 0
        if not total:
            return
        session, leader, claims, growing = self._session, None, None, None
        if self._group.rank == 0:
            record = session.open_confirmations()
            claims = session.claims(record, self._task.problem.space, total, self._is_stopping)
            log = Log(partial(self._files.printed, confirms=True))
            saver = Saver(States(self._files.states, CONFIRMING), self._options.save_every)
            leader = Leader(record, log, Limits(self._timeout), self._job.watch.stop, saver=saver)
            growing = self._growing(record)
        evaluate = self._evaluator(leader, growing)
        place = {"island": session.manifest.layout.island_of(self._group.index), "worker": self._group.index}
        with self._progress(session.open_confirmations, total):
            self._job.world.barrier()  # what ends before the first rank follows the record would not be shown
            while evaluate(partial(claims.claim_waiting, **place) if claims else None) is not None:
                pass
            self._job.world.barrier()
        if growing:
            growing.close()

    def end(self) -> int:
        """Print the summary, test the winner, write the report, wait for trackers, and return the exit status."""
        self._tracking.finish()
        status, stopping = self._conclusion.say(), self._job.watch.stopping
        self._tidy()
        session = self._session
        hand_over(session.run_dir.path, session.storage, self._task.problem, to_test=stopping is None)
        self._tracking.wait(_SECONDS_FOR_TRACKERS if stopping is None else _SECONDS_FOR_TRACKERS_AT_A_STOP)
        return status

    def _tidy(self) -> None:
        """Remove the states of a search that is over; what is to go on keeps its own."""
        states = States(self._files.states)
        if self._conclusion.is_search_done:
            states.sweep(self._session.roots_to_inherit(self._session.open_record()))
        states.leave()

    def _keeper(self, record: Record) -> WeightsKeeper:
        files, run = self._files, self._session.manifest
        if run.objectives.are_several:
            return FrontKeeper(files.weights, files.front, record, run.settings)
        return WeightsKeeper(files.weights, record, run.settings)

    def _evaluator(self, leader: Leader | None, growing: Growing | None) -> Evaluator:
        return Evaluator(self._task, self._group, self._job, leader, self._teams, growing)

    def _growing(self, record: Record, halving: Halving | None = None) -> Growing | None:
        """Return what lets workers help each other, where they do; on leaders."""
        if self._teams is None or self._teams.leaders is None:
            return None
        return Growing(Offers(self._teams.leaders, self._is_stopping), record, halving)

    def _progress(self, opened: Callable[[], Record], budget: int) -> AbstractContextManager[object]:
        """Return what prints a record's news inside ``with``: on the first rank, from a thread with its own record."""
        if not self._job.is_first:
            return nullcontext()
        objectives = self._session.manifest.objectives
        return Progress(opened().news, budget, on_error=self._job.watch.die, objectives=objectives)

    def _is_stopping(self) -> bool:
        return self._job.watch.stopping is not None

    def _cannot_wait(self) -> bool:
        return self._is_stopping() or self._job.watch.is_own_thread

    def _begin_confirmations(self) -> int:
        """Return the number of evaluations that confirm the best; 0 where there is nothing to do, or no time for it."""
        session, space = self._session, self._task.problem.space
        best = session.top(session.open_record().evaluations(), self._options.top_n)
        if self._is_stopping() or not best:
            return 0
        session.create_confirmations(space)
        record = session.open_confirmations()
        to_do = session.plan.to_do(best, record.evaluations())
        total = session.plan.begin(record, best, space)
        self._tracking.follow(session.storage, session.manifest.confirming_study)
        if not to_do:
            return 0
        seeds = counted(session.plan.count, "other seed")
        print(f"confirming the best with {seeds} each: {to_do} evaluations", flush=True)
        return total
