"""Decide when the leader copies and writes the checkpoints of its evaluations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpo.process import clock
from hpo.process.standard_streams import warn
from hpo.store.checkpoints import CheckpointStore, read_checkpoint_info
from hpo.text_format import format_error

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import Attempt
    from hpo.store.evaluations import Assignment

# Copying takes at most 1% of the training time, and so do copying and writing together.
_TIME_RATIO = 100.0
_DEFAULT_INTERVAL = 10.0  # minimum seconds between writes without --checkpoint-every


class Checkpointer:
    """Copies and writes the checkpoints of the evaluations of one worker.

    After a loss, the trainer copies the latest checkpoint to a draft. The draft is written to the
    evaluation's checkpoint file at intervals, and when the run stops.

    Args:
        checkpoints: The store of the checkpoint files.
        every: Seconds between writes. Infinity disables checkpoints. None limits copying and
            writing to 1% of the training time.
        islands: Number of islands in population based training, otherwise 0. If it is not 0, each
            checkpoint is copied, and the final checkpoint of a completed evaluation is written.
    """

    def __init__(self, checkpoints: CheckpointStore, every: float | None, islands: int = 0) -> None:
        self._checkpoints = checkpoints
        self._interval = every
        self.islands = islands
        self._seconds_to_copy = self._seconds_to_write = 0.0
        self._copied_at = self._written_at = -math.inf
        self._warned_topics: set[str] = set()

    def reset_timer(self) -> None:
        """Restart the intervals between copies and writes, at the start of an evaluation."""
        self._copied_at = self._written_at = clock.now()

    def find_checkpoint(self, assignment: Assignment) -> Path | None:
        """Return the file of an evaluation's checkpoint; None unless there is a valid one.

        An invalid file is removed, with a warning.
        """
        path = self._checkpoints.find_checkpoint(assignment)
        if path is None:
            return None
        try:
            read_checkpoint_info(path, assignment.params)
        except ValueError as error:
            self.reject_checkpoint(assignment, str(error))
            return None
        return path

    def find_parent_checkpoint(self, parent: int) -> Path:
        """Return the checkpoint file of a parent.

        Args:
            parent: Number of the parent's first trial.

        Raises:
            ValueError: The file cannot be read. It is removed, so that no other evaluation tries to
                read it.
        """
        path = self._checkpoints.get_path(parent)
        try:
            read_checkpoint_info(path)
        except ValueError:
            self._checkpoints.remove_root(parent)
            raise
        return path

    def reject_checkpoint(self, assignment: Assignment, reason: str) -> None:
        """Remove a checkpoint from which its evaluation cannot resume, with a warning."""
        warn(
            f"warning: trial {assignment.number} restarts, since it cannot resume from its "
            f"checkpoint: {reason}"
        )
        self._checkpoints.remove_ended(assignment)

    @property
    def is_enabled(self) -> bool:
        """Whether checkpoints are kept at all."""
        return self._interval != math.inf

    def is_copy_due(self) -> bool:
        """Return whether the latest checkpoint of a running evaluation must be copied now."""
        if self.islands > 0:
            return True
        if not self.is_enabled:
            return False
        elapsed = clock.now() - self._copied_at
        return elapsed >= _TIME_RATIO * self._seconds_to_copy or self.is_write_due()

    def record_copy(self, attempt: Attempt, since: float) -> None:
        """Record that the checkpoint of the latest loss was copied.

        Args:
            since: Time at which the copy began, on the clock of `hpo.process.clock`.
        """
        self._copied_at = clock.now()
        self._seconds_to_copy = self._copied_at - since
        attempt.copied_step = len(attempt.losses)

    def record_failed_copy(self, attempt: Attempt, reason: str) -> None:
        """Record that a copy has failed, and print a warning."""
        self._copied_at = clock.now()
        self._warn_unsaved(attempt, reason)

    def write_checkpoint(self, attempt: Attempt) -> int:
        """Write the latest checkpoint of an evaluation to its file.

        Returns:
            The number of losses in the checkpoint, or 0 after an error, which is printed as a
            warning.
        """
        assert attempt.drafts is not None
        began = clock.now()
        losses = 0
        try:
            path = self._checkpoints.make_draft_path(attempt.assignment)
            losses = attempt.drafts.make_checkpoint_file(path)
            self._checkpoints.commit_draft(attempt.assignment)
        except (OSError, ValueError) as error:
            self._checkpoints.remove_draft(attempt.assignment)
            self._warn_unsaved(attempt, format_error(error))
            losses = 0
        self._written_at = clock.now()
        self._seconds_to_write = self._written_at - began
        attempt.copied_step = 0
        return losses

    def has_file(self, assignment: Assignment) -> bool:
        """Return whether an evaluation has a checkpoint file."""
        return self._checkpoints.has_checkpoint(assignment)

    def discard_checkpoint(self, assignment: Assignment) -> None:
        """Remove the checkpoint of an evaluation that has ended."""
        self._checkpoints.remove_ended(assignment)

    def _warn_unsaved(self, attempt: Attempt, reason: str) -> None:
        trial = attempt.assignment.number
        self.warn_once("states", f"the checkpoint of trial {trial} cannot be saved: {reason}")

    def warn_once(self, topic: str, text: str) -> None:
        """Print a warning, unless this method has printed a warning on the same topic before."""
        if topic not in self._warned_topics:
            warn(f"warning: {text}")
            self._warned_topics.add(topic)

    def is_write_due(self) -> bool:
        """Return whether the latest checkpoint must be written to its file now."""
        interval = self._interval
        if interval is None:
            seconds = self._seconds_to_copy + self._seconds_to_write
            interval = max(_DEFAULT_INTERVAL, _TIME_RATIO * seconds)
        return clock.now() - self._written_at >= interval
