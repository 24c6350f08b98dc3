"""On each of 2 ranks, print the GPUs of its trainers: in its own worker, in a group of both workers, and back again."""

import json
import os
from typing import Any

from mpi4py import MPI

from hpo.evaluation.devices import Gpus
from hpo.evaluation.host import Host
from hpo.evaluation.rank_group import RankGroup
from hpo.evaluation.trainer_client import TrainerOptions
from hpo.evaluation.trainer_output import TrainerOutput
from hpo.evaluation.trainer_slot import TrainerSlot
from hpo.ranks.communicator import SleepingComm


class EmptySlot(TrainerSlot):
    """A slot whose trainers are not needed here."""

    trainer: Any = None


world = SleepingComm(MPI.COMM_WORLD)
os.environ["CUDA_VISIBLE_DEVICES"] = "7,5,3,1"
host = Host(world, world.rank)
host.gpus = Gpus(("a", "b", "c", "d"), ((0, 1), (2, 3))[world.rank])
no_template: Any = None
slot = EmptySlot(no_template, TrainerOutput(), TrainerOptions())
found = []
with (
    RankGroup(world.split(world.rank, 0), host, world.rank, 60.0, slot) as own,
    RankGroup(world.copy(), host, 0, 60.0, slot) as both,
):
    for group in (own, both, own):
        ticket: Any = group.connect()[0]
        found.append([slot.variables["CUDA_VISIBLE_DEVICES"], ticket["devices"]])
print(json.dumps({"rank": world.rank, "found": found}), flush=True)
