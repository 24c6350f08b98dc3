"""The tasks of the first rank: it writes the study, shows progress, and reports the outcome."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpo.errors import ExitStatus, StopRequest, UsageError
from hpo.evaluation.host import RankPlace
from hpo.evaluation.leader import find_target_stop
from hpo.evaluation.trainer_client import run_test_in_trainer
from hpo.options import Options
from hpo.problem import Problem
from hpo.process.failure import format_with_hint
from hpo.process.linux import is_read_by_tee
from hpo.process.standard_streams import print_result, warn
from hpo.ranks.job import Job
from hpo.results.reader import RunReader
from hpo.results.recommendation import (
    FailedTestError,
    RunTest,
    find_confirmed_entry,
    run_winner_test,
)
from hpo.results.summary import SessionOutcome, Summary, compute_busy_fraction, write_summary
from hpo.run.prepare_rank import RankState
from hpo.run.session import Session
from hpo.space.search_space import list_individuals
from hpo.store.checkpoints import CheckpointStore
from hpo.store.evaluations import CONFIRMATION_PREFIX, Evaluation
from hpo.store.inheritance import InheritancePolicy
from hpo.store.output_log import OutputLog
from hpo.store.pareto_front import select_top
from hpo.store.pruning import HALVING_SCHEDULES, is_search_over, make_pruner
from hpo.store.record import Record
from hpo.store.storage import StorageRetry
from hpo.store.storage_url import is_url, mask_password
from hpo.store.study_writer import Claims, StudyWriter
from hpo.store.weights import BestWeights, ConfirmedWeights, remove_other_weights
from hpo.store.worker_health import HealthGate, WorkerHealth
from hpo.text_format import cut_text, format_count, make_printable
from hpo.trackers.tracker_processes import TrackerProcesses
from hpo.views.progress import ProgressPrinter
from hpo.views.times import SessionTimes

# To count the individuals of a space in which the search found nothing new.
_SECONDS_TO_COUNT = 60.0
_NICENESS_OF_TRACKERS = 5  # A tracker may share a core with a rank, which has priority.
_SECONDS_FOR_TRACKERS = 120.0
_SECONDS_FOR_IDLE_TRACKERS = 10.0
_SECONDS_FOR_TRACKERS_AT_A_STOP = 3.0  # The watch ends a run that has not stopped after 20 s.


class FirstRank:
    """The tasks of the first rank in a session.

    Args:
        state: The data of this rank after the search file is loaded.
        places: The host and the GPUs of each rank.

    Attributes:
        session: The session, whose manifest and run directory are sent to all ranks.
    """

    def __init__(
        self,
        options: Options,
        job: Job,
        session: Session,
        state: RankState,
        places: Sequence[RankPlace],
    ) -> None:
        self._options = options
        self._job = job
        self._slot = state.slot
        self._problem = state.problem
        self._places = places
        patience = StorageRetry(
            mask_password(session.storage),
            warn,
            lambda: self._is_stopping() or job.watch.is_own_thread,
        )
        self.session = replace(session, patience=patience)
        self._status: int | None = None  # known after the outcome is reported
        self._is_search_done = False
        self._left_workers: set[int] = set()
        job.watch.set_stop_callbacks(
            session.run_dir.mark_ended,
            lambda: self.report_outcome() if self._status is None else self._status,
        )
        print(session.headline, flush=True)
        if "HYDI_CONTROL_FD" in os.environ and is_read_by_tee():
            # MPICH's launcher then prints, is ended by SIGPIPE, and ends all ranks.
            warn(
                "warning: Ctrl-C would end tee, and with it mpirun, before this run has saved its "
                "checkpoints. Use tee -i instead"
            )
        self._tracking = TrackerProcesses(
            options.trackers, session.run_dir.path, niceness=_NICENESS_OF_TRACKERS
        )
        self._tracking.add_study(session.storage, session.manifest.study)

    def is_search_over(self) -> bool:
        """Return whether the search is over: the budget is spent, or the target is reached."""
        evaluations = self.session.open_record().read_evaluations()
        return (
            self._is_budget_spent(evaluations)
            or find_target_stop(evaluations, self._options.target_loss) is not None
        )

    def make_search_writer(self) -> StudyWriter:
        """Return the writer of the study of the search. Only the writer changes the study."""
        run = self.session.manifest
        run_dir = self.session.run_dir
        space = self._problem.space
        checkpoints = CheckpointStore(run_dir.checkpoints)
        writer = StudyWriter(
            self.session.open_cached_storage(run.study),
            run.study,
            OutputLog(run_dir.get_log_path),
            checkpoints,
            make_pruner(run.pruner, run.budget, run.objectives),
            BestWeights(run_dir, run.objectives),
        )
        halving = HALVING_SCHEDULES.get(run.pruner)
        distributions = space.make_distributions()
        writer.claims = Claims(writer, distributions, run.budget, self._is_stopping, halving)
        if run.pbt:
            writer.inheritance = InheritancePolicy(writer, space, run.layout.islands, checkpoints)
        writer.health_gate = self._make_health_gate(writer)
        return writer

    def begin_confirmations(self) -> int:
        """Enqueue the confirmations; return their number, 0 if none is left to run."""
        session = self.session
        space = self._problem.space
        evaluations = session.open_record().read_evaluations()
        if self._is_stopping() or not select_top(evaluations, 1, session.manifest.objectives):
            return 0
        session.create_confirmations(space)
        record = session.open_confirmations()
        best = session.find_to_confirm(evaluations, record.read_evaluations())
        for trial in sorted({*self._options.confirm_trials} - {one.trial for one in best}):
            warn(f"warning: --confirm-trials {trial}: there is no trial {trial} with a loss")
        to_do = session.confirmation_plan.count_remaining(best, record.read_evaluations())
        total = session.confirmation_plan.enqueue_planned(record, best, space)
        self._tracking.add_study(session.storage, session.manifest.confirmation_study)
        if not to_do:
            return 0
        seeds = format_count(session.confirmation_plan.count, "other seed")
        left = f" left of {total}" if to_do < total else ""
        print(f"confirming the best with {seeds} each: {to_do} evaluations{left}", flush=True)
        return total

    def make_confirmations_writer(self, total: int) -> StudyWriter:
        """Return the writer of the study that confirms the best, with `total` evaluations."""
        study = self.session.manifest.confirmation_study
        run_dir = self.session.run_dir
        writer = StudyWriter(
            self.session.open_cached_storage(study),
            study,
            OutputLog(partial(run_dir.get_log_path, confirms=True)),
            CheckpointStore(run_dir.checkpoints, CONFIRMATION_PREFIX),
            weights=ConfirmedWeights(run_dir, self.session.manifest.settings),
        )
        distributions = self._problem.space.make_distributions()
        writer.claims = Claims(writer, distributions, total, self._is_stopping)
        writer.health_gate = self._make_health_gate(writer)
        return writer

    def show_progress(self, writer: StudyWriter, budget: int) -> AbstractContextManager[object]:
        """Return a context manager that prints, from a thread, what `writer` commits."""
        watch = self._job.watch
        run = self.session.manifest
        is_search = writer.study.study_name == run.study
        then = "--confirm-seeds" if run.confirm_seeds and is_search else ""
        times = SessionTimes(self._job.started_at, time.time() + watch.seconds_left, then)
        return ProgressPrinter(
            writer.take_committed,
            budget,
            on_error=watch.abort_job,
            objectives=writer.objectives,
            times=times,
        )

    def conclude(self) -> int:
        """Print the summary, test the winner, and write the report; return the exit status."""
        self._tracking.finish()
        status = self.report_outcome()
        is_stopped = self._is_stopping()
        # A search that is not over needs its checkpoints when it is resumed.
        checkpoints = CheckpointStore(self.session.run_dir.checkpoints)
        if self._is_search_done:
            record = self.session.open_record()
            checkpoints.remove_all_except(self.session.find_roots_to_inherit(record))
        checkpoints.remove_empty_folder()
        run_test = None
        if self._options.test and not is_stopped:
            run_test = partial(run_test_in_trainer, self._slot.fork_other)
        finalize_run(
            self.session.run_dir.path,
            self.session.storage,
            self._problem,
            run_test,
            is_stopped=is_stopped,
        )
        if is_stopped:
            self._tracking.wait(_SECONDS_FOR_TRACKERS_AT_A_STOP)
        else:
            self._tracking.wait(_SECONDS_FOR_TRACKERS, _SECONDS_FOR_IDLE_TRACKERS)
        if self._options.as_json:
            run_dir = self.session.run_dir
            print_result({"run_dir": str(run_dir.path), **run_dir.read_summary()})
        return status

    def report_outcome(self) -> int:
        """Print the summary of the run, write summary.json, and return the exit status."""
        evaluations = self.session.open_record().read_evaluations()
        confirmations = self.session.read_confirmations()
        stopped = self._find_stop_request(evaluations, confirmations)
        individuals = None if stopped else self._count_individuals(evaluations)
        finished = sum(evaluation.is_finished for evaluation in evaluations)
        is_exhausted = individuals is not None and finished >= individuals
        run = self.session.manifest
        budget = 0 if is_exhausted else run.budget
        self._is_search_done = is_search_over(evaluations, budget, run.pruner, run.objectives)
        summary = self._report_summary(evaluations, confirmations, stopped, is_exhausted)
        if is_exhausted:
            size = format_count(individuals or 0, "individual")
            print(f"The search space is exhausted: it has {size}, and all were evaluated")
        elif not stopped and not self._is_search_done:
            rest = "few individuals are left, or none"
            if individuals is not None:
                rest = f"{individuals - finished} of {individuals} are left"
            print(f"The search has ended since it found nothing new: {rest}")
        run_dir = self.session.run_dir
        study = mask_password(run.storage) if is_url(run.storage) else run_dir.path / run.storage
        print(f"The study is {study}, the summary {run_dir.summary_json}")
        if stopped:
            options = f"--run-dir {run_dir.path} --resume"
            options += f" and {stopped.remedy}" if stopped.remedy else ""
            print(f"Stopped: {stopped.reason}. To resume: the same command with {options}")
        sys.stdout.flush()
        counts = summary.counts
        if stopped:
            self._status = stopped.status
        elif summary.best and (counts["complete"] or not counts["failed"]):
            self._status = ExitStatus.BUDGET_SPENT
        else:
            self._status = ExitStatus.NOTHING_SUCCEEDED
        return self._status

    def _report_summary(
        self,
        evaluations: Sequence[Evaluation],
        confirmations: Sequence[Evaluation],
        stopped: StopRequest | None,
        is_exhausted: bool,
    ) -> Summary:
        """Print the tables and times, and write summary.json."""
        # The import takes 0.1 s, which is spent on the first rank only.
        from hpo.views.summary_tables import print_tables, print_times

        session = self.session
        started = self._job.started_at
        workers = session.manifest.layout.workers
        busy = compute_busy_fraction([*evaluations, *confirmations], workers, since=started)
        seconds = round(time.time() - started, 3)
        times = (seconds, busy)
        if busy is None:  # This session has evaluated nothing: keep the times of the previous one.
            before = session.run_dir.read_summary()
            with suppress(KeyError):
                times = (before["wall_seconds"], before["worker_busy_fraction"])
        reason = stopped.reason if stopped else None
        remedy = stopped.remedy if stopped else ""
        summary = Summary(
            evaluations,
            session.manifest,
            self._options.top_n,
            *session.confirmation_plan.split_planned(confirmations),
            ask_models=not self._is_stopping(),
            session=SessionOutcome(reason, remedy or None, is_exhausted, *times),
        )
        print_tables(summary, session.run_dir.path, shows_expected_loss=True)
        if busy is not None:
            print_times(seconds, busy)
        write_summary(session.run_dir.summary_json, summary)
        return summary

    def _count_individuals(self, evaluations: Sequence[Evaluation]) -> int | None:
        """Return the number of individuals of the space; None if it cannot be counted."""
        space = self._problem.space
        individuals = space.all_individuals
        # A space in which the search found nothing new before its budget was spent is worth a
        # longer count.
        if individuals is None and not self._is_budget_spent(evaluations):
            individuals = list_individuals(space, math.inf, _SECONDS_TO_COUNT, self._is_stopping)
        return None if individuals is None else len(individuals)

    def _is_budget_spent(self, evaluations: Sequence[Evaluation]) -> bool:
        run = self.session.manifest
        return is_search_over(evaluations, run.budget, run.pruner, run.objectives)

    def _find_stop_request(
        self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation]
    ) -> StopRequest | None:
        """Return the request that stopped the run, unless all was done nevertheless."""
        session = self.session
        stopping = self._job.watch.active_stop
        reached = find_target_stop(evaluations, self._options.target_loss)
        if reached and (stopping is None or not session.confirmation_plan.count):
            stopping = reached
        best = session.find_to_confirm(evaluations, confirmations)
        unconfirmed = session.confirmation_plan.count_remaining(best, confirmations)
        if stopping and unconfirmed and stopping.status == ExitStatus.BUDGET_SPENT:
            return replace(stopping, status=ExitStatus.UNFINISHED, remedy="")
        return None if self._is_budget_spent(evaluations) and not unconfirmed else stopping

    def _make_health_gate(self, record: Record) -> HealthGate:
        layout = self.session.manifest.layout
        hosts = [
            self._places[layout.list_ranks(worker)[0]].host for worker in range(layout.workers)
        ]
        health = WorkerHealth(hosts, self._left_workers)
        return HealthGate(record, health, partial(self._dismiss_worker, record))

    def _dismiss_worker(self, record: Record, worker: int, failures: Sequence[Evaluation]) -> None:
        """Let other workers retry the failures of a broken worker, which leaves the run."""
        for evaluation in failures:
            record.retry_failed(evaluation)
        ranks = [
            f"rank {rank} on {self._places[rank].describe()}"
            for rank in self.session.manifest.layout.list_ranks(worker)
        ]
        reasons = dict.fromkeys(cut_text(evaluation.failure or "", 200) for evaluation in failures)
        numbers = ", ".join(str(evaluation.trial) for evaluation in failures)
        trials = f"trial{'s' * (len(failures) > 1)} {numbers}"
        description = (
            f"worker {worker} ({'; '.join(ranks)}) has left the run, since it fails where others "
            f"succeed. Other workers retry its failures ({trials}): {'; '.join(reasons)}"
        )
        record.record_broken_worker(description)
        warn(f"warning: {description}")

    def _is_stopping(self) -> bool:
        return self._job.watch.active_stop is not None


def finalize_run(
    run_dir: Path,
    storage: str | None,
    problem: Problem,
    run_test: RunTest | None,
    is_stopped: bool = False,
) -> None:
    """Test the winner, which is the evaluation that the run recommends, and write the report.

    The weights of other confirmed individuals are removed if the winner is a confirmed one. The
    result of the run is already recorded, so each failure is only a warning.

    Args:
        storage: The URL of the storage of the study, with its password. None: the storage in
            run.json.
        run_test: Runs the user's `test` in a trainer (see `hpo.results.recommendation`). None: the
            winner is not tested.
        is_stopped: Whether the run is being stopped. There is then too little time for the report's
            importances and expected loss, which need models.
    """
    try:
        run = RunReader(run_dir, storage)
    except UsageError as error:  # The manifest was edited or removed.
        _warn_in_a_line(f"no report was written: {error}")
        return
    if not is_stopped:
        winner = run.find_winner()
        if run_test is not None:
            _test_winner(run, winner, problem, run_test)
        if winner is not None and find_confirmed_entry(winner, run.read_confirmations()):
            remove_other_weights(run.run_dir.confirmed_weights, winner.trial)
    advised = _print_advice(run)
    try:
        from hpo.views.page.html_report import write_report

        write_report(run, run.run_dir.report_html, ask_models=not is_stopped)
        text = make_printable(f"The report is {run.run_dir.report_html}")
        print("\n" * advised + text, flush=True)
    except Exception as error:
        command = f"hpo report {run.run_dir.path}"
        _warn_in_a_line(f"no report was written ({_describe_error(error)}): {command} does it")


def _warn_in_a_line(text: str) -> None:
    warn(make_printable(f"warning: {text}"))


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {format_with_hint(error)}"


def _print_advice(run: RunReader) -> bool:
    """Print advice to the user about this run, and return whether there is any advice."""
    try:
        from hpo.views.summary_tables import print_advice

        advice = run.find_advice()
        print_advice(advice)
    except Exception as error:
        _warn_in_a_line(f"no advice ({_describe_error(error)})")
        return False
    return bool(advice)


def _test_winner(
    run: RunReader, winner: Evaluation | None, problem: Problem, run_test: RunTest
) -> None:
    if winner is None or not problem.file.has_test:
        return
    from hpo.views.result_text import explain_missing_test, format_test_result

    try:
        content = run_winner_test(
            run.run_dir, problem, winner, run_test, run.read_confirmations(all_plans=True)
        )
    except Exception as error:
        is_expected = isinstance(error, FailedTestError)
        reason = str(error) if is_expected else _describe_error(error)
        _warn_in_a_line(f"the best network could not be tested ({reason})")
        return
    if content:
        lines = format_test_result(run, winner, content)
    else:
        lines = [explain_missing_test(run, winner)]
    for line in filter(None, lines):
        print(make_printable(line))
