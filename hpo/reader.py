"""A run on disk as its readers see it, while it goes on or afterwards: no MPI, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.confirmation import compare, plan_of
from hpo.run_dir import RunDir
from hpo.study import CONFIRMATIONS, confirmations_of, existing_study
from hpo.summary import summarize
from hpo.trials import Evaluation
from hpo.winner import winner_of

if TYPE_CHECKING:
    import optuna


class RunReader:
    """The run in a directory: `about` is its run.json, and what the methods give is as the record has it now.

    Raises UsageError where there is no run, or none that can be read; `storage` is needed where it has a password.
    """

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.run_dir = RunDir(path)
        self.about: dict[str, Any] = self.run_dir.read()
        self._located = self.run_dir.locate(storage or self.about["storage"])
        self._record = existing_study(self.run_dir, self._located, self.about["study"])

    @property
    def study(self) -> optuna.Study:
        """The study, for Optuna's own analyses."""
        return self._record.study

    def evaluations(self) -> list[Evaluation]:
        """Give all evaluations in the order in which they were started."""
        return self._record.evaluations()

    @property
    def confirming_study(self) -> str:
        """The name of the study that holds the confirmations."""
        return str(self.about["study"]) + CONFIRMATIONS

    def confirmations(self, all_plans: bool = False) -> list[Evaluation]:
        """Give the evaluations that confirm the best, as far as the run's last session planned them, or all of them."""
        plan = plan_of(self.about["confirm"], self.about["seed"], self.about["settings"])
        record = confirmations_of(self.run_dir, self._located, self.about["study"]) if plan.count else None
        evaluations = record.evaluations() if record else []
        return evaluations if all_plans else plan.of(evaluations)

    def winner(self) -> Evaluation | None:
        """Give the evaluation that the run recommends; None while nothing has succeeded."""
        return winner_of(self.evaluations(), compare(self.confirmations()))

    def summary(self, top_n: int) -> dict[str, Any]:
        """Summarise the run as it stands: summary.json without the times."""
        return summarize(self.evaluations(), self.about["budget"], top_n, self.confirmations())
