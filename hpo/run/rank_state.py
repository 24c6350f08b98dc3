"""The data of a rank when a run begins, and the data of the run that all ranks have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpo.options import Options
from hpo.problem import Problem
from hpo.process.user_frames import UserFrames
from hpo.store.manifest import Manifest
from hpo.store.run_dir import RunDir

if TYPE_CHECKING:
    from hpo.evaluation.host import Host
    from hpo.evaluation.trainer_slot import TrainerSlot
    from hpo.run.request import RunRequest


@dataclass(frozen=True)
class RankState:
    """The data of a rank after its search file is loaded and the options are checked."""

    request: RunRequest | None
    """The run to start; None on all ranks except the first."""
    problem: Problem
    host: Host
    slot: TrainerSlot

    @property
    def user_frames(self) -> UserFrames:
        """The filter that finds the lines of the user's own code in stack traces."""
        return UserFrames(self.problem.file.location)


@dataclass(frozen=True)
class RunContext:
    """The data of a run that all ranks have: the options, the manifest (content of run.json) and the run directory."""

    options: Options
    manifest: Manifest
    files: RunDir
