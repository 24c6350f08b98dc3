"""Finding one evaluation of a run by its name, or the one that matters most, and all that is known of it."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import cached_property

from hpo.errors import UsageError
from hpo.results.confirmation import plan_of
from hpo.results.reader import RunReader
from hpo.results.winner import winner_of
from hpo.store.evaluations import Evaluation
from hpo.store.front import front
from hpo.store.log import read_log
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir
from hpo.views.details import Details


class Lookup:
    """The evaluations of a run, and those that confirm its best, as they were at one moment."""

    def __init__(
        self,
        run_dir: RunDir,
        manifest: Manifest,
        in_use: bool | None,
        search: Sequence[Evaluation],
        confirming: Sequence[Evaluation],
    ) -> None:
        self.run_dir = run_dir
        self._manifest = manifest
        self._in_use = in_use
        self._search = search
        self._confirming = confirming

    @classmethod
    def read(cls, reader: RunReader) -> Lookup:
        """Look up evaluations as the record holds them now."""
        in_use = reader.run_dir.in_use  # first: if the run has ended by now, all of it is in the record
        return cls(reader.run_dir, reader.manifest, in_use, reader.evaluations(), reader.confirmations(all_plans=True))

    def named(self, name: str) -> Evaluation:
        """Return the evaluation with this label; raises UsageError, saying which there are, where there is none."""
        if not re.fullmatch(r"(confirm-)?[0-9]{1,18}", name):
            raise UsageError(f"{name!r} is no trial: give a number, or confirm-0 for the first that confirms the best")
        place = int(name.removeprefix("confirm-"))
        among = self._confirming if name.startswith("confirm-") else self._search
        found = next((one for one in among if one.trial == place), None)
        if found is None:
            there = " and ".join(filter(None, map(_span, (self._search, self._confirming)))) or "none yet"
            raise UsageError(f"{self.run_dir.path} has no trial {name}: there are {there}")
        return found

    def chosen(self) -> tuple[Evaluation, str]:
        """Return the winner, or else what failed last, and why it was chosen; raises UsageError without either."""
        confirmations = plan_of(self._manifest).of(self._confirming)
        winner = winner_of(self._search, confirmations, self._manifest.objectives)
        if winner is not None:
            ended = all(one.finished for one in confirmations)
            confirmed = any(one.confirms == winner.trial and one.state == "complete" for one in confirmations)
            return winner, f"the winner: the lowest {'mean loss over other seeds' if ended and confirmed else 'loss'}"
        failed = self.failed()
        if failed:
            return failed[0], "the last that failed, as nothing has succeeded"
        raise UsageError(
            f"{self.run_dir.path}: nothing has succeeded or failed; name a trial: there are "
            f"{_span(self._search) or 'none yet'}"
        )

    def failed(self) -> list[Evaluation]:
        """Return what failed, the latest first."""
        failed = [one for one in [*self._search, *self._confirming] if one.state == "failed"]
        return sorted(failed, key=lambda one: (one.ended, one.trial), reverse=True)

    def details(self, evaluation: Evaluation) -> Details:
        """Return everything about an evaluation."""
        confirms = evaluation.confirms is not None
        own, run = self._confirming if confirms else self._search, self._manifest
        return Details(
            evaluation,
            run.confirming_study if confirms else run.study,
            self._in_use,
            self._seed(evaluation),
            next((one.trial for one in own if one.retry_of == evaluation.trial), None),
            next((one.state for one in own if one.trial == evaluation.retry_of), ""),
            [] if confirms else [one for one in self._confirming if one.confirms == evaluation.trial],
            read_log(self.run_dir.printed(evaluation.trial, confirms)),
            *self._place(evaluation),
        )

    def _seed(self, evaluation: Evaluation) -> int | None:
        """Return the seed of an evaluation; None if another run made it, or it is from before seeds were recorded."""
        run = self._manifest
        is_told_by_run = evaluation.state == "waiting" or len(run.sessions) == 1
        return (
            run.seed if evaluation.seed is None and is_told_by_run and not evaluation.imported_from else evaluation.seed
        )

    def _place(self, evaluation: Evaluation) -> tuple[bool | None, int | None]:
        """Return whether an evaluation is on the front, and a trial of the front that is as good or better in all."""
        objectives = self._manifest.objectives
        if not objectives.are_several:
            return None, None
        if evaluation.state != "complete" or evaluation.confirms is not None:
            return False, None
        if any(one.trial == evaluation.trial for one in self._front):
            return True, None
        own = objectives.costs(evaluation.values)
        better = (one for one in self._front if all(map(operator.le, objectives.costs(one.values), own)))
        return False, next((one.trial for one in better), None)

    @cached_property
    def _front(self) -> list[Evaluation]:
        return front(self._search, self._manifest.objectives)


def _span(evaluations: Sequence[Evaluation]) -> str:
    """Return which trials there are, as text; empty where there are none."""
    if not evaluations:
        return ""
    first, last = (evaluations[place].label for place in (0, -1))
    return first if first == last else f"{first} to {last}"
