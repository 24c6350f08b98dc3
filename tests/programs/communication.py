"""Test the communicator on all ranks of a job. Each rank prints a line of JSON."""

import time

from mpi4py import MPI

from hpo.ranks.communicator import SleepingComm, get_world
from tests.programs.tell import tell

WAIT = 1.2

comm = get_world()
halves = SleepingComm(comm.Split(comm.rank % 2, comm.rank))
for part in (SleepingComm(MPI.COMM_SELF), halves, comm):
    assert part.allgather("x" * part.rank) == ["x" * rank for rank in range(part.size)]
    for root in range(part.size):
        assert part.bcast({"from": part.rank, "much": bytes(300_000)}, root)["from"] == root
    assert part.any(part.rank == part.size - 1)
    assert not part.any(False)
    part.barrier()

# Everybody sends a megabyte to everybody, itself included, before anybody receives: blocking sends
# would wait for ever.
for dest in range(comm.size):
    comm.send((comm.rank, bytes(1_000_000)), dest, tag=7)
half_of_them = [comm.recv(source=source, tag=7)[0] for source in range(comm.size // 2)]
assert half_of_them == list(range(comm.size // 2))
comm.drop_messages()
assert not comm.iprobe()
comm.barrier()

cpu = {}
for name, wait in (
    ("barrier", comm.barrier),
    ("bcast", lambda: comm.bcast(None)),
    ("allgather", lambda: comm.allgather(1)),
    ("drain", comm.drop_messages),
):
    comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        time.sleep(WAIT)
    before = time.process_time()
    wait()
    cpu[name] = time.process_time() - before

shares = {name: seconds / WAIT for name, seconds in cpu.items()}
tell(rank=comm.rank, cpu=shares)
