"""Test the priorities of requests to stop, on all ranks of a job.

Each rank prints a line of JSON.
"""

import os
import signal
import time

from hpo.errors import ExitStatus, StopRequest
from hpo.ranks.communicator import get_world, sleep_until
from hpo.ranks.rank_watch import RankWatch
from tests.programs.tell import tell

TARGET = StopRequest("the target is reached", ExitStatus.BUDGET_SPENT)

comm = get_world()
seen = []


def wait_for(watch, *reasons):
    """Wait until the run is stopping for one of these reasons, and record the reason."""
    sleep_until(lambda: watch.active_stop is not None and watch.active_stop.reason in reasons, 20)
    seen.append(watch.active_stop.reason if watch.active_stop else None)
    comm.barrier()


with RankWatch(comm) as watch:
    comm.barrier()
    if comm.rank == comm.size - 1:
        watch.stop_run(TARGET)
    wait_for(watch, TARGET.reason)
    watch.cancel_stop(TARGET)
    seen.append(watch.active_stop)
    comm.barrier()
    watch.stop_run(TARGET)  # its news may come late
    time.sleep(0.5)
    seen.append(watch.active_stop)
    comm.barrier()
    if comm.rank == comm.size - 1:
        watch.stop_run(StopRequest("another target", ExitStatus.BUDGET_SPENT))
    wait_for(watch, "another target")
    time.sleep(1.5)  # A second Ctrl-C after this time would end the job at once.
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGINT)
    wait_for(watch, "SIGINT")
    watch.stop_run(TARGET)
    watch.stop_run(StopRequest("another target", ExitStatus.BUDGET_SPENT))
    watch.cancel_stop(StopRequest("another target", ExitStatus.BUDGET_SPENT))
    wait_for(watch, "SIGINT")
tell(rank=comm.rank, seen=seen)
