"""What the leader of a worker does to keep the states of its evaluations: when to copy them, when to write them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpo.evaluation.state import Parts, copied
from hpo.process import clock
from hpo.process.printed import warn
from hpo.store.states import About, State, States, read_state
from hpo.text import message

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.evaluation.attempt import Attempt
    from hpo.store.trials import Assignment

# Copying takes a hundredth of the time that training takes, and so does copying and writing together.
_SHARE = 100.0
_OFTEN_ENOUGH = 10.0  # seconds between two states that are written, where nobody has said another time


class Saver:
    """Keeps the states of a worker's evaluations, one after the other.

    The last state is copied in memory, to be written where the run stops, and written every `every` seconds; at a loss
    in both cases. Where `every` is None, both take a hundredth of the time, as measured; infinity is never. Where some
    on `islands` inherit from others, each state is copied, and that of an evaluation's end is written.
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
            read_state(path, assignment.params)
        except ValueError as error:
            self.reject(assignment, str(error))
            return None
        return path

    def parents(self, parent: int) -> Path:
        """Return the file of the state of one that is inherited from, by its first trial; raises ValueError without."""
        path = self._states.path(parent)
        read_state(path)
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

    def keep(self, attempt: Attempt, gathered: Parts | None, since: float) -> None:
        """Take over what all ranks have gathered of a state since a time, or copy what the objective has saved."""
        saved = attempt.saving
        try:
            parts = copied(saved) if gathered is None and isinstance(saved, Parts) else gathered
        except Exception as error:  # a device may fail, or memory be full
            self.can_copy = False
            self._warn(attempt, error)
            return
        assert parts is not None
        self._copied = clock.now()
        self._seconds_to_copy = self._copied - since
        assignment, losses, metrics = attempt.assignment, list(attempt.losses), dict(attempt.metrics)
        about = About(assignment.params, losses, metrics, attempt.seconds_in_all, parts.tree)
        attempt.state = State(about, parts.leaves, attempt.weights)

    def write(self, attempt: Attempt) -> int:
        """Write the last state of an evaluation, and return after how many losses it was saved.

        Returns 0 where nothing was written: if it was before, or if it cannot be, which is a warning.
        """
        if attempt.state is None:
            return 0
        since = clock.now()
        try:
            self._states.write(attempt.assignment, attempt.state)
            losses = len(attempt.state.about.losses)
        except Exception as error:  # the search is worth more than this file
            self._warn(attempt, error)
            losses = 0
        attempt.state = None
        self._written = clock.now()
        self._seconds_to_write = self._written - since
        return losses

    def has_last_state(self, attempt: Attempt, saved_after: int) -> bool:
        """Tell whether the state of an evaluation's last loss is there, copied, or written after so many losses."""
        copied = attempt.state is not None and len(attempt.state.about.losses) == len(attempt.losses)
        return copied or saved_after == len(attempt.losses)

    def has_written(self, assignment: Assignment) -> bool:
        """Tell whether there is a file with the state of an evaluation."""
        return self._states.has(assignment)

    def discard(self, assignment: Assignment) -> None:
        """Remove the state of an evaluation that has ended."""
        self._states.discard(assignment)

    def _warn(self, attempt: Attempt, error: Exception) -> None:
        self.warn_once("states", f"the state of trial {attempt.assignment.number} cannot be saved: {message(error)}")

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
