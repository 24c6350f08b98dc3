"""Teams: the ranks of several workers that evaluate one individual together, in a group of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpo.evaluation.host import Host
from hpo.evaluation.rank_group import RankGroup
from hpo.layout import Layout
from hpo.ranks.communicator import SleepingComm


class WorkerGroups:
    """Forms teams of workers; made by all ranks of the job together.

    `own` is the group of this rank's worker, `host` this rank's host, and `world` the communicator of all ranks, which
    the layout deals to workers; `join` lets this rank's watch know the group that it is in. A rank has one trainer, in
    whichever group it is.
    """

    def __init__(
        self, own: RankGroup, host: Host, world: SleepingComm, layout: Layout, join: Callable[[RankGroup], object]
    ) -> None:
        self._own_group = own
        self._host = host
        self._world = world
        self._layout = layout
        self._join = join

    @contextmanager
    def form_group(self, workers: Sequence[int]) -> Iterator[RankGroup]:
        """Bring workers together inside ``with``, in this order, in one group; collective among all of their ranks.

        One worker alone has its own group.
        """
        if len(workers) == 1:
            yield self._own_group
            return
        self._own_group.own_comm.barrier()  # MPI_Comm_create_group does not sleep while it waits
        members = self._world.group.Incl([rank for worker in workers for rank in self._layout.list_ranks(worker)])
        comm = SleepingComm(self._world.Create_group(members, tag=workers[0]))
        with RankGroup(comm, self._host, workers[0], self._own_group.patience, self._own_group.slot) as team:
            self._join(team)
            yield team
        comm.Free()
        self._join(self._own_group)
