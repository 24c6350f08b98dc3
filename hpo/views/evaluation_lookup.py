"""Find an evaluation of a run by its label, or choose the most relevant evaluation, and collect its details.

The label of an evaluation is "7" for trial 7 of the search, and "confirm-7" for trial 7 of the
confirmation.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import cached_property

from hpo.errors import UsageError
from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_winner
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import Manifest
from hpo.store.output_log import read_log_tail
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.views.evaluation_details import EvaluationDetails


class EvaluationLookup:
    """Evaluations of a run, as they were when they were read, with a search by label.

    Args:
        manifest: Content of run.json.
        in_use: Whether the run is active now; None if this host cannot see that.
        confirmations: Evaluations that train the best individuals again with other seeds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        manifest: Manifest,
        in_use: bool | None,
        evaluations: Sequence[Evaluation],
        confirmations: Sequence[Evaluation],
    ) -> None:
        self.run_dir = run_dir
        self._manifest = manifest
        self._in_use = in_use
        self._evaluations = evaluations
        self._confirmations = confirmations

    @classmethod
    def read(cls, reader: RunReader) -> EvaluationLookup:
        """Read all evaluations of a run, and return a lookup for them."""
        # Read first: if the run has ended, the study is complete.
        in_use = reader.run_dir.is_in_use
        return cls(
            reader.run_dir,
            reader.manifest,
            in_use,
            reader.read_evaluations(),
            reader.read_confirmations(all_plans=True),
        )

    def find_evaluation(self, name: str) -> Evaluation:
        """Return the evaluation whose label is `name`, such as "7" (search) or "confirm-0" (confirmation).

        Raises:
            UsageError: `name` is not a label, or no evaluation has this label.
        """
        if not re.fullmatch(r"(confirm-)?[0-9]{1,18}", name):
            raise UsageError(f"TRIAL must be a number or confirm-N, got {name!r}.")
        trial = int(name.removeprefix("confirm-"))
        evaluations = self._confirmations if name.startswith("confirm-") else self._evaluations
        found = next((evaluation for evaluation in evaluations if evaluation.trial == trial), None)
        if found is None:
            available = (
                " and ".join(
                    filter(None, map(_format_span, (self._evaluations, self._confirmations)))
                )
                or "none yet"
            )
            raise UsageError(f"{self.run_dir.path} has no trial {name}. Its trials: {available}")
        return found

    def choose_evaluation(self) -> tuple[Evaluation, str]:
        """Return the most relevant evaluation of the run, and the reason for this choice as text.

        This is the winner (the recommended evaluation), or the latest failed evaluation if none has
        succeeded.

        Raises:
            UsageError: No evaluation has succeeded or failed.
        """
        confirmations = make_plan(self._manifest).select_planned(self._confirmations)
        winner = find_winner(self._evaluations, confirmations, self._manifest.objectives)
        if winner is not None:
            ended = all(evaluation.is_finished for evaluation in confirmations)
            confirmed = any(
                evaluation.confirms == winner.trial and evaluation.state == "complete"
                for evaluation in confirmations
            )
            return (
                winner,
                f"the winner: the lowest {'mean loss over other seeds' if ended and confirmed else 'loss'}",
            )
        failed = self.list_failed()
        if failed:
            return failed[0], "the latest failure, since no evaluation has succeeded"
        raise UsageError(
            f"{self.run_dir.path}: no evaluation has succeeded or failed. Name one of its trials: "
            f"{_format_span(self._evaluations) or 'none yet'}"
        )

    def list_failed(self) -> list[Evaluation]:
        """Return all failed evaluations, sorted by the time of their failure, the latest first."""
        failed = [
            evaluation
            for evaluation in [*self._evaluations, *self._confirmations]
            if evaluation.state == "failed"
        ]
        return sorted(
            failed, key=lambda evaluation: (evaluation.ended, evaluation.trial), reverse=True
        )

    def collect_details(self, evaluation: Evaluation) -> EvaluationDetails:
        """Return all known facts about an evaluation."""
        confirms = evaluation.confirms is not None
        own, run = self._confirmations if confirms else self._evaluations, self._manifest
        return EvaluationDetails(
            evaluation,
            run.confirmation_study if confirms else run.study,
            self._in_use,
            self._find_seed(evaluation),
            next(
                (candidate.trial for candidate in own if candidate.retry_of == evaluation.trial),
                None,
            ),
            next(
                (candidate.state for candidate in own if candidate.trial == evaluation.retry_of), ""
            ),
            []
            if confirms
            else [
                candidate
                for candidate in self._confirmations
                if candidate.confirms == evaluation.trial
            ],
            read_log_tail(self.run_dir.get_log_path(evaluation.trial, confirms)),
            *self._compare_with_front(evaluation),
        )

    def _find_seed(self, evaluation: Evaluation) -> int | None:
        """Return the seed of an evaluation; None if it is unknown, for example for an imported evaluation."""
        run = self._manifest
        is_known_from_run = evaluation.state == "waiting" or len(run.sessions) == 1
        return (
            run.seed
            if evaluation.seed is None and is_known_from_run and not evaluation.imported_from
            else evaluation.seed
        )

    def _compare_with_front(self, evaluation: Evaluation) -> tuple[bool | None, int | None]:
        """Return whether an evaluation is on the Pareto front, and if not, a trial on the front that is better.

        This trial is as good or better in all objectives; None if the evaluation is not complete,
        or is a confirmation. Both values are None if the loss is the only objective.
        """
        objectives = self._manifest.objectives
        if not objectives.is_multi_objective:
            return None, None
        if evaluation.state != "complete" or evaluation.confirms is not None:
            return False, None
        if any(candidate.trial == evaluation.trial for candidate in self._front):
            return True, None
        own = objectives.compute_costs(evaluation.values)
        better = (
            candidate
            for candidate in self._front
            if all(map(operator.le, objectives.compute_costs(candidate.values), own))
        )
        return False, next((candidate.trial for candidate in better), None)

    @cached_property
    def _front(self) -> list[Evaluation]:
        return find_front(self._evaluations, self._manifest.objectives)


def _format_span(evaluations: Sequence[Evaluation]) -> str:
    """Return the first and the last label as text, such as "0 to 7"; empty without evaluations."""
    if not evaluations:
        return ""
    first, last = (evaluations[index].label for index in (0, -1))
    return first if first == last else f"{first} to {last}"
