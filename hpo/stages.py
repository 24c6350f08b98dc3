"""What a run does once everything is ready: it searches, confirms what it has found, and reports; on all ranks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpo.agreement import on_first
from hpo.communicator import SleepingComm
from hpo.errors import Exit
from hpo.evaluation import Evaluator, Limits, target_reached
from hpo.islands import run_islands
from hpo.layout import Layout
from hpo.options import Options
from hpo.pruning import make_pruner
from hpo.record import Record
from hpo.report.progress import Progress
from hpo.run_dir import write_json
from hpo.search_file import SearchFile
from hpo.session import Session
from hpo.storage import without_password
from hpo.summary import busy_fraction, spent, summarize
from hpo.trials import Evaluation, rank
from hpo.watch import Stop, Watch
from hpo.worker import Worker

if TYPE_CHECKING:
    from optuna.pruners import BasePruner


class Stages:
    """The stages of a run, each to be gone through by all ranks together; `started` is when the run did."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        world: SleepingComm,
        watch: Watch,
        search: SearchFile,
        settings: Any,
        session: Session,
        worker: Worker,
        started: float,
    ) -> None:
        self._options = options
        self._layout = layout
        self._world = world
        self._watch = watch
        self._search = search
        self._settings = settings
        self._session = session
        self._worker = worker
        self._started = started
        self._target = -math.inf if options.target_loss is None else options.target_loss
        timeout = options.evaluation_timeout or math.inf
        self._limits = Limits(options.collective_timeout, timeout, options.max_failures, self._target)
        if world.rank == 0:
            watch.last_words = self.report
            print(session.headline, flush=True)

    def search(self) -> None:
        """Search until the budget is spent, unless the target is reached already."""
        if on_first(self._world, self._is_target_reached):
            return
        session = self._session
        record = session.open_record() if self._worker.rank == 0 else None
        with self._progress(session.open_record, session.budget):
            run_islands(
                self._search.space,
                self._evaluator(record, session.budget, self._limits, make_pruner(session.pruner)),
                self._layout,
                self._world,
                worker=self._worker.index,
                propagators=session.propagators,
                record=record,
                migration_probability=self._options.migration_probability,
                pollination=self._options.pollination,
                seed=session.seed,
            )

    def confirm(self) -> None:
        """Train the best again with other seeds, where that is asked for and the search is at its end."""
        if not self._session.confirm:
            return
        self._watch.forget(target_reached(self._target))
        total = on_first(self._world, self._begin_confirmations)
        if not total:
            return
        opened = self._session.open_confirmations
        record = opened() if self._worker.rank == 0 else None
        evaluate = self._evaluator(record, total, replace(self._limits, max_failures=None, target_loss=-math.inf))
        place = {"island": self._layout.island_of(self._worker.index), "worker": self._worker.index}
        with self._progress(opened, total):
            while evaluate({}, lambda: None, **place) is not None:
                pass
            self._world.barrier()

    def report(self) -> int:
        """Print and write the summary as the record has it, and give the exit status that goes with it."""
        from hpo.report.tables import print_tables, print_times  # take 0.1 s, on the first rank only

        session, size = self._session, self._search.space.size
        evaluations, confirmations = session.open_record().evaluations(), self._confirmations()
        stopped = None if self._is_done(evaluations, confirmations) else self._stop(evaluations)
        summary = summarize(evaluations, session.budget, self._options.top_n, confirmations or ())
        summary["stopped"] = stopped.reason if stopped else None
        summary["exhausted"] = sum(evaluation.finished for evaluation in evaluations) >= size
        summary["wall_seconds"] = round(time.time() - self._started, 3)
        everything = [*evaluations, *(confirmations or ())]
        summary["worker_busy_fraction"] = busy_fraction(everything, self._layout.workers, since=self._started)
        print_tables(summary)
        nothing_new = summary["worker_busy_fraction"] is None
        if not nothing_new or not session.run_dir.summary_json.exists():
            write_json(session.run_dir.summary_json, summary)
        if not nothing_new:
            print_times(summary)
        if summary["exhausted"]:
            print(f"The search space is exhausted: it has {size:.0f} individuals, and all were evaluated")
        print(f"The study is {without_password(session.storage)}, the summary {session.run_dir.summary_json}")
        if stopped:
            print(f"Stopped: {stopped.reason}. To go on: --run-dir {session.run_dir.path} --resume")
        sys.stdout.flush()
        if stopped:
            return stopped.status
        return Exit.BUDGET_SPENT if summary["best"] else Exit.NOTHING_SUCCEEDED

    def _evaluator(
        self, record: Record | None, budget: int, limits: Limits, pruner: BasePruner | None = None
    ) -> Evaluator:
        return Evaluator(self._search, self._settings, self._worker, self._watch, record, budget, limits, pruner)

    def _progress(self, opened: Callable[[], Record | None], budget: int) -> AbstractContextManager[object]:
        """Follow a record from the first rank, in a thread that has one to itself."""
        record = opened() if self._world.rank == 0 else None
        return Progress(record.evaluations, budget, on_error=self._watch.die) if record else nullcontext()

    def _is_target_reached(self) -> bool:
        return _best_loss(self._session.open_record().evaluations()) <= self._target

    def _begin_confirmations(self) -> int:
        """Give the number of evaluations that confirm the best; 0 where the search was stopped before its end."""
        if self._watch.stopping:
            return 0
        total = self._session.begin_confirmations(self._search.space, self._options.top_n)
        if total:
            seeds = f"{self._session.confirm} other seed{'' if self._session.confirm == 1 else 's'}"
            print(f"confirming the best with {seeds} each: {total} evaluations", flush=True)
        return total

    def _confirmations(self) -> list[Evaluation] | None:
        record = self._session.open_confirmations()
        return record.evaluations() if record else None

    def _stop(self, evaluations: Sequence[Evaluation]) -> Stop | None:
        """Say why the run has stopped before its budget was spent, if it has."""
        if self._watch.stopping is None and _best_loss(evaluations) <= self._target:
            return target_reached(self._target)
        return self._watch.stopping

    def _is_done(self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation] | None) -> bool:
        """Tell whether the budget is spent, and the best are confirmed if that was asked for."""
        if not self._session.confirm:
            return spent(evaluations, self._session.budget)
        unconfirmed = confirmations is None or any(e.state in ("waiting", "running") for e in confirmations)
        return spent(evaluations, self._session.budget) and not unconfirmed


def _best_loss(evaluations: Sequence[Evaluation]) -> float:
    return min((evaluation.loss for evaluation in rank(evaluations, 1)), default=math.inf)
