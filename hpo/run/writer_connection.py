"""How the leaders of a job record its evaluations: by calls to one writer, on the first rank."""

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
    """Yield the line to a writer, on all ranks, and the writer itself, on the first, which alone makes it; collective.

    All that is told inside ``with`` is durable behind it, if the ranks leave it together.
    """
    comm = job.world.copy()
    caller = RpcClient(comm)
    if make_writer is not None:
        writer, watch = make_writer(), job.watch
        answering = RpcServer(
            comm, writer, writer.commit_if_due, writer.batch_writes(), partial(abort_for_error, watch)
        )
        with answering:
            yield caller, writer
    else:
        yield caller, None
    comm.drop_messages()
