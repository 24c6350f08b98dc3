"""Connect the leaders of a job to the writer of the study on the first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hpo.ranks.job import Job, abort_for_error
from hpo.ranks.rpc import RpcClient, RpcServer

if TYPE_CHECKING:
    from hpo.store.study_writer import StudyWriter


@contextmanager
def connect_writer(
    job: Job, make_writer: Callable[[], StudyWriter] | None
) -> Iterator[tuple[RpcClient, StudyWriter | None]]:
    """Create the writer of a study on the first rank, and yield a connection to it. Collective: call on all ranks.

    When all ranks have left the ``with`` block, the results of all calls in it are on disk.

    Args:
        make_writer: A function that returns the writer, on the first rank; None on other ranks.

    Yields:
        The connection to the writer; and the writer itself on the first rank, None on other ranks.
    """
    comm = job.world.copy()
    client = RpcClient(comm)
    if make_writer is not None:
        writer, watch = make_writer(), job.watch
        server = RpcServer(comm, writer, writer.commit_if_due, writer.batch_writes(), partial(abort_for_error, watch))
        with server:
            yield client, writer
    else:
        yield client, None
    comm.drop_messages()
