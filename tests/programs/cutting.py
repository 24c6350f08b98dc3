"""Ranks that exchange tensors leave at any moment, those that wait are cut; prints a line of JSON from each rank."""

import os
import random
import threading
import time
from contextlib import suppress

os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # as run_islands.py does

import torch
import torch.distributed as dist

from hpo.evaluation.group import Group
from hpo.evaluation.host import Host
from hpo.ranks.communicator import same_host, world
from tests.programs.tell import tell

KILOBYTES = [10, 16_000]
ROUNDS = 16  # of each

comm = world()
comes_out_after = []
with Host(same_host(comm)) as host, Group(comm.copy(), host, index=0, collective_timeout=20.0) as group:
    for turn in range(len(KILOBYTES) * ROUNDS):
        group.connect()  # collectives are checked in the first half
        if turn >= len(KILOBYTES) * ROUNDS / 2:
            group.trust()
        tensors = [torch.zeros(KILOBYTES[turn % len(KILOBYTES)] * 250) for _ in range(3)]
        moment = random.Random(turn).uniform(0.05, 0.2)
        leaving = threading.Event()

        def leave(leaving: threading.Event = leaving) -> None:
            leaving.set()
            group.cut()

        cutting = threading.Timer(moment, leave)
        started = time.monotonic()
        cutting.start()
        with suppress(RuntimeError):
            while not leaving.is_set():
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()
        comes_out_after.append(time.monotonic() - started - moment)
        cutting.join()
        comm.barrier()
        group.disconnect()

tell(rank=comm.rank, comes_out_after=comes_out_after)
