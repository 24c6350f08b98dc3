"""Checks of the communicator and of sharing, on all ranks of a job; prints a line of JSON from each rank."""

import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpo.ranks.communicator import SleepingComm, same_host, world
from hpo.ranks.sharing import Shared
from tests.programs.tell import tell

WAIT = 2.0

comm = world()
halves = SleepingComm(comm.Split(comm.rank % 2, comm.rank))
for part in (SleepingComm(MPI.COMM_SELF), halves, comm):
    assert part.allgather("x" * part.rank) == ["x" * rank for rank in range(part.size)]
    for root in range(part.size):
        assert part.bcast({"from": part.rank, "much": bytes(300_000)}, root)["from"] == root
    part.barrier()

# Everybody sends a megabyte to everybody, itself included, before anybody receives: blocking sends would wait for ever.
for dest in range(comm.size):
    comm.send((comm.rank, bytes(1_000_000)), dest, tag=7)
half_of_them = [comm.recv(source=source, tag=7)[0] for source in range(comm.size // 2)]
assert half_of_them == list(range(comm.size // 2))
comm.drain()
assert not comm.iprobe()
comm.barrier()

host = same_host(comm)


def turn() -> tuple[float, float]:
    start = time.monotonic()
    time.sleep(0.1)
    return start, time.monotonic()


turns = host.allgather(host.in_turns(2, turn))
at_once = max(sum(start <= moment < end for start, end in turns) for moment, _ in turns)

sent = Shared({"a": np.arange(100_003), "b": [np.ones((3, 5), np.float32), "text"]}, host)
shared = sent.load()
assert (shared["a"] == np.arange(100_003)).all()
assert (shared["b"][0] == 1).all()
assert shared["b"][1] == "text"
address = shared["a"].__array_interface__["data"][0]
maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
inode = next(f[3] + f[4] for f in maps if int(f[0].split("-")[0], 16) <= address < int(f[0].split("-")[1], 16))
host.barrier()
shared["a"][:] = host.rank  # a rank's writes are its own
host.barrier()
assert (shared["a"] == host.rank).all()
shared["b"].append("more")
again = sent.load()  # as it was first
assert (again["a"] == np.arange(100_003)).all()
assert again["b"][1:] == ["text"]

cpu = {}
for name, wait in (
    ("barrier", comm.barrier),
    ("bcast", lambda: comm.bcast(None)),
    ("allgather", lambda: comm.allgather(1)),
    ("drain", comm.drain),
):
    comm.barrier()
    if comm.rank == 0:
        time.sleep(WAIT)
    before = time.process_time()
    wait()
    cpu[name] = time.process_time() - before

shares = {name: seconds / WAIT for name, seconds in cpu.items()}
tell(rank=comm.rank, inode=inode, at_once=at_once, cpu=shares)
