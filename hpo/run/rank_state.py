"""The state of a rank before a run begins: its search file is loaded, its host is known, and so is the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.problem import Problem
from hpo.process.user_frames import UserFrames
from hpo.run.options import Options
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir

if TYPE_CHECKING:
    from hpo.evaluation.host import Host
    from hpo.evaluation.trainer_slot import TrainerSlot
    from hpo.run.request import RunRequest


@dataclass(frozen=True)
class RankState:
    """What a rank has once everything is checked; `request` is None on all ranks but the job's first."""

    request: RunRequest | None
    problem: Problem
    host: Host
    slot: TrainerSlot

    @property
    def user_frames(self) -> UserFrames:
        """What finds the user's lines in stacks."""
        return UserFrames(self.problem.file.location)


@dataclass(frozen=True)
class RunContext:
    """A run as all ranks know it: the options of this session, its manifest and its files."""

    options: Options
    manifest: Manifest
    files: RunDir
