"""Send new and changed individuals of a run to a tracker, each trial at most once."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.store.changes import Follower
from hpo.store.evaluations import Evaluation, find_root
from hpo.store.pruning import is_search_over
from hpo.store.record import Record
from hpo.store.run_dir import try_system_lock
from hpo.trackers.tracker import Tracker

_MAX_LOCK_SECONDS = 20.0  # The tracker process of an earlier job may take this long to end.
_POLL_SECONDS = 0.2


class TrackerUpdater:
    """Sends new and changed individuals of studies to a tracker.

    An individual that was retried or promoted is sent again as a whole. Individuals that a warm
    start has imported from another run are not sent.
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
        """Return whether a search has spent its budget, and has nothing left to promote."""
        record = self._records[study]
        return is_search_over(record.read_evaluations(), budget, pruner, record.objectives)

    def show_changes(self, running: bool = True) -> None:
        """Send all changes since the previous call.

        Running evaluations are included if `running` is true. It must be false in the final call.
        """
        for study, (follower, individuals) in self._individuals.items():
            changed = [evaluation for evaluation in follower.read() if evaluation.tests is None]
            for root in individuals.add_trials(changed):
                self._show_individual(study, individuals, root, running)

    def _show_individual(
        self, study: str, individuals: Individuals, root: int, running: bool
    ) -> None:
        latest = individuals.find_latest(root)
        if latest is None or latest.imported_from or (latest.state == "running" and not running):
            return
        key = study, root
        is_running = latest.state == "running"
        destination = self._tracker.destination
        if not is_running and self._shown_evaluations.contains(destination, study, latest):
            return
        whole = individuals.merge_trials(root)
        curve = whole.curve
        before = self._shown_losses.get(key, {})
        # Sent losses are invalid if the curve has another loss for an epoch, or lacks an epoch. The
        # curve of a running evaluation may lack epochs, for example while a retry repeats them.
        from_start = key not in self._shown_losses or not all(
            curve[epoch] == loss if epoch in curve else is_running for epoch, loss in before.items()
        )
        if from_start:
            before = {}
        losses = {epoch: curve[epoch] for epoch in sorted(curve) if epoch not in before}
        if losses or from_start or not is_running:
            self._tracker.show_individual(whole, losses, from_start)
        self._shown_losses[key] = {**before, **losses}
        if not is_running:
            self._shown_evaluations.add(destination, study, latest)
            del self._shown_losses[key]


class Individuals:
    """The individuals of a study, each with all its trials. Trackers show each individual as a run.

    An individual has several trials if it was retried after an interruption, or promoted after a
    pause.
    """

    def __init__(self) -> None:
        self._roots: dict[int, int] = {}
        self._trials: dict[int, dict[int, Evaluation]] = {}

    def add_trials(self, changed_trials: Collection[Evaluation]) -> list[int]:
        """Add or replace trials, and return the first trials of the individuals that changed."""
        changed = {}
        for evaluation in sorted(changed_trials, key=lambda evaluation: evaluation.trial):
            root = find_root(evaluation, self._roots)
            self._trials.setdefault(root, {})[evaluation.trial] = evaluation
            changed[root] = True
        return list(changed)

    def find_latest(self, root: int) -> Evaluation | None:
        """Return the latest trial of an individual that has started; None if no trial has."""
        # A trial that was withdrawn while it waited has no start time.
        started = [
            evaluation
            for evaluation in self._trials[root].values()
            if evaluation.state != "waiting" and math.isfinite(evaluation.started)
        ]
        return max(started, key=lambda evaluation: evaluation.trial, default=None)

    def merge_trials(self, root: int) -> Evaluation:
        """Merge all trials of an individual into one.

        It lasts from the start of the first trial to the end of the latest trial. The losses are
        those of the latest trial that has any. If this trial has resumed an earlier trial, it
        already includes the losses of that trial.
        """
        trials = self._trials[root]
        first = trials[min(trials)]
        latest = self.find_latest(root)
        assert latest is not None
        with_loss = [trial for trial, evaluation in trials.items() if evaluation.curve]
        return replace(
            latest,
            trial=root,
            curve=trials[max(with_loss)].curve if with_loss else {},
            started=first.started,
            island=first.island,
            worker=first.worker,
            generation=first.generation,
            propagator=first.propagator,
        )


class ShownEvaluations:
    """The evaluations that one tracker has received, in a file, which ``with`` locks and closes.

    The file has one JSON object per line. An incomplete final line, left by a killed process, is
    ignored.

    Attributes:
        id: Random identifier of the run. MLflow and Weights & Biases store it, so that a resumed
            run finds its earlier data there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+", errors="replace")
        self.id = ""
        self._shown: set[tuple[str, str, int]] = set()

    def __enter__(self) -> ShownEvaluations:
        end = time.monotonic() + _MAX_LOCK_SECONDS
        while try_system_lock(self._file) is False:
            if time.monotonic() > end:
                raise UsageError(f"another process has locked {self._path}")
            time.sleep(_POLL_SECONDS)
        self._file.seek(0)
        for line in self._file:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                entry = json.loads(line)
                if "id" in entry:
                    self.id = str(entry["id"])
                else:
                    self._shown.add((entry["place"], entry["study"], entry["trial"]))
        if not self.id:
            self.id = uuid.uuid4().hex[:12]
            self._append_entry({"id": self.id})
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def contains(self, destination: str, study: str, evaluation: Evaluation) -> bool:
        """Return whether a tracker's destination has received an evaluation completely."""
        return (destination, study, evaluation.trial) in self._shown

    def add(self, destination: str, study: str, evaluation: Evaluation) -> None:
        """Record that a tracker's destination has received an evaluation completely."""
        self._shown.add((destination, study, evaluation.trial))
        self._append_entry({"place": destination, "study": study, "trial": evaluation.trial})

    def _append_entry(self, entry: dict[str, Any]) -> None:
        self._file.write("\n" + json.dumps(entry))
        self._file.flush()
