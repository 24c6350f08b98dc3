"""From the record to a tracker: individuals are shown as they start, go on and end, each of them once."""

from __future__ import annotations

from collections.abc import Mapping

from hpo.store.record import Record
from hpo.store.rungs import is_over
from hpo.trackers.individual import Individuals
from hpo.trackers.tracker import Tracker
from hpo.trackers.written import Written


class Follower:
    """Shows a tracker the individuals in the studies of a run; none that has not changed since is shown again.

    An individual that is evaluated again, or promoted, is written again as a whole, in place of what was there.
    Evaluations that were taken over from another run are not shown.
    """

    def __init__(self, tracker: Tracker, written: Written) -> None:
        self._tracker = tracker
        self._written = written
        self._records: dict[str, tuple[Record, Individuals]] = {}
        self._open: dict[tuple[str, int], dict[int, float]] = {}  # the losses that were shown of unended individuals

    def follow(self, storage: str, study: str) -> None:
        """Follow a study, in addition to the others."""
        self._records[study] = Record(storage, study), Individuals()

    def is_over(self, study: str, budget: int, pruner: str) -> bool:
        """Tell whether the search in a study has spent its budget, and has nothing to promote."""
        record, _ = self._records[study]
        return is_over(record.evaluations(), budget, pruner, record.objectives)

    def look(self, running: bool = True) -> None:
        """Show what is new; individuals that have not ended only if `running`: then there will be another look."""
        for study, (record, individuals) in self._records.items():
            news = {one.trial: one for one in [*(record.running() if running else []), *record.news()]}
            for root in individuals.learn(news.values()):
                self._show(study, individuals, root, running)

    def _show(self, study: str, individuals: Individuals, root: int, running: bool) -> None:
        latest = individuals.latest(root)
        if latest is None or latest.imported_from or (latest.state == "running" and not running):
            return
        key, is_running = (study, root), latest.state == "running"
        if not is_running and self._written.has(self._tracker.place, study, latest):
            return
        whole = individuals.merged(root)
        shown = self._open.get(key)
        if shown is not None and not _is_continued(shown, whole.curve, is_running):
            shown = None
        losses = {epoch: loss for epoch, loss in sorted(whole.curve.items()) if epoch not in (shown or {})}
        if losses or shown is None or not is_running:
            self._tracker.show(whole, losses, begins=shown is None)
        self._open[key] = {**(shown or {}), **losses}
        if not is_running:
            self._written.add(self._tracker.place, study, latest)
            del self._open[key]


def _is_continued(shown: Mapping[int, float], curve: Mapping[int, float], is_running: bool) -> bool:
    """Tell whether a curve contains the losses that were shown; of one that still grows, as far as it has come."""
    return all(curve[epoch] == loss if epoch in curve else is_running for epoch, loss in shown.items())
