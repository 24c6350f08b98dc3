"""What a rank has once its search file is loaded and its host is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.problem import Problem
from hpo.process.place import Places

if TYPE_CHECKING:
    from hpo.evaluation.host import Host
    from hpo.evaluation.trainer import TrainerSlot
    from hpo.run.request import Request


@dataclass(frozen=True)
class Ready:
    """What a rank has once everything is checked; `request` is None on all ranks but the job's first."""

    request: Request | None
    problem: Problem
    host: Host
    slot: TrainerSlot

    @property
    def places(self) -> Places:
        """What finds the user's lines in stacks."""
        return Places(self.problem.file.location)
