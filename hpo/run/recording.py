"""How the leaders of a job record its evaluations: by calls to one writer, on the first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpo.ranks.calls import Answering, Calls
from hpo.ranks.job import Job
from hpo.store.writer import Writer


@contextmanager
def recording(job: Job, make: Callable[[], Writer]) -> Iterator[tuple[Calls, Writer | None]]:
    """Yield the line to a writer, on all ranks, and the writer itself, on the first, which makes it; collective.

    All that is told inside ``with`` is durable behind it, if the ranks leave it together.
    """
    comm = job.world.copy()
    calls = Calls(comm)
    if job.is_first:
        writer, watch = make(), job.watch
        with Answering(comm, writer, writer.settle, writer.writing(), watch.post.lock(), watch.die):
            yield calls, writer
    else:
        yield calls, None
    comm.drain()
