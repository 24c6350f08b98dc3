"""Send new and changed evaluations in the studies of a run to a tracker."""

from __future__ import annotations

from collections.abc import Mapping

from hpo.store.changes import Follower
from hpo.store.pruning import is_search_over
from hpo.store.record import Record
from hpo.trackers.individual_trials import Individuals
from hpo.trackers.shown_evaluations import ShownEvaluations
from hpo.trackers.tracker import Tracker


class TrackerUpdater:
    """Sends new and changed individuals of studies to a tracker.

    An individual that was retried or promoted is sent again as a whole. Individuals that a warm start has imported from
    another run are not sent.
    """

    def __init__(self, tracker: Tracker, shown_evaluations: ShownEvaluations) -> None:
        self._tracker = tracker
        self._shown_evaluations = shown_evaluations
        self._records: dict[str, Record] = {}
        self._individuals: dict[str, tuple[Follower, Individuals]] = {}
        # Losses by epoch that were sent of running individuals, by study and first trial.
        self._shown_losses: dict[tuple[str, int], dict[int, float]] = {}

    def add_study(self, storage: str, study: str) -> None:
        """Also send the individuals of the study named `study` in `storage`."""
        record = Record(storage, study)
        self._records[study] = record
        self._individuals[study] = record.follow(with_losses=True), Individuals()

    def is_over(self, study: str, budget: int, pruner: str) -> bool:
        """Return whether the search in a study has spent its budget and no paused individual can be promoted."""
        record = self._records[study]
        return is_search_over(record.read_evaluations(), budget, pruner, record.objectives)

    def show_changes(self, running: bool = True) -> None:
        """Send all changes since the previous call.

        Args:
            running: Whether to include evaluations that are still running. Must be False in the final call.
        """
        for study, (follower, individuals) in self._individuals.items():
            changed = [evaluation for evaluation in follower.read() if evaluation.tests is None]
            for root in individuals.add_trials(changed):
                self._show_individual(study, individuals, root, running)

    def _show_individual(self, study: str, individuals: Individuals, root: int, running: bool) -> None:
        latest = individuals.find_latest(root)
        if latest is None or latest.imported_from or (latest.state == "running" and not running):
            return
        key, is_running = (study, root), latest.state == "running"
        if not is_running and self._shown_evaluations.contains(self._tracker.destination, study, latest):
            return
        whole = individuals.merge_trials(root)
        shown = self._shown_losses.get(key)
        if shown is not None and not _is_continued(shown, whole.curve, is_running):
            shown = None
        losses = {epoch: loss for epoch, loss in sorted(whole.curve.items()) if epoch not in (shown or {})}
        if losses or shown is None or not is_running:
            self._tracker.show_individual(whole, losses, from_start=shown is None)
        self._shown_losses[key] = {**(shown or {}), **losses}
        if not is_running:
            self._shown_evaluations.add(self._tracker.destination, study, latest)
            del self._shown_losses[key]


def _is_continued(shown: Mapping[int, float], curve: Mapping[int, float], is_running: bool) -> bool:
    """Return whether the losses that were sent are still valid, so that only new losses must be sent.

    They are invalid if the curve has another loss for an epoch, or lacks an epoch. The curve of a running evaluation
    may lack epochs, for example while a retry repeats them.
    """
    return all(curve[epoch] == loss if epoch in curve else is_running for epoch, loss in shown.items())
