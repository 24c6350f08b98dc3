"""From the record to a tracker: evaluations are shown as they start, go on and end, each of them once."""

from __future__ import annotations

from hpo.store.evaluations import Evaluation
from hpo.store.record import Record
from hpo.store.rungs import is_over
from hpo.trackers.tracker import Tracker
from hpo.trackers.written import Written


class Follower:
    """Shows a tracker the evaluations in the studies of a run; none that it was shown in any session is shown again.

    Evaluations that were taken over from another run are not shown.
    """

    def __init__(self, tracker: Tracker, written: Written) -> None:
        self._tracker = tracker
        self._written = written
        self._records: dict[str, Record] = {}
        self._shown: dict[tuple[str, int], int] = {}  # the last epoch that was shown of evaluations that have not ended

    def follow(self, storage: str, study: str) -> None:
        """Follow a study, beside those that are followed already."""
        self._records[study] = Record(storage, study)

    def is_over(self, study: str, budget: int, pruner: str) -> bool:
        """Tell whether the search in a study has spent its budget, and has nothing to promote."""
        record = self._records[study]
        return is_over(record.evaluations(), budget, pruner, record.objectives)

    def look(self, running: bool = True) -> None:
        """Show what is new; evaluations that have not ended only if `running`: then there will be another look."""
        for study, record in self._records.items():
            going_on = record.running() if running else []
            for evaluation in [*going_on, *record.news()]:
                if running or evaluation.state != "running":
                    self._show(study, evaluation)

    def _show(self, study: str, evaluation: Evaluation) -> None:
        key, is_running = (study, evaluation.trial), evaluation.state == "running"
        if key not in self._shown:
            if evaluation.origin or not (is_running or evaluation.finished):
                return
            if self._written.has(self._tracker.place, study, evaluation):
                return
        last = self._shown.get(key, 0)
        losses = {epoch: loss for epoch, loss in sorted(evaluation.curve.items()) if epoch > last}
        if losses or not is_running or key not in self._shown:
            self._tracker.show(evaluation, losses)
        self._shown[key] = max(losses, default=last)
        if not is_running:
            self._written.add(self._tracker.place, study, evaluation)
            del self._shown[key]
