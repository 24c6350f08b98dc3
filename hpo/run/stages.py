"""What a run does once everything is ready: it searches, confirms what it has found, and reports; on all ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpo.breeding.islands import run_islands
from hpo.errors import Exit, Stop
from hpo.evaluation.evaluator import Evaluator, Limits, target_reached
from hpo.evaluation.group import Group
from hpo.evaluation.pruning import make_pruner
from hpo.layout import Layout
from hpo.problem import SearchFile
from hpo.process.printed import Printed, warn
from hpo.ranks.agreement import on_first
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.sharing import Shared
from hpo.ranks.watch import Watch
from hpo.report.progress import Progress
from hpo.results.summary import busy_fraction, spent, summarize
from hpo.run.handover import hand_over
from hpo.run.options import Options
from hpo.run.session import Session
from hpo.store.log import Log
from hpo.store.outage import Patience
from hpo.store.record import Record
from hpo.store.run_dir import RunDir, write_json
from hpo.store.study import CONFIRMATIONS
from hpo.store.trials import Evaluation, rank
from hpo.store.url import is_remote, without_password
from hpo.store.weights import WeightsKeeper
from hpo.text import counted
from hpo.trackers.tracking import Tracking

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

_NICENESS_OF_TRACKERS = 5  # ranks come first, one of which may have the same core
_SECONDS_FOR_TRACKERS = 10.0
_SECONDS_FOR_TRACKERS_AT_A_STOP = 3.0  # the watch ends a run that has not stopped after 7


class Stages:
    """The stages of a run, each to be gone through by all ranks together; `started` is when the run did."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        world: SleepingComm,
        watch: Watch,
        printed: Printed,
        search: SearchFile,
        settings: Any,
        data: Shared,
        session: Session,
        group: Group,
        started: float,
    ) -> None:
        self._options = options
        self._layout = layout
        self._world = world
        self._watch = watch
        self._printed = printed
        self._search = search
        self._settings = settings
        self._data = data
        self._files = RunDir(session.run_dir.path.absolute())  # objectives may be in a directory of their own
        self._group = group
        self._started = started
        self._target = -math.inf if options.target_loss is None else options.target_loss
        timeout = options.evaluation_timeout or math.inf
        self._limits = Limits(options.collective_timeout, timeout, options.max_failures, self._target)
        if world.rank == 0:
            watch.last_words, watch.signs_off = self.report, self._files.sign_off
            print(session.headline, flush=True)
        say = warn if world.rank == 0 else lambda _: None
        patience = Patience(without_password(session.storage), say, self._cannot_wait)
        self._session = replace(session, patience=patience)
        trackers = options.trackers if world.rank == 0 else ()
        self._tracking = Tracking(trackers, session.run_dir.path, niceness=_NICENESS_OF_TRACKERS)
        self._tracking.follow(session.storage, session.study_name)

    def search(self) -> None:
        """Search until the budget is spent or the target reached, unless one of them is so already."""
        if on_first(self._world, self._is_search_over):
            return
        session = self._session
        record = session.open_record() if self._group.rank == 0 else None
        with self._progress(session.open_record, session.budget):
            run_islands(
                self._search.space,
                self._evaluator(record, session.budget, self._limits, make_pruner(session.pruner)),
                self._layout,
                self._world,
                worker=self._group.index,
                propagators=session.propagators,
                record=record,
                migration_probability=self._options.migration_probability,
                pollination=self._options.pollination,
                seed=session.seed,
            )

    def confirm(self) -> None:
        """Train the best again with other seeds, where that is asked for and the search is at its end."""
        self._watch.forget(target_reached(self._target))  # which ends the search alone
        if not self._session.plan.count:
            return
        total = on_first(self._world, self._begin_confirmations)
        if not total:
            return
        opened = self._session.open_confirmations
        record = opened() if self._group.rank == 0 else None
        evaluate = self._evaluator(
            record, total, replace(self._limits, max_failures=None, target_loss=-math.inf), searches=False
        )
        place = {"island": self._layout.island_of(self._group.index), "worker": self._group.index}
        with self._progress(opened, total):
            self._world.barrier()  # what ends before the first rank follows the record would not be shown
            while evaluate(None, lambda: None, **place) is not None:
                pass
            self._world.barrier()

    def end(self) -> int:
        """Report, hand the winner over, let trackers come to an end, and return the exit status."""
        self._tracking.finish()
        status, stopping = self.report(), self._watch.stopping
        self._watch.last_words = lambda: status  # they have been said
        session = self._session
        hand_over(session.run_dir.path, session.storage, self._search, self._settings, to_test=stopping is None)
        self._tracking.wait(_SECONDS_FOR_TRACKERS if stopping is None else _SECONDS_FOR_TRACKERS_AT_A_STOP)
        return status

    def report(self) -> int:
        """Print and write the summary as the record has it, and return the exit status that goes with it."""
        from hpo.report.tables import print_tables, print_times  # take 0.1 s, on the first rank only

        session, size = self._session, self._search.space.size
        evaluations, confirmations = session.open_record().evaluations(), self._confirmations()
        stopped = self._stop(evaluations, confirmations)
        summary = summarize(evaluations, session.budget, self._options.top_n, confirmations)
        summary["stopped"] = stopped.reason if stopped else None
        summary["exhausted"] = sum(evaluation.finished for evaluation in evaluations) >= size
        summary["wall_seconds"] = round(time.time() - self._started, 3)
        workers = self._layout.workers
        summary["worker_busy_fraction"] = busy_fraction([*evaluations, *confirmations], workers, since=self._started)
        print_tables(summary, session.run_dir.path)
        if summary["worker_busy_fraction"] is not None:
            print_times(summary)
        write_json(self._files.summary_json, {**summary, **self._times_before(summary)})
        if summary["exhausted"]:
            print(f"The search space is exhausted: it has {size:.0f} individuals, and all were evaluated")
        print(f"The study is {without_password(session.storage)}, the summary {session.run_dir.summary_json}")
        if stopped:
            print(f"Stopped: {stopped.reason}. To go on: --run-dir {session.run_dir.path} --resume")
        sys.stdout.flush()
        if stopped:
            return stopped.status
        succeeded = summary["best"] and (summary["evaluations"]["complete"] or not summary["evaluations"]["failed"])
        return Exit.BUDGET_SPENT if succeeded else Exit.NOTHING_SUCCEEDED

    def _evaluator(
        self,
        record: Record | None,
        budget: int,
        limits: Limits,
        pruner: BasePruner | None = None,
        searches: bool = True,
    ) -> Evaluator:
        """Make what evaluates for the search, or else for its confirmation."""
        return Evaluator(
            self._search,
            self._settings,
            self._data,
            self._session.seed,
            group=self._group,
            watch=self._watch,
            printed=self._printed,
            record=record,
            budget=budget,
            limits=limits,
            pruner=pruner,
            keeper=WeightsKeeper(self._files.weights, record, self._session.settings) if record and searches else None,
            log=Log(partial(self._files.printed, confirms=not searches)) if record else None,
            may_be_away=is_remote(self._session.storage),
        )

    def _progress(self, opened: Callable[[], Record], budget: int) -> AbstractContextManager[object]:
        """Follow a record from the first rank, in a thread that has one to itself."""
        if self._world.rank != 0:
            return nullcontext()
        return Progress(opened().news, budget, on_error=self._watch.die)

    def _cannot_wait(self) -> bool:
        return self._watch.stopping is not None or self._watch.is_own_thread

    def _is_search_over(self) -> bool:
        evaluations = self._session.open_record().evaluations()
        return spent(evaluations, self._session.budget) or _best_loss(evaluations) <= self._target

    def _best(self, evaluations: Sequence[Evaluation]) -> list[Evaluation]:
        return rank(evaluations, self._options.top_n)

    def _begin_confirmations(self) -> int:
        """Return the number of evaluations that confirm the best; 0 where there is nothing to do, or no time for it."""
        session, best = self._session, self._best(self._session.open_record().evaluations())
        if self._watch.stopping or not best:
            return 0
        session.create_confirmations(self._search.space)
        record = session.open_confirmations()
        to_do = session.plan.to_do(best, record.evaluations())
        total = session.plan.begin(record, best, self._search.space)
        self._tracking.follow(session.storage, session.study_name + CONFIRMATIONS)
        if not to_do:
            return 0
        seeds = counted(session.plan.count, "other seed")
        print(f"confirming the best with {seeds} each: {to_do} evaluations", flush=True)
        return total

    def _confirmations(self) -> list[Evaluation]:
        session = self._session
        if not session.plan.count or not session.has_confirmations():
            return []
        return session.plan.of(session.open_confirmations().evaluations())

    def _stop(self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation]) -> Stop | None:
        """Say why the run has stopped before it was done, if it has: the budget spent, and the best confirmed."""
        stopping = self._watch.stopping
        if _best_loss(evaluations) <= self._target and (stopping is None or not self._session.plan.count):
            stopping = target_reached(self._target)
        unconfirmed = self._session.plan.to_do(self._best(evaluations), confirmations)
        if stopping and unconfirmed and stopping.status == Exit.BUDGET_SPENT:
            return replace(stopping, status=Exit.MORE_TO_DO)
        return None if spent(evaluations, self._session.budget) and not unconfirmed else stopping

    def _times_before(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the times in the summary of an earlier session, where this one has evaluated nothing."""
        if summary["worker_busy_fraction"] is not None:
            return {}
        before = self._files.summary()
        with suppress(KeyError):
            return {name: before[name] for name in ("wall_seconds", "worker_busy_fraction")}
        return {}


def _best_loss(evaluations: Sequence[Evaluation]) -> float:
    return min((evaluation.loss for evaluation in rank(evaluations, 1)), default=math.inf)
