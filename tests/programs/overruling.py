"""What a stop overrules, and what it forgets, on all ranks of a job; prints a line of JSON from each rank."""

import os
import signal
import time

from hpo.errors import Exit, Stop
from hpo.ranks.communicator import sleep_until, world
from hpo.ranks.watch import Watch
from tests.programs.tell import tell

TARGET = Stop("the target is reached", Exit.BUDGET_SPENT)

comm = world()
seen = []


def wait_for(watch, *reasons):
    """Wait until the run is stopping for one of these reasons, and write down which."""
    sleep_until(lambda: watch.stopping is not None and watch.stopping.reason in reasons, 20)
    seen.append(watch.stopping.reason if watch.stopping else None)
    comm.barrier()


with Watch(comm) as watch:
    comm.barrier()
    if comm.rank == comm.size - 1:
        watch.stop(TARGET)
    wait_for(watch, TARGET.reason)
    watch.forget(TARGET)
    seen.append(watch.stopping)
    comm.barrier()
    watch.stop(TARGET)  # its news may come late
    time.sleep(0.5)
    seen.append(watch.stopping)
    comm.barrier()
    if comm.rank == comm.size - 1:
        watch.stop(Stop("another target", Exit.BUDGET_SPENT))
    wait_for(watch, "another target")
    time.sleep(1.5)  # a Ctrl-C that comes so late after another one would end the job at once
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGINT)
    wait_for(watch, "SIGINT")
    watch.stop(TARGET)
    watch.stop(Stop("another target", Exit.BUDGET_SPENT))
    watch.forget(Stop("another target", Exit.BUDGET_SPENT))
    wait_for(watch, "SIGINT")
tell(rank=comm.rank, seen=seen)
