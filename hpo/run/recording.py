"""How the leaders of a job record its evaluations: by calls to one writer, on the first rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hpo.ranks.calls import Answering, Caller
from hpo.ranks.job import Job, die_of
from hpo.store.writer import Writer

# Seconds after which an objective that computes in Python lets the writer go on, which asks for it some three times for
# each call: with Python's own 5 ms, a claim of 200 workers took 82 ms beside such an objective (benchmarks/scale.py).
_SWITCH_INTERVAL = 5e-4


@contextmanager
def recording(job: Job, make: Callable[[], Writer]) -> Iterator[tuple[Caller, Writer | None]]:
    """Yield the line to a writer, on all ranks, and the writer itself, on the first, which makes it; collective.

    All that is told inside ``with`` is durable behind it, if the ranks leave it together.
    """
    comm = job.world.copy()
    caller = Caller(comm)
    if job.is_first:
        writer, watch = make(), job.watch
        answering = Answering(comm, writer, writer.settle, writer.writing(), watch.post.lock(), partial(die_of, watch))
        with _soon(), answering:
            yield caller, writer
    else:
        yield caller, None
    comm.drain()


@contextmanager
def _soon() -> Iterator[None]:
    """Let threads take turns more often inside ``with``."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
