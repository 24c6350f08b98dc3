"""What a run does once everything is ready: it searches, confirms what it has found, and reports; on all ranks."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from hpo.breeding.islands import Archipelago
from hpo.evaluation.evaluator import Evaluator
from hpo.evaluation.group import Group
from hpo.evaluation.growing import Growing
from hpo.evaluation.keeper import WeightsKeeper
from hpo.evaluation.leader import Leader, Limits, target_reached
from hpo.evaluation.saver import Saver
from hpo.evaluation.teams import Teams
from hpo.evaluation.testing import test_in_trainer
from hpo.process.printed import warn
from hpo.ranks.agreement import on_first
from hpo.ranks.job import Job
from hpo.ranks.offers import Offers
from hpo.report.progress import Progress
from hpo.run.conclusion import Conclusion
from hpo.run.handover import hand_over
from hpo.run.options import Options
from hpo.run.ready import Ready
from hpo.run.recording import recording
from hpo.run.session import Session
from hpo.store.claims import Claims
from hpo.store.heirs import Heirs
from hpo.store.log import Log
from hpo.store.outage import Patience
from hpo.store.pruning import make_pruner
from hpo.store.recorder import Line, Recorder
from hpo.store.rungs import HALVINGS
from hpo.store.states import States
from hpo.store.trials import CONFIRMING
from hpo.store.url import without_password
from hpo.store.weights import BestWeights
from hpo.store.writer import Writer
from hpo.text import counted
from hpo.trackers.tracking import Tracking

_NICENESS_OF_TRACKERS = 5  # ranks come first: one of them may have the same core
_SECONDS_FOR_TRACKERS = 10.0
_SECONDS_FOR_TRACKERS_AT_A_STOP = 3.0  # the watch ends a run that has not stopped after 7 s


class Stages:
    """The stages of a run, each to be gone through by all ranks of the job together."""

    def __init__(
        self, options: Options, job: Job, session: Session, ready: Ready, group: Group, teams: Teams | None
    ) -> None:
        self._options = options
        self._job = job
        self._ready = ready
        self._group = group
        self._teams = teams
        self._files = session.run_dir
        self._timeout = options.evaluation_timeout or math.inf
        self._target = -math.inf if options.target_loss is None else options.target_loss
        say = warn if job.is_first else lambda _: None
        patience = Patience(without_password(session.storage), say, self._cannot_wait)
        self._session = replace(session, patience=patience)
        self._conclusion = Conclusion(
            self._session, lambda: job.watch.stopping, job.started, options.top_n, self._target, ready.problem.space
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
        run, options, leader, growing = self._session.manifest, self._options, None, None
        exchange = (options.migration_probability, options.pollination)
        space = self._ready.problem.space
        islands = Archipelago(space, run.layout, run.propagators, *exchange, run.seed, run.objectives)
        with recording(self._job, self._search_writer) as (line, writer):
            recorder = self._recorder(line)
            if recorder:
                limits = Limits(self._timeout, options.max_failures, self._target, run.pruner != "none")
                saver = Saver(States(self._files.states), options.save_every, run.layout.islands if run.inherit else 0)
                keeper = WeightsKeeper(recorder, run.settings)
                leader = Leader(recorder, self._ready.slot, limits, self._job.watch.stop, keeper, saver)
                growing = self._growing(recorder)
            with self._progress(writer, run.budget):
                islands.evolve(self._job.world, self._group.index, recorder, self._evaluator(leader, growing))
        self._hear_of_stops()
        if growing:
            growing.close()

    def confirm(self) -> None:
        """Train the best again with other seeds, where that is asked for and the search is at its end."""
        self._job.watch.forget(target_reached(self._target))  # it ends the search, but not the confirmation
        total = on_first(self._job.world, self._begin_confirmations) if self._session.plan.count else 0
        if not total:
            return
        leader, growing, index = None, None, self._group.index
        place = {"island": self._session.manifest.layout.island_of(index), "worker": index}
        with recording(self._job, partial(self._confirmations_writer, total)) as (line, writer):
            recorder = self._recorder(line)
            if recorder:
                saver = Saver(States(self._files.states, CONFIRMING), self._options.save_every)
                leader = Leader(recorder, self._ready.slot, Limits(self._timeout), self._job.watch.stop, saver=saver)
                growing = self._growing(recorder)
            evaluate = self._evaluator(leader, growing)
            with self._progress(writer, total):
                self._job.world.barrier()  # what ends before the first rank follows the record would not be shown
                while evaluate(partial(recorder.claim_waiting, **place) if recorder else None) is not None:
                    pass
                if recorder:
                    recorder.settle()
                self._job.world.barrier()
        self._hear_of_stops()
        if growing:
            growing.close()

    def end(self) -> int:
        """Print the summary, test the winner, write the report, wait for trackers, and return the exit status."""
        self._tracking.finish()
        status, stopping = self._conclusion.say(), self._job.watch.stopping
        self._tidy()
        session, slot = self._session, self._ready.slot
        run_test = partial(test_in_trainer, slot.fork) if stopping is None else None
        hand_over(session.run_dir.path, session.storage, self._ready.problem, run_test)
        self._tracking.wait(_SECONDS_FOR_TRACKERS if stopping is None else _SECONDS_FOR_TRACKERS_AT_A_STOP)
        return status

    def _tidy(self) -> None:
        """Remove the states of a search that is over; what is to go on keeps its own."""
        states = States(self._files.states)
        if self._conclusion.is_search_done:
            states.sweep(self._session.roots_to_inherit(self._session.open_record()))
        states.leave()

    def _search_writer(self) -> Writer:
        """Return what writes the record of the search, on the first rank."""
        session, run, space = self._session, self._session.manifest, self._ready.problem.space
        record, mirror = session.own_record(run.study)
        halving = HALVINGS.get(run.pruner)
        return Writer(
            record,
            Claims(record, space.distributions(), run.budget, self._is_stopping, halving),
            Log(self._files.printed),
            States(self._files.states),
            mirror,
            pruner=make_pruner(run.pruner, run.budget),
            halving=halving,
            heirs=Heirs(record, space, run.layout.islands) if run.inherit else None,
            weights=BestWeights(self._files, run.objectives),
        )

    def _confirmations_writer(self, total: int) -> Writer:
        """Return what writes the record of so many evaluations that confirm the best, on the first rank."""
        session, space = self._session, self._ready.problem.space
        record, mirror = session.own_record(session.manifest.confirming_study)
        claims = Claims(record, space.distributions(), total, self._is_stopping)
        log = Log(partial(self._files.printed, confirms=True))
        return Writer(record, claims, log, States(self._files.states, CONFIRMING), mirror)

    def _recorder(self, line: Line) -> Recorder | None:
        """Return this worker's end of the line; None on all ranks but leaders."""
        if self._group.rank != 0:
            return None
        return Recorder(line, self._session.manifest.objectives, self._is_stopping)

    def _evaluator(self, leader: Leader | None, growing: Growing | None) -> Evaluator:
        ready, seed = self._ready, self._session.manifest.seed
        return Evaluator(ready.places, seed, self._group, self._job.watch, leader, self._teams, growing)

    def _growing(self, recorder: Recorder) -> Growing | None:
        """Return what lets workers help each other, where they do; on leaders."""
        if self._teams is None or self._teams.leaders is None:
            return None
        return Growing(Offers(self._teams.leaders, self._is_stopping), recorder)

    def _progress(self, writer: Writer | None, budget: int) -> AbstractContextManager[object]:
        """Return what prints the news that are durable inside ``with``, from a thread, on the first rank."""
        if writer is None:
            return nullcontext()
        objectives = self._session.manifest.objectives
        return Progress(writer.settled, budget, on_error=self._job.watch.die, objectives=objectives)

    def _hear_of_stops(self) -> None:
        """Let all ranks know why the run stops: who heard it may have ended it before its message came to others."""
        for stop in self._job.world.allgather(self._job.watch.stopping):
            if stop is not None:
                self._job.watch.stop(stop)

    def _is_stopping(self) -> bool:
        return self._job.watch.stopping is not None

    def _cannot_wait(self) -> bool:
        return self._is_stopping() or self._job.watch.is_own_thread

    def _begin_confirmations(self) -> int:
        """Return the number of evaluations that confirm the best; 0 where there is nothing to do, or no time for it."""
        session, space = self._session, self._ready.problem.space
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
