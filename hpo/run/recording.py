"""How the leaders of a job record its evaluations: by calls to one writer, on the first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hpo.ranks.calls import Answering, Caller
from hpo.ranks.job import Job, die_of

if TYPE_CHECKING:
    from hpo.store.writer import Writer


@contextmanager
def recording(job: Job, make: Callable[[], Writer] | None) -> Iterator[tuple[Caller, Writer | None]]:
    """Yield the line to a writer, on all ranks, and the writer itself, on the first, which alone makes it; collective.

    All that is told inside ``with`` is durable behind it, if the ranks leave it together.
    """
    comm = job.world.copy()
    caller = Caller(comm)
    if make is not None:
        writer, watch = make(), job.watch
        answering = Answering(comm, writer, writer.settle, writer.writing(), partial(die_of, watch))
        with answering:
            yield caller, writer
    else:
        yield caller, None
    comm.drain()
