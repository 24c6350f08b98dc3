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
from hpo.results.summary import compute_busy_fraction, summarize
from hpo.run.session import Session
from hpo.space import SearchSpace
from hpo.space.search_space import list_individuals
from hpo.store.evaluations import Evaluation
from hpo.store.pruning import is_search_over
from hpo.store.run_dir import write_json
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
        self._files = session.run_dir
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
        summary = summarize(evaluations, run, self._top_n, confirmations, ask_models=self._stopping() is None)
        summary["stopped"] = stopped.reason if stopped else None
        summary["remedy"] = stopped.remedy if stopped and stopped.remedy else None
        individuals = None if stopped else self._count_individuals(evaluations)
        finished = sum(evaluation.is_finished for evaluation in evaluations)
        remaining = math.inf if individuals is None else individuals - finished
        summary["exhausted"] = remaining <= 0
        budget = 0 if summary["exhausted"] else run.budget
        self.is_search_done = is_search_over(evaluations, budget, run.pruner, run.objectives)
        summary["wall_seconds"] = round(time.time() - self._started, 3)
        everything = [*evaluations, *confirmations]
        summary["worker_busy_fraction"] = compute_busy_fraction(everything, run.layout.workers, since=self._started)
        print_tables(summary, run_dir.path, run.objectives)
        if summary["worker_busy_fraction"] is not None:
            print_times(summary)
        write_json(self._files.summary_json, {**summary, **self._read_previous_times(summary)})
        if summary["exhausted"]:
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

    def _read_previous_times(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the wall time and the busy fraction of the previous summary.json, or {}.

        They replace the values in `summary` if this session has evaluated nothing.
        """
        if summary["worker_busy_fraction"] is not None:
            return {}
        before = self._files.read_summary()
        with suppress(KeyError):
            return {name: before[name] for name in ("wall_seconds", "worker_busy_fraction")}
        return {}


def _choose_exit_status(summary: dict[str, Any]) -> int:
    succeeded = summary["best"] and (summary["evaluations"]["complete"] or not summary["evaluations"]["failed"])
    return ExitStatus.BUDGET_SPENT if succeeded else ExitStatus.NOTHING_SUCCEEDED
