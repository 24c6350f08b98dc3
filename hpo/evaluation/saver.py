"""What the leader of a worker does to keep the states of its evaluations: when to copy them, when to write them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpo.process import clock
from hpo.process.printed import warn
from hpo.store.states import States, read_about
from hpo.text import message

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import Attempt, Copies
    from hpo.store.evaluations import Assignment

# Copying takes a hundredth of the time that training takes, and so does copying and writing together.
_SHARE = 100.0
_OFTEN_ENOUGH = 10.0  # seconds between two states that are written, where nobody has said another time


class Saver:
    """Keeps the states of a worker's evaluations, one after the other.

    The last state is copied in the trainer's memory, to be written if the run stops, and written every `every` seconds;
    at a loss in both cases. If `every` is None, both take a hundredth of the time, as measured; infinity is never. If
    individuals on `islands` inherit from others, each state is copied, and that of an evaluation's end is written.
    """

    def __init__(self, states: States, every: float | None, islands: int = 0) -> None:
        self._states = states
        self._every = every
        self.islands = islands
        self.can_copy = True  # as far as is known
        self._seconds_to_copy = self._seconds_to_write = 0.0
        self._copied = self._written = -math.inf
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Begin to count the time since an evaluation has begun."""
        self._copied = self._written = clock.now()

    def find(self, assignment: Assignment) -> Path | None:
        """Return the file of an evaluation's state, which is whole; None where there is none."""
        path = self._states.find(assignment)
        if path is None:
            return None
        try:
            read_about(path, assignment.params)
        except ValueError as error:
            self.reject(assignment, str(error))
            return None
        return path

    def parents(self, parent: int) -> Path:
        """Return the file of the state of one that is inherited from, by its first trial; raises ValueError without.

        A file that cannot be read is removed, so that it is not inherited again.
        """
        path = self._states.path(parent)
        try:
            read_about(path)
        except ValueError:
            self._states.drop(parent)
            raise
        return path

    def reject(self, assignment: Assignment, reason: str) -> None:
        """Remove a state from which its evaluation cannot go on."""
        warn(f"warning: trial {assignment.number} begins again, since it cannot go on from its state: {reason}")
        self._states.discard(assignment)

    @property
    def is_on(self) -> bool:
        """Whether states are kept at all."""
        return self._every != math.inf

    def wants(self) -> bool:
        """Tell whether the state of an evaluation that goes on is to be copied now."""
        since = clock.now() - self._copied
        return self.islands > 0 or (self.is_on and (since >= _SHARE * self._seconds_to_copy or self.is_due()))

    def draft(self, attempt: Attempt) -> str:
        """Return where the next state of an evaluation is to be written; empty, with a warning, if it cannot be."""
        try:
            return str(self._states.draft(attempt.assignment).absolute())
        except OSError as error:
            self._warn(attempt, message(error))
            return ""

    def drop_draft(self, attempt: Attempt) -> None:
        """Remove the draft of a state that a trainer which has crashed may have begun to write."""
        self._states.drop_draft(attempt.assignment)

    def take_kept(self, attempt: Attempt, kept: Mapping[str, Any], since: float) -> int:
        """Learn what the trainer has kept of a state since a time; return the losses before a written one."""
        self._copied = clock.now()
        if error := kept.get("state_error"):
            self.can_copy = False
            self._warn(attempt, error)
            return 0
        written = kept.get("written")
        self._seconds_to_copy = self._copied - since - (written["seconds"] if written else 0.0)
        attempt.copied_after = len(attempt.losses)
        return self._take_written(attempt, written) if written else 0

    def write(self, attempt: Attempt, copies: Copies) -> int:
        """Write the last state of an evaluation, and return after how many losses it was saved.

        Returns 0 if it cannot be written, which is a warning.
        """
        draft = self.draft(attempt)
        return self._take_written(attempt, copies.write_state(draft)) if draft else 0

    def _take_written(self, attempt: Attempt, written: Mapping[str, Any]) -> int:
        """Put a state that was written in its place, and return after how many losses it was saved, or 0."""
        self._written, self._seconds_to_write = clock.now(), written["seconds"]
        attempt.copied_after = 0
        error = written.get("error", "")
        if not error:
            try:
                self._states.place(attempt.assignment)
                return int(written["losses"])
            except OSError as problem:
                error = message(problem)
        self._states.drop_draft(attempt.assignment)
        self._warn(attempt, error)
        return 0

    def has_last_state(self, attempt: Attempt, checkpoint_step: int) -> bool:
        """Tell whether the state of an evaluation's last loss is there, copied, or written after so many losses."""
        return len(attempt.losses) in (attempt.copied_after, checkpoint_step)

    def has_written(self, assignment: Assignment) -> bool:
        """Tell whether there is a file with the state of an evaluation."""
        return self._states.has(assignment)

    def discard(self, assignment: Assignment) -> None:
        """Remove the state of an evaluation that has ended."""
        self._states.discard(assignment)

    def _warn(self, attempt: Attempt, reason: str) -> None:
        self.warn_once("states", f"the state of trial {attempt.assignment.number} cannot be saved: {reason}")

    def warn_once(self, what: str, text: str) -> None:
        """Warn of something, unless that has been done."""
        if what not in self._warned:
            warn(f"warning: {text}")
            self._warned.add(what)

    def is_due(self) -> bool:
        """Tell whether a state is to be written now."""
        every = self._every
        if every is None:
            every = max(_OFTEN_ENOUGH, _SHARE * (self._seconds_to_copy + self._seconds_to_write))
        return clock.now() - self._written >= every
