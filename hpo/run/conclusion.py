"""What a run says when it ends: its tables, summary.json, why it stopped if it did, and its exit status."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpo.errors import Exit, Stop
from hpo.evaluation.leader import target_reached
from hpo.listing import list_individuals
from hpo.results.summary import busy_fraction, summarize
from hpo.run.session import Session
from hpo.space import SearchSpace
from hpo.store.evaluations import Evaluation, best
from hpo.store.run_dir import write_json
from hpo.store.rungs import is_over
from hpo.store.url import without_password
from hpo.text import counted

_SECONDS_TO_COUNT = 60.0  # the individuals of a space in which the search found nothing new


class Conclusion:
    """Sums a run up, on its first rank.

    `stopping` returns why the run stops; `started` is when this session began, in seconds since the epoch. `top_n`
    individuals of `space` are listed; the run ends where a loss is `target` or lower. Once it is summed up,
    `is_search_done` says whether nothing is left to be evaluated or promoted.
    """

    def __init__(
        self,
        session: Session,
        stopping: Callable[[], Stop | None],
        started: float,
        top_n: int,
        target: float,
        space: SearchSpace,
    ) -> None:
        self._session = session
        self._files = session.run_dir
        self._stopping = stopping
        self._started = started
        self._top_n = top_n
        self._target = target
        self._space = space
        self._status: int | None = None
        self.is_search_done = False

    def last_words(self) -> int:
        """Sum the run up as `say` does, unless that has been done, and return the exit status."""
        return self.say() if self._status is None else self._status

    def say(self) -> int:
        """Print and write the summary as the record has it, and return the exit status that goes with it."""
        from hpo.views.tables import print_tables, print_times  # take 0.1 s, on the first rank only

        session, run_dir = self._session, self._session.run_dir
        evaluations, confirmations = session.open_record().evaluations(), self._confirmations()
        stopped = self._stopped(evaluations, confirmations)
        run = session.manifest
        summary = summarize(evaluations, run, self._top_n, confirmations, ask_models=self._stopping() is None)
        summary["stopped"] = stopped.reason if stopped else None
        summary["remedy"] = stopped.remedy if stopped and stopped.remedy else None
        individuals = None if stopped else self._count_individuals(evaluations)
        left = math.inf if individuals is None else individuals - sum(one.finished for one in evaluations)
        summary["exhausted"] = left <= 0
        budget = 0 if summary["exhausted"] else run.budget
        self.is_search_done = is_over(evaluations, budget, run.pruner, run.objectives)
        summary["wall_seconds"] = round(time.time() - self._started, 3)
        everything = [*evaluations, *confirmations]
        summary["worker_busy_fraction"] = busy_fraction(everything, run.layout.workers, since=self._started)
        print_tables(summary, run_dir.path, run.objectives)
        if summary["worker_busy_fraction"] is not None:
            print_times(summary)
        write_json(self._files.summary_json, {**summary, **self._times_before(summary)})
        if summary["exhausted"]:
            all_of_them = counted(individuals or 0, "individual")
            print(f"The search space is exhausted: it has {all_of_them}, and all were evaluated")
        elif not stopped and not self._is_spent(evaluations):
            some = "few individuals are left, or none" if individuals is None else f"{left} of {individuals} are left"
            print(f"The search has ended since it found nothing new: {some}")
        print(f"The study is {without_password(session.storage)}, the summary {run_dir.summary_json}")
        if stopped:
            options = f"--run-dir {run_dir.path} --resume{f' and {stopped.remedy}' if stopped.remedy else ''}"
            print(f"Stopped: {stopped.reason}. To go on: the same command with {options}")
        sys.stdout.flush()
        self._status = stopped.status if stopped else _status(summary)
        return self._status

    def is_search_over(self) -> bool:
        """Tell whether there is nothing more to search: the budget is spent, or the target reached."""
        evaluations = self._session.open_record().evaluations()
        return self._is_spent(evaluations) or self._is_target_reached(evaluations)

    def _count_individuals(self, evaluations: Sequence[Evaluation]) -> int | None:
        """Return the size of the space, None if it is large; a search that found nothing new counts for longer."""
        if (everything := self._space.everything) is None and not self._is_spent(evaluations):
            everything = list_individuals(
                self._space, math.inf, _SECONDS_TO_COUNT, lambda: self._stopping() is not None
            )
        return None if everything is None else len(everything)

    def _is_spent(self, evaluations: Sequence[Evaluation]) -> bool:
        run = self._session.manifest
        return is_over(evaluations, run.budget, run.pruner, run.objectives)

    def _is_target_reached(self, evaluations: Sequence[Evaluation]) -> bool:
        found = best(evaluations)
        return found is not None and found.loss <= self._target

    def _stopped(self, evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation]) -> Stop | None:
        """Return why the run stopped before it was done; None where its budget is spent and its best confirmed."""
        session, stopping = self._session, self._stopping()
        if self._is_target_reached(evaluations) and (stopping is None or not session.plan.count):
            stopping = target_reached(self._target)
        best = session.find_to_confirm(evaluations, confirmations, self._top_n)
        unconfirmed = session.plan.to_do(best, confirmations)
        if stopping and unconfirmed and stopping.status == Exit.BUDGET_SPENT:
            return replace(stopping, status=Exit.MORE_TO_DO, remedy="")
        return None if self._is_spent(evaluations) and not unconfirmed else stopping

    def _confirmations(self) -> list[Evaluation]:
        session = self._session
        if not session.plan.count or not session.has_confirmations():
            return []
        return session.plan.of(session.open_confirmations().evaluations())

    def _times_before(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the times of an earlier session's summary if this session has evaluated nothing, and else no times."""
        if summary["worker_busy_fraction"] is not None:
            return {}
        before = self._files.summary()
        with suppress(KeyError):
            return {name: before[name] for name in ("wall_seconds", "worker_busy_fraction")}
        return {}


def _status(summary: dict[str, Any]) -> int:
    """Return the exit status of a run that was not stopped."""
    succeeded = summary["best"] and (summary["evaluations"]["complete"] or not summary["evaluations"]["failed"])
    return Exit.BUDGET_SPENT if succeeded else Exit.NOTHING_SUCCEEDED
