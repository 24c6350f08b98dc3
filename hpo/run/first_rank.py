"""The first rank's part in a run: it writes the record, shows progress, and writes the summary."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from hpo.evaluation.testing import test_in_trainer
from hpo.process.printed import warn
from hpo.ranks.job import Job
from hpo.run.conclusion import Conclusion
from hpo.run.handover import hand_over
from hpo.run.options import Options
from hpo.run.ready import Ready
from hpo.run.session import Session
from hpo.store.claims import Claims
from hpo.store.evaluations import CONFIRMING
from hpo.store.heirs import Heirs
from hpo.store.log import Log
from hpo.store.outage import Patience
from hpo.store.pruning import make_pruner
from hpo.store.rungs import HALVINGS
from hpo.store.states import States
from hpo.store.url import without_password
from hpo.store.weights import BestWeights, ConfirmedWeights
from hpo.store.writer import Writer
from hpo.text import counted
from hpo.trackers.tracking import Tracking
from hpo.views.progress import Progress

_NICENESS_OF_TRACKERS = 5  # ranks come first: one of them may have the same core
_SECONDS_FOR_TRACKERS = 10.0
_SECONDS_FOR_TRACKERS_AT_A_STOP = 3.0  # the watch ends a run that has not stopped after 7 s


class FirstRank:
    """The first rank's part in a session of a run; all ranks may know its ``manifest`` and ``files``."""

    def __init__(self, options: Options, job: Job, session: Session, ready: Ready) -> None:
        self._options = options
        self._job = job
        self._ready = ready
        self.manifest = session.manifest
        self.files = session.run_dir
        self._space = ready.problem.space
        patience = Patience(without_password(session.storage), warn, self._cannot_wait)
        self._session = replace(session, patience=patience)
        self._conclusion = Conclusion(
            self._session, lambda: job.watch.stopping, job.started, options.top_n, options.target, self._space
        )
        job.watch.speak_for_the_run(self.files.sign_off, self._conclusion.last_words)
        print(session.headline, flush=True)
        self._tracking = Tracking(options.trackers, self.files.path, niceness=_NICENESS_OF_TRACKERS)
        self._tracking.follow(session.storage, session.manifest.study)

    def is_search_over(self) -> bool:
        """Return whether the search is over: the budget is spent, or the target reached."""
        return self._conclusion.is_search_over()

    def search_writer(self) -> Writer:
        """Return what writes the record of the search."""
        session, run, space = self._session, self.manifest, self._space
        record, mirror = session.own_record(run.study)
        halving = HALVINGS.get(run.pruner)
        return Writer(
            record,
            Claims(record, space.distributions(), run.budget, self._is_stopping, halving),
            Log(self.files.printed),
            States(self.files.checkpoints),
            mirror,
            pruner=make_pruner(run.pruner, run.budget, run.objectives),
            halving=halving,
            heirs=Heirs(record, space, run.layout.islands, States(self.files.checkpoints)) if run.pbt else None,
            weights=BestWeights(self.files, run.objectives),
        )

    def begin_confirmations(self) -> int:
        """Return the number of evaluations that confirm the best; 0 if there is nothing to do, or no time for it."""
        session, space = self._session, self._space
        evaluations = session.open_record().evaluations()
        if self._is_stopping() or not session.top(evaluations, 1):
            return 0
        session.create_confirmations(space)
        record = session.open_confirmations()
        best = session.find_to_confirm(evaluations, record.evaluations(), self._options.top_n)
        to_do = session.plan.to_do(best, record.evaluations())
        total = session.plan.begin(record, best, space)
        self._tracking.follow(session.storage, session.manifest.confirming_study)
        if not to_do:
            return 0
        seeds = counted(session.plan.count, "other seed")
        print(f"confirming the best with {seeds} each: {to_do} evaluations", flush=True)
        return total

    def confirmations_writer(self, total: int) -> Writer:
        """Return the writer of the record of `total` evaluations that confirm the best."""
        record, mirror = self._session.own_record(self.manifest.confirming_study)
        claims = Claims(record, self._space.distributions(), total, self._is_stopping)
        log = Log(partial(self.files.printed, confirms=True))
        weights = ConfirmedWeights(self.files, self.manifest.settings)
        return Writer(record, claims, log, States(self.files.checkpoints, CONFIRMING), mirror, weights=weights)

    def show_progress(self, writer: Writer, budget: int) -> AbstractContextManager[object]:
        """Return what prints, from a thread, the news that become durable inside ``with``."""
        objectives = self.manifest.objectives
        return Progress(writer.settled, budget, on_error=self._job.watch.die, objectives=objectives)

    def conclude(self) -> int:
        """Print the summary, test the winner, write the report, wait for trackers, and return the exit status."""
        self._tracking.finish()
        status, stopping = self._conclusion.say(), self._job.watch.stopping
        self._tidy()
        run_test = partial(test_in_trainer, self._ready.slot.fork) if stopping is None else None
        hand_over(self.files.path, self._session.storage, self._ready.problem, run_test)
        self._tracking.wait(_SECONDS_FOR_TRACKERS if stopping is None else _SECONDS_FOR_TRACKERS_AT_A_STOP)
        return status

    def _tidy(self) -> None:
        """Remove the states of a search that is over; one that continues keeps its own."""
        states = States(self.files.checkpoints)
        if self._conclusion.is_search_done:
            states.sweep(self._session.roots_to_inherit(self._session.open_record()))
        states.leave()

    def _is_stopping(self) -> bool:
        return self._job.watch.stopping is not None

    def _cannot_wait(self) -> bool:
        return self._is_stopping() or self._job.watch.is_own_thread
