"""Teams: the ranks of several workers that evaluate one individual together, in a group of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpo.evaluation.group import Group
from hpo.evaluation.host import Host
from hpo.layout import Layout
from hpo.ranks.communicator import SleepingComm


class Teams:
    """Forms teams of workers; made by all ranks of the job together.

    `own` is the group of this rank's worker, `host` this rank's host, and `world` the communicator of all ranks, which
    the layout deals to workers; `join` lets this rank's watch know the group that it is in. A rank has one trainer, in
    whichever group it is.
    """

    def __init__(
        self, own: Group, host: Host, world: SleepingComm, layout: Layout, join: Callable[[Group], object]
    ) -> None:
        self._own = own
        self._host = host
        self._world = world
        self._layout = layout
        self._join = join

    @contextmanager
    def of(self, workers: Sequence[int]) -> Iterator[Group]:
        """Bring workers together inside ``with``, in this order, in one group; collective among all of their ranks.

        One worker alone has its own group.
        """
        if len(workers) == 1:
            yield self._own
            return
        self._own.own_comm.barrier()  # MPI_Comm_create_group does not sleep while it waits
        members = self._world.group.Incl([rank for worker in workers for rank in self._layout.ranks_of(worker)])
        comm = SleepingComm(self._world.Create_group(members, tag=workers[0]))
        with Group(comm, self._host, workers[0], self._own.patience, self._own.slot) as team:
            self._join(team)
            yield team
        comm.Free()
        self._join(self._own)
