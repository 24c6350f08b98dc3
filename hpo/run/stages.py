"""The stages of a run: search, confirmation, conclusion. All ranks go through them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hpo.evaluation.evaluator import Evaluator, Terms
from hpo.evaluation.group import Group
from hpo.evaluation.leader import target_reached
from hpo.evaluation.program import Program
from hpo.evaluation.teams import Teams
from hpo.ranks.agreement import on_first
from hpo.ranks.communicator import SleepingComm
from hpo.ranks.job import Job
from hpo.run.ready import Ready, Run
from hpo.run.recording import recording
from hpo.store.evaluations import CONFIRMING

if TYPE_CHECKING:
    from hpo.evaluation.growing import Growing
    from hpo.evaluation.leader import Leader
    from hpo.ranks.calls import Caller
    from hpo.run.first_rank import FirstRank
    from hpo.run.leading import Leading
    from hpo.store.writer import Writer


class Stages:
    """The stages of a run, each to be gone through by all ranks of the job together.

    `leaders` is the communicator of the workers' leaders, None on other ranks; `first` is None on all ranks but the
    job's first.
    """

    def __init__(
        self,
        run: Run,
        job: Job,
        ready: Ready,
        group: Group,
        leaders: SleepingComm | None,
        first: FirstRank | None,
    ) -> None:
        self._job = job
        self._options = run.options
        self._manifest = run.manifest
        self._files = run.files
        self._ready = ready
        self._group = group
        self._first = first
        self._teams = (
            Teams(group, ready.host, job.world, run.manifest.layout, self._join) if run.options.elastic else None
        )
        self._program = Program.of(ready.problem)
        self._prefix = ""  # of the names of evaluations
        self._leading: Leading | None = None
        self._join(group)
        if leaders is not None:
            from hpo.run.leading import Leading  # needs Propulate and numpy

            self._leading = Leading(run, job.watch, leaders, ready.slot, self._make_evaluator)

    def search(self) -> None:
        """Search until the budget is spent or the target reached, unless one of them is so already."""
        first, leading = self._first, self._leading
        if on_first(self._job.world, lambda: first.is_search_over() if first else None):
            return
        self._ready.slot.fork_ahead()
        with self._recording(first.search_writer if first else None, self._manifest.budget) as line:
            if leading:
                leading.search(line, self._ready.problem.space, self._ready.problem.file.script)
            else:
                self._follow()
        self._hear_of_stops()

    def confirm(self) -> None:
        """Train the best again with other seeds, if that is asked for and the search is at its end."""
        self._job.watch.forget(target_reached(self._options.target))  # it ends the search alone
        first, leading = self._first, self._leading
        if not self._manifest.confirm_seeds:
            return
        total = on_first(self._job.world, lambda: first.begin_confirmations() if first else 0)
        if not total:
            return
        self._prefix = CONFIRMING
        with self._recording(partial(first.confirmations_writer, total) if first else None, total) as line:
            if leading:
                leading.confirm(line)
            else:
                self._follow()
        self._hear_of_stops()

    def conclude(self) -> int:
        """Sum the run up, and return the exit status."""
        return int(self._job.world.bcast(self._first.conclude() if self._first else None))

    @contextmanager
    def _recording(self, make_writer: Callable[[], Writer] | None, budget: int) -> Iterator[Caller]:
        """Yield this rank's line to the writer of a record; the first rank shows its progress."""
        with recording(self._job, make_writer) as (line, writer), ExitStack() as held:
            if self._first and writer:
                held.enter_context(self._first.show_progress(writer, budget))
            yield line

    def _follow(self) -> None:
        """Evaluate what this worker's leader claims, until there is nothing more."""
        evaluate = self._make_evaluator()
        while evaluate(None) is not None:
            pass

    def _make_evaluator(self, leader: Leader | None = None, growing: Growing | None = None) -> Evaluator:
        terms = Terms(
            self._ready.places,
            self._manifest.seed,
            self._files.trials,
            self._prefix,
            self._program,
            self._files.checkpoints,
            saves=self._options.checkpoint_every != math.inf,
        )
        return Evaluator(terms, self._group, self._job.watch, leader, self._teams, growing)

    def _join(self, group: Group) -> None:
        self._job.watch.join(group.own_comm, group.index, group.patience)

    def _hear_of_stops(self) -> None:
        """Let all ranks know why the run stops: who heard it may have ended it before its message came to others."""
        for stop in self._job.world.allgather(self._job.watch.stopping):
            if stop is not None:
                self._job.watch.stop(stop)
