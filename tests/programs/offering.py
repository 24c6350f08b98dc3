"""Simulate workers of one rank that compute, request helpers and help others at random. Each prints a line of JSON.

A worker and its helpers communicate through their own communicator.
"""

import random
import sys
import time

from hpo.ranks.communicator import SleepingComm, get_world
from hpo.ranks.helper_matching import HelperMatching
from tests.programs.tell import tell

comm = get_world()
chance = random.Random(f"{sys.argv[1]}/{comm.rank}")
offers = HelperMatching(comm.copy())
led: list[tuple[str, int]] = []
helped: list[str] = []


def meet(workers, what):
    team = SleepingComm(comm.Create_group(comm.group.Incl(workers), tag=workers[0]))
    assert team.allgather(what) == [what] * len(workers)
    team.Free()


def help_others(*arguments):
    wanted = offers.wait_for_task(*arguments)
    if wanted is not None:
        workers, what = wanted
        helped.append(what)
        meet(workers, what)
    return wanted is not None


for piece in range(30):
    for _loss in range(chance.randrange(6)):
        time.sleep(chance.uniform(0, 0.003))
        reserved = [
            worker for worker in offers.find_helpers() if chance.random() < 0.7 and offers.reserve_helper(worker)
        ]
        begun = reserved[: chance.randrange(3)]
        released = [worker for worker in reserved if worker not in begun]
        offers.send_task(released, None)
        if begun:
            what = f"{comm.rank}/{piece}/{len(led)}"
            workers = [comm.rank, *begun]
            offers.send_task(begun, (workers, what))
            led.append((what, len(begun)))
            meet(workers, what)
    if chance.random() < 0.5:
        others = [rank for rank in range(comm.size) if chance.random() < 0.5]
        help_others(others, chance.uniform(0, 0.02))
offers.retire()
while help_others():
    pass
offers.close()
tell(rank=comm.rank, led=led, helped=helped)
