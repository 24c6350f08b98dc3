"""Groups of workers that evaluate one individual together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpo.evaluation.host import Host
from hpo.evaluation.rank_group import RankGroup
from hpo.layout import Layout
from hpo.ranks.communicator import SleepingComm


class WorkerGroups:
    """Forms groups of workers (groups of ranks that train one network). Collective: create it on all ranks.

    A rank uses the same trainer slot in each of its groups.

    Args:
        own: The ranks of this rank's worker.
        host: The host of this rank.
        world: Communicator of all ranks.
        layout: Assigns ranks to workers.
        join: Called with each group that this rank joins. It gives the group to the watch over this rank (a thread that
            handles signals and messages).
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
        """Yield one group with all ranks of these workers, in this order. Collective: call on all of these ranks.

        If there is one worker only, this is its own group.
        """
        if len(workers) == 1:
            yield self._own_group
            return
        # MPI_Comm_create_group uses a full core while it waits, so all ranks arrive before it.
        self._own_group.own_comm.barrier()
        members = self._world.group.Incl([rank for worker in workers for rank in self._layout.list_ranks(worker)])
        comm = SleepingComm(self._world.Create_group(members, tag=workers[0]))
        with RankGroup(comm, self._host, workers[0], self._own_group.patience, self._own_group.slot) as group:
            self._join(group)
            yield group
        comm.Free()
        self._join(self._own_group)
