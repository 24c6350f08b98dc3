"""What the leader of a worker does to keep the states of its evaluations: when to copy them, when to write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo.process import clock
from hpo.process.standard_streams import warn
from hpo.store.checkpoints import CheckpointStore, read_checkpoint_info
from hpo.text_format import format_error

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import Attempt, CopyHolder
    from hpo.store.evaluations import Assignment

# Copying takes a hundredth of the time that training takes, and so does copying and writing together.
_TIME_RATIO = 100.0
_DEFAULT_INTERVAL = 10.0  # seconds between two states that are written, where nobody has said another time


class Checkpointer:
    """Keeps the states of a worker's evaluations, one after the other.

    The last state is copied in the trainer's memory, to be written if the run stops, and written every `every` seconds;
    at a loss in both cases. If `every` is None, both take a hundredth of the time, as measured; infinity is never. If
    individuals on `islands` inherit from others, each state is copied, and that of an evaluation's end is written.
    """

    def __init__(self, states: CheckpointStore, every: float | None, islands: int = 0) -> None:
        self._checkpoints = states
        self._interval = every
        self.islands = islands
        self.can_copy = True  # as far as is known
        self._seconds_to_copy = self._seconds_to_write = 0.0
        self._copied_at = self._written_at = -math.inf
        self._warned_topics: set[str] = set()

    def reset_timer(self) -> None:
        """Begin to count the time since an evaluation has begun."""
        self._copied_at = self._written_at = clock.now()

    def find_checkpoint(self, assignment: Assignment) -> Path | None:
        """Return the file of an evaluation's state, which is whole; None where there is none."""
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
        """Return the file of the state of one that is inherited from, by its first trial; raises ValueError without.

        A file that cannot be read is removed, so that it is not inherited again.
        """
        path = self._checkpoints.get_path(parent)
        try:
            read_checkpoint_info(path)
        except ValueError:
            self._checkpoints.remove_root(parent)
            raise
        return path

    def reject_checkpoint(self, assignment: Assignment, reason: str) -> None:
        """Remove a state from which its evaluation cannot go on."""
        warn(f"warning: trial {assignment.number} begins again, since it cannot go on from its state: {reason}")
        self._checkpoints.remove_ended(assignment)

    @property
    def is_enabled(self) -> bool:
        """Whether states are kept at all."""
        return self._interval != math.inf

    def is_copy_due(self) -> bool:
        """Tell whether the state of an evaluation that goes on is to be copied now."""
        since = clock.now() - self._copied_at
        return self.islands > 0 or (
            self.is_enabled and (since >= _TIME_RATIO * self._seconds_to_copy or self.is_write_due())
        )

    def make_draft_path(self, attempt: Attempt) -> str:
        """Return where the next state of an evaluation is to be written; empty, with a warning, if it cannot be."""
        try:
            return str(self._checkpoints.make_draft_path(attempt.assignment).absolute())
        except OSError as error:
            self._warn_unsaved(attempt, format_error(error))
            return ""

    def drop_draft(self, attempt: Attempt) -> None:
        """Remove the draft of a state that a trainer which has crashed may have begun to write."""
        self._checkpoints.remove_draft(attempt.assignment)

    def record_copy(self, attempt: Attempt, kept: Mapping[str, Any], since: float) -> int:
        """Learn what the trainer has kept of a state since a time; return the losses before a written one."""
        self._copied_at = clock.now()
        if error := kept.get("state_error"):
            self.can_copy = False
            self._warn_unsaved(attempt, error)
            return 0
        written = kept.get("written")
        self._seconds_to_copy = self._copied_at - since - (written["seconds"] if written else 0.0)
        attempt.copied_step = len(attempt.losses)
        return self._commit_draft(attempt, written) if written else 0

    def write_checkpoint(self, attempt: Attempt, copies: CopyHolder) -> int:
        """Write the last state of an evaluation, and return after how many losses it was saved.

        Returns 0 if it cannot be written, which is a warning.
        """
        draft = self.make_draft_path(attempt)
        return self._commit_draft(attempt, copies.write_checkpoint(draft)) if draft else 0

    def _commit_draft(self, attempt: Attempt, written: Mapping[str, Any]) -> int:
        """Put a state that was written in its place, and return after how many losses it was saved, or 0."""
        self._written_at, self._seconds_to_write = clock.now(), written["seconds"]
        attempt.copied_step = 0
        error = written.get("error", "")
        if not error:
            try:
                self._checkpoints.commit_draft(attempt.assignment)
                return int(written["losses"])
            except OSError as problem:
                error = format_error(problem)
        self._checkpoints.remove_draft(attempt.assignment)
        self._warn_unsaved(attempt, error)
        return 0

    def has_last_checkpoint(self, attempt: Attempt, checkpoint_step: int) -> bool:
        """Tell whether the state of an evaluation's last loss is there, copied, or written after so many losses."""
        return len(attempt.losses) in (attempt.copied_step, checkpoint_step)

    def has_file(self, assignment: Assignment) -> bool:
        """Tell whether there is a file with the state of an evaluation."""
        return self._checkpoints.has_checkpoint(assignment)

    def discard_checkpoint(self, assignment: Assignment) -> None:
        """Remove the state of an evaluation that has ended."""
        self._checkpoints.remove_ended(assignment)

    def _warn_unsaved(self, attempt: Attempt, reason: str) -> None:
        self.warn_once("states", f"the state of trial {attempt.assignment.number} cannot be saved: {reason}")

    def warn_once(self, what: str, text: str) -> None:
        """Warn of something, unless that has been done."""
        if what not in self._warned_topics:
            warn(f"warning: {text}")
            self._warned_topics.add(what)

    def is_write_due(self) -> bool:
        """Tell whether a state is to be written now."""
        every = self._interval
        if every is None:
            every = max(_DEFAULT_INTERVAL, _TIME_RATIO * (self._seconds_to_copy + self._seconds_to_write))
        return clock.now() - self._written_at >= every
