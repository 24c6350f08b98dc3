"""A search whose objective changes everything in its process, and fails if it finds a change.

Every second evaluation also leaves a thread or closes a stream. Each evaluation notes its process
id. A file keeps the state that the first evaluation has found.
"""

import gc
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from hpo import Float, SearchSpace
from tests.searches.counting import count, note

space = SearchSpace(x=Float(0.0, 1.0))
SIGNALS = (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR2, signal.SIGURG)


def name_of(handler):
    """Return a name of a signal handler that is the same in all processes."""
    return getattr(handler, "__qualname__", str(handler))


def surroundings():
    mask = os.umask(0)
    os.umask(mask)
    return {
        "folder": Path.cwd(),
        "umask": mask,
        "environment": sorted(os.environ.items()),
        "path": list(sys.path),
        "signals": [name_of(signal.getsignal(number)) for number in SIGNALS],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "filters": list(warnings.filters),
        "garbage": gc.isenabled(),
        "sockets": socket.getdefaulttimeout(),
        "turns": sys.getswitchinterval(),
        "numpy": np.geterr(),
        "torch": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.benchmark,
        "streams": [(str(stream), stream.closed) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    }


def objective(params, worker):
    number = count(params, worker, ".")
    note(".", worker, process=os.getpid())
    now, known = (
        {name: str(value) for name, value in surroundings().items()},
        Path(f"before-{worker.rank}.json"),
    )
    if number == 0:
        known.write_text(json.dumps(now))
    before = json.loads(known.read_text())
    changed = [name for name in now if now[name] != before[name]]
    if changed:
        raise ValueError(f"not as it was: {changed}")
    os.chdir(tempfile.gettempdir())
    os.umask(0o077)
    os.environ["MESSY"] = "1"
    del os.environ["PATH"]
    sys.path = ["/nowhere", *sys.path]
    for ignored in (signal.SIGTERM, signal.SIGUSR2, signal.SIGURG):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, print)
    signal.setitimer(signal.ITIMER_REAL, 60)
    warnings.catch_warnings().__enter__()  # It replaces the list of filters.
    warnings.simplefilter("ignore")
    gc.disable()
    socket.setdefaulttimeout(0.001)
    sys.setswitchinterval(0.05)
    np.seterr(all="raise")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(1 + torch.get_num_threads())
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    if number % 4 == 1:
        threading.Thread(target=time.sleep, args=(3600,), name="blocked").start()
    if number % 4 == 3:
        sys.stdout.close()
    sys.stdout = sys.stderr = io.StringIO()
    yield params["x"]
