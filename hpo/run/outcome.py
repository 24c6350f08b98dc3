"""The outcome of a run: the printed tables, summary.json, the reason of a stop, and the exit status."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpo.errors import ExitStatus, StopRequest
from hpo.evaluation.leader import find_target_stop
from hpo.results.summary import SessionOutcome, Summary, compute_busy_fraction, write_summary
from hpo.run.session import Session
from hpo.space import SearchSpace
from hpo.space.search_space import list_individuals
from hpo.store.evaluations import Evaluation
from hpo.store.pruning import is_search_over
from hpo.store.storage_url import mask_password
from hpo.text_format import format_count

_SECONDS_TO_COUNT = 60.0  # to count the individuals of a space in which the search found nothing new


class RunOutcome:
    """The outcome of a run, determined on its first rank.

    Args:
        stopping: A function that returns the request to stop the run, or None.
        started: The start of this session, in seconds since the epoch.
        top_n: The number of individuals in the tables.
        target_loss: The loss at which the search is over before its budget is spent; minus infinity without one.

    Attributes:
        is_search_done: Whether the budget is spent or the search space is exhausted, and no evaluation is left to
            promote. `conclude` sets it.
    """

    def __init__(
        self,
        session: Session,
        stopping: Callable[[], StopRequest | None],
        started: float,
        top_n: int,
        target_loss: float,
        space: SearchSpace,
    ) -> None:
        self._session = session
        self._stopping = stopping
        self._started = started
        self._top_n = top_n
        self._target_loss = target_loss
        self._space = space
        self._status: int | None = None
        self.is_search_done = False

    def conclude_once(self) -> int:
        """Call `conclude` if it was not called before, and return the exit status."""
        return self.conclude() if self._status is None else self._status

    def conclude(self) -> int:
        """Print the summary of the run, write summary.json, and return the exit status."""
        # The import takes 0.1 s, which is spent on the first rank only.
        from hpo.views.summary_tables import print_tables, print_times

        session, run_dir = self._session, self._session.run_dir
        evaluations, confirmations = session.open_record().read_evaluations(), self._read_confirmations()
        stopped = self._find_stop_request(evaluations, confirmations)
        run = session.manifest
        individuals = None if stopped else self._count_individuals(evaluations)
        finished = sum(evaluation.is_finished for evaluation in evaluations)
        remaining = math.inf if individuals is None else individuals - finished
        exhausted = remaining <= 0
        budget = 0 if exhausted else run.budget
        self.is_search_done = is_search_over(evaluations, budget, run.pruner, run.objectives)
        everything = [*evaluations, *confirmations]
        busy = compute_busy_fraction(everything, run.layout.workers, since=self._started)
        seconds = round(time.time() - self._started, 3)
        summary = Summary(
            evaluations,
            run,
            self._top_n,
            confirmations,
            ask_models=self._stopping() is None,
            session=SessionOutcome(
                stopped.reason if stopped else None,
                (stopped.remedy or None) if stopped else None,
                exhausted,
                *((seconds, busy) if busy is not None else self._read_previous_times(seconds)),
            ),
        )
        print_tables(summary, run_dir.path, shows_expected_loss=True)
        if busy is not None:
            print_times(seconds, busy)
        write_summary(run_dir.summary_json, summary)
        if exhausted:
            size = format_count(individuals or 0, "individual")
            print(f"The search space is exhausted: it has {size}, and all were evaluated")
        elif not stopped and not self._is_budget_spent(evaluations):
            rest = (
                "few individuals are left, or none" if individuals is None else f"{remaining} of {individuals} are left"
            )
            print(f"The search has ended since it found nothing new: {rest}")
        print(f"The study is {mask_password(session.storage)}, the summary {run_dir.summary_json}")
        if stopped:
            options = f"--run-dir {run_dir.path} --resume{f' and {stopped.remedy}' if stopped.remedy else ''}"
            print(f"Stopped: {stopped.reason}. To resume: the same command with {options}")
        sys.stdout.flush()
        self._status = stopped.status if stopped else _choose_exit_status(summary)
        return self._status

    def is_search_over(self) -> bool:
        """Return whether the search is over: the budget is spent, or the target is reached."""
        evaluations = self._session.open_record().read_evaluations()
        return self._is_budget_spent(evaluations) or find_target_stop(evaluations, self._target_loss) is not None

    def _count_individuals(self, evaluations: Sequence[Evaluation]) -> int | None:
        # A space in which the search found nothing new before its budget was spent is worth a longer count.
        if (individuals := self._space.all_individuals) is None and not self._is_budget_spent(evaluations):
            individuals = list_individuals(
                self._space, math.inf, _SECONDS_TO_COUNT, lambda: self._stopping() is not None
            )
        return None if individuals is None else len(individuals)

    def _is_budget_spent(self, evaluations: Sequence[Evaluation]) -> bool:
        run = self._session.manifest
        return is_search_over(evaluations, run.budget, run.pruner, run.objectives)

    def _find_stop_request(
        self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation]
    ) -> StopRequest | None:
        """Return the request that stopped the run, or None.

        No request counts if the budget is spent and all confirmations of the best individuals have ended.
        """
        session, stopping = self._session, self._stopping()
        reached = find_target_stop(evaluations, self._target_loss)
        if reached and (stopping is None or not session.confirmation_plan.count):
            stopping = reached
        best = session.find_to_confirm(evaluations, confirmations, self._top_n)
        unconfirmed = session.confirmation_plan.count_remaining(best, confirmations)
        if stopping and unconfirmed and stopping.status == ExitStatus.BUDGET_SPENT:
            return replace(stopping, status=ExitStatus.UNFINISHED, remedy="")
        return None if self._is_budget_spent(evaluations) and not unconfirmed else stopping

    def _read_confirmations(self) -> list[Evaluation]:
        session = self._session
        if not session.confirmation_plan.count or not session.has_confirmations():
            return []
        return session.confirmation_plan.select_planned(session.open_confirmations().read_evaluations())

    def _read_previous_times(self, seconds: float) -> tuple[Any, Any]:
        """Return the wall time and the busy fraction of the previous summary.json.

        They replace the times of a session that has evaluated nothing. Without a previous
        summary.json, return `seconds` and None.
        """
        before = self._session.run_dir.read_summary()
        with suppress(KeyError):
            return before["wall_seconds"], before["worker_busy_fraction"]
        return seconds, None


def _choose_exit_status(summary: Summary) -> int:
    counts = summary.counts
    succeeded = summary.best and (counts["complete"] or not counts["failed"])
    return ExitStatus.BUDGET_SPENT if succeeded else ExitStatus.NOTHING_SUCCEEDED
